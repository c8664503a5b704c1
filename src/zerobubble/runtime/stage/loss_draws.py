"""Finds what `loss_fn` draws from generators that the stages of a cut model cannot share with it, as one device does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.values.python_places import GeneratorState
from zerobubble.runtime.values.python_state import PythonState, named_generators


@runtime_checkable
class SharesGenerators(Protocol):
    """A stage module that was cut from a model by `zb.split`."""

    def shared_generators(self) -> Iterable[GeneratorState]:
        """Returns the generators from which the code around the parts has drawn in the last forward, alike on all stages."""
        ...


class LossDraws:
    """The generators from which `loss_fn` may not draw on this rank, which runs the stage `last` of a cut model.

    These are the ones that stages share, since only this rank would draw more. If several ranks run `loss_fn`, each for other
    microbatches, these are all generators of Python, NumPy and `loss_fn`.
    """

    def __init__(self, loss_fn: object, last: nn.Module | None, *, on_several_ranks: bool) -> None:
        stage = None if last is None else stage_alone(last)
        self._last = stage if isinstance(stage, SharesGenerators) else None
        self._of_loss = PythonState(loss_fn) if on_several_ranks and self._last is not None else None

    @contextmanager
    def refused(self, note: Callable[[InputError], InputError]) -> Iterator[None]:
        """Context of a call of `loss_fn`. Notes and raises `InputError` at its end if the call has drawn from one of the generators."""
        watched = list(self._watched())
        before = [generator.read() for generator in watched]
        yield
        drawn = {generator.path for generator, content in zip(watched, before, strict=True) if generator.read() != content}
        if drawn:
            code = "the model's code between its parts draws from there, too, and only the last rank runs loss_fn"
            fault = InputError(
                "loss_fn draws random numbers from {generators}, but {reason}",
                generators=named_generators(drawn),
                reason=code if self._of_loss is None else "several ranks run loss_fn, each for other microbatches",
                remedy="draw them with torch's functions, without a generator of your own, or pass the numbers in the targets",
            )
            raise note(fault)

    def _watched(self) -> Iterable[GeneratorState]:
        if self._last is None:
            return ()
        return self._last.shared_generators() if self._of_loss is None else self._of_loss.generators().values()
