"""A forward of which chosen submodules run twice: all else is kept, and what backward needs of their calls R computes again.

For the length of a step the `forward` of every chosen submodule is shadowed on the instance. In an F that is followed by R, its calls
leave a place for each tensor that autograd saves in them; R makes the calls once more, in order, and fills the places.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.measure.saving_hooks import saving_through
from zerobubble.runtime.split.layers.weight_work import pass_in_progress
from zerobubble.runtime.stage.found_state import FoundState
from zerobubble.runtime.values.hold import Hold, here
from zerobubble.runtime.values.payload import tensors_in

_CHECKPOINT = "torch.utils.checkpoint"
_LEAVE_OUT = "leave the module out of what the level computes again"


class _Here(threading.local):
    """The calls of the forward that this thread runs; None outside of one and within a chosen call, to which all in it belongs."""

    calls: ChosenCalls | None = None


_here = _Here()


@contextmanager
def shadowing(parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Around a step: the calls of these submodules, by name, that a `ChosenCalls` records are run in its way."""
    before = {part: part.__dict__.get("forward") for part in parts.values()}
    for name, part in parts.items():
        part.__dict__["forward"] = _recorded(name, part, part.forward)
    try:
        yield
    finally:
        for part, own in before.items():
            if own is None:
                part.__dict__.pop("forward", None)
            else:
                part.__dict__["forward"] = own


