"""Finds what `loss_fn` sets of a cut model, or of variables, that forwards read: on one device, the next forward reads the new value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import is_grad_enabled, nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.stage.cut_model import CutModel
from zerobubble.runtime.stage.set_attributes import ReadState, SetsElsewhere
from zerobubble.runtime.values.python_places import Attributes, Place, Slots
from zerobubble.runtime.values.python_state import PythonState, changed, global_generators, put_back
from zerobubble.runtime.values.stored import is_a


class LossWrites:
    """What `loss_fn` may not set on this rank, which runs the stage `last` of `cut_model`, since forwards of other stages read it.

    If several ranks run `loss_fn`, each for other microbatches, this includes what only `last` reads.
    """

    def __init__(self, cut_model: CutModel, last: nn.Module | None, *, on_several_ranks: bool) -> None:
        self._cut_model = cut_model
        stage = None if last is None else stage_alone(last)
        self._last = stage if isinstance(stage, SetsElsewhere) else None
        self._on_several_ranks = on_several_ranks
        self._read: ReadState | None = None
        self._state: PythonState | None = None
        self._leaves_out_others = True

    @contextmanager
    def refused(self, note: Callable[[InputError], InputError]) -> Iterator[None]:
        """Context of a call of `loss_fn`. If the call has set any, undoes that, and notes and raises `InputError` at its end."""
        state = self._read_by_forwards()
        before = None if state is None else state.snapshot()
        yield
        if state is None or before is None or not state.update():
            return
        names = sorted(name for name, place in changed(before).items() if self._is_read(name, place))
        if names:
            put_back(before)
            raise note(
                InputError(
                    "{function} sets {names}, which forwards read, but only the rank of the last stage calls it and gets the new values",
                    function=self._cut_model.loss_name,
                    names=", ".join(map(repr, names)),
                    remedy="set it in the loop after the step, on all ranks",
                )
            )

    def _read_by_forwards(self) -> PythonState | None:
        """Returns the state that forwards have read so far, None without any."""
        if self._last is None:
            return None
        read, leaves_out = self._last.read_elsewhere(includes_own=self._on_several_ranks), is_grad_enabled() or self._cut_model.is_released
        if read is not self._read or leaves_out != self._leaves_out_others:
            self._read, self._leaves_out_others = read, leaves_out
            self._state = PythonState(*read.places, left_out=self._left_out()) if read.places else None
        return self._state

    def _is_read(self, name: str, place: Place) -> bool:
        """Returns whether forwards may read what has changed. Of an object, they read the attributes that code of the user names."""
        assert self._read is not None
        assert self._state is not None
        return not isinstance(place, (Attributes, Slots)) or name.rpartition(".")[2] in self._read.names | self._state.names

    def _left_out(self) -> list[object]:
        """Returns the modules of the model, tensors that `loss_fn` cannot use, and global generators.

        In an evaluation, it can use other ranks' tensors until they are released.
        """
        own, modules = self._cut_model.of_stages(), [module for model in self._cut_model.models for module in model.modules()]
        named = self._cut_model.tensors()
        tensors = [tensor for name, tensor in named if (self._leaves_out_others and name not in own) or is_a(tensor, nn.Parameter)]
        return [*modules, *tensors, *global_generators()]