def _recorded(name: str, part: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        calls = _here.calls
        if calls is None or not torch.is_grad_enabled() or _is_in_checkpoint():
            return own(*args, **kwargs)
        return calls.run(_Call(f"{name!r} of stage {calls.index}", part, own, args, kwargs, calls.meter))

    return forward


def _is_in_checkpoint() -> bool:
    """Whether a checkpoint of the user's is around this call, and computes it again in B. Its hooks cannot be seen before torch 2.8."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class ChosenCalls:
    """The calls of chosen submodules in one forward of stage `index`, whose bytes `meter` counts."""

    def __init__(self, index: int, meter: Meter | None) -> None:
        self.index = index
        self.meter = meter
        self._calls: list[_Call] = []

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that are kept for R."""
        return [tensor for call in self._calls for tensor in call.inputs]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forward."""
        outside, _here.calls = _here.calls, self
        try:
            yield
        finally:
            _here.calls = outside

    def run(self, call: _Call) -> Any:
        """Make `call` for the first time: what it gives. Chosen submodules that it calls itself are a part of it."""
        outside, _here.calls = _here.calls, None
        try:
            output = call.run()
        finally:
            _here.calls = outside
        if call.is_needed:
            self._calls.append(call)
        return output

    def run_again(self) -> None:
        """R: make the calls again that anything goes back through, in the order in which they were made.

        Raises `InputError` for a call that has changed its input in place, and for one that saves something else than the first time.
        """
        while self._calls:
            self._calls.pop(0).run_again(self.meter)


class _Call:
    """One call of a chosen submodule: `where` names it, `own` is its forward."""

    def __init__(
        self,
        where: str,
        part: nn.Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        meter: Meter | None,
    ) -> None:
        self.inputs = tensors_in([args, kwargs])
        self._where = where
        self._own = own
        self._args = args
        self._kwargs = kwargs
        self._state = FoundState(part)
        self._autocasts = _autocasts_of(self.inputs)
        self._hold = _copy_of(here.hold)
        self._work = pass_in_progress()
        self._versions = [tensor._version for tensor in self.inputs]
        self._counted: list[Held] = [] if meter is None else [meter.hold(tensor) for tensor in self.inputs]
        self._places: list[weakref.ref[_Place]] = []

    @property
    def is_needed(self) -> bool:
        """Whether the backward pass comes to anything that this call leaves out."""
        return any(place() is not None for place in self._places)

    def run(self) -> Any:
        """The first run: what it gives."""
        places, where = self._places, self._where

        def leave_out(tensor: Tensor) -> _Place:
            place = _Place(where, tensor)
            places.append(weakref.ref(place))
            return place

        with saving_through(leave_out, _Place.tensor_in):
            output = self._own(*self._args, **self._kwargs)
        self._state.first_run_is_over()
        return output

    def run_again(self, meter: Meter | None) -> None:
        """The second run, which ends as soon as all is there that the backward pass comes to."""
        self._refuse_changed_inputs()
        places = [place() for place in self._places]
        filling = _Filling(places, meter)
        if not filling.num_needed:
            return
        try:
            with self._found_again(), saving_through(filling.fill, _refuse_to_go_back):
                self._own(*self._args, **self._kwargs)
        except _AllIsThereError:
            return
        first, again = len(self._places), filling.num_filled
        raise InputError(f"{self._where} saved {first} tensors for its backward, and {again} when it was computed again: {_LEAVE_OUT}")

    @contextmanager
    def _found_again(self) -> Iterator[None]:
        """Inside, all is as the first run found it: random numbers, buffers, autocast, what is on its way, and the pass it belongs to."""
        outside, here.hold = here.hold, self._hold
        try:
            with self._state.again(), _autocast_as(self._autocasts), self._work or nullcontext():
                yield
        finally:
            here.hold = outside

    def _refuse_changed_inputs(self) -> None:
        for tensor, version in zip(self.inputs, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"the input of {self._where}, a {tuple(tensor.shape)} {tensor.dtype}, was changed in place, so that it cannot be "
                    f"computed again: let whoever changes it work on x.clone(), or {_LEAVE_OUT}"
                )


class _Place:
    """Where autograd finds a tensor that it saved in a chosen call of the module `where`, from R on."""

    __slots__ = ("__weakref__", "_form", "_kept", "_version", "_where")

    def __init__(self, where: str, left_out: Tensor) -> None:
        self._where = where
        self._form = _form_of(left_out)
        self._kept: Held | Tensor | None = None
        self._version = 0

    def keep(self, tensor: Tensor, meter: Meter | None) -> None:
        """Have `tensor` here, apart from the graph of the second run. Raises `InputError` for one unlike that of the first."""
        if _form_of(tensor) != self._form:
            raise InputError(
                f"{self._where} saved a {self._form} for its backward, and a {_form_of(tensor)} when it was computed again: {_LEAVE_OUT}"
            )
        apart = tensor.detach()
        self._version = apart._version
        self._kept = apart if meter is None else meter.hold(apart)

    def tensor_in(self) -> Tensor:
        """What is here. Raises `InputError` before R, and as autograd does where somebody has changed the tensor in place since."""
        if self._kept is None:
            raise InputError(
                f"gradients are asked for within the forward that go back through {self._where}, which keeps nothing to go back by: "
                f"{_LEAVE_OUT}"
            )
        tensor = self._kept.tensor if isinstance(self._kept, Held) else self._kept
        if tensor._version != self._version:
            raise InputError(
                f"a {tuple(tensor.shape)} {tensor.dtype} that the backward of {self._where} needs was changed in place after it was saved: "
                "let the change work on x.clone()"
            )
        return tensor


class _AllIsThereError(BaseException):
    """Ends a second run that has saved all that is needed; no `except Exception` of a model stops it."""


class _Filling:
    """Puts what a second run saves into the `places` that the first run left, None for those that nobody needs any more."""

    def __init__(self, places: Sequence[_Place | None], meter: Meter | None) -> None:
        self.num_needed = max((number for number, place in enumerate(places, 1) if place is not None), default=0)
        self.num_filled = 0
        self._places = places
        self._meter = meter

    def fill(self, tensor: Tensor) -> None:
        """The next tensor is saved."""
        place = self._places[self.num_filled]
        self.num_filled += 1
        if place is not None:
            place.keep(tensor, self._meter)
        if self.num_filled == self.num_needed:
            raise _AllIsThereError


def _refuse_to_go_back(_: None) -> Tensor:
    raise InputError(f"a module asks for gradients within its own forward, and cannot be computed again: {_LEAVE_OUT}")


def _form_of(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _copy_of(hold: Hold) -> Hold:
    """A hold with the same on its way, for a second run whose stashes and losses nobody takes."""
    copy = Hold(hold.stage, dict(hold.stashed), trains=hold.trains)
    copy.popped = set(hold.popped)
    copy.losses = {} if hold.losses is None else dict(hold.losses)
    return copy


class _Autocast(NamedTuple):
    """What autocast is for one kind of device."""

    kind: str
    enabled: bool
    dtype: torch.dtype
    cached: bool


def _autocasts_of(tensors: Sequence[Tensor]) -> list[_Autocast]:
    """What autocast is here, for the CPU and the devices of `tensors`: a module may turn it on or off around a call."""
    kinds = sorted({"cpu", *(tensor.device.type for tensor in tensors)})
    cached = torch.is_autocast_cache_enabled()
    return [_Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached) for kind in kinds]


@contextmanager
def _autocast_as(wanted: Sequence[_Autocast]) -> Iterator[None]:
    """Inside, autocast is what it was in the first run; where it is so already, as around a whole step, its copies of weights serve on."""
    with ExitStack() as stack:
        for kind, enabled, dtype, cached in wanted:
            if (enabled, enabled and dtype) != (now := torch.is_autocast_enabled(kind), now and torch.get_autocast_dtype(kind)):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
        yield
