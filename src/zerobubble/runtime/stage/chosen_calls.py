"""Selective recomputation: R recomputes the calls of chosen submodules; all other activations are kept.

During a step, the `forward` of every chosen submodule is shadowed on the instance. In an F that is followed by R, hooks on saved tensors
replace every tensor that autograd saves inside such a call by an empty placeholder. R repeats the calls in order, and the hooks fill the
placeholders in the order in which tensors are saved. So the graph from F is the one that backward uses; the graph from R is discarded.

This is correct only if both runs save the same tensors in the same order. The second run therefore starts from the same random state,
buffers and autocast settings, and the shape and dtype of every tensor are checked. It stops after the last tensor that backward needs.
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
from zerobubble.runtime.measure.memory_meter import Held, Meter, saving_through
from zerobubble.runtime.split.layers.weight_work import pass_in_progress
from zerobubble.runtime.stage.forward_state import ForwardState
from zerobubble.runtime.values.hold import Hold, here
from zerobubble.runtime.values.parameter_hooks import without_new_hooks
from zerobubble.runtime.values.payload import tensors_in
from zerobubble.runtime.values.python_state import PythonState

_CHECKPOINT = "torch.utils.checkpoint"
_LEAVE_OUT = "leave the module out of the recompute level"


class _ActiveCalls(threading.local):
    """The calls recorded in this thread's forward; None outside of a forward, and inside of a chosen call, which includes nested ones."""

    calls: ChosenCalls | None = None


_active = _ActiveCalls()


@contextmanager
def shadowing(parts: Mapping[str, nn.Module], state_of: Callable[[nn.Module], PythonState]) -> Iterator[None]:
    """Shadows the forward of these submodules during a step, so that a `ChosenCalls` can record their calls.

    `state_of` returns the Python state of a submodule.
    """
    before = {part: part.__dict__.get("forward") for part in parts.values()}
    for name, part in parts.items():
        part.__dict__["forward"] = _recorded(name, part, part.forward, state_of)
    try:
        yield
    finally:
        for part, forward in before.items():
            if forward is None:
                part.__dict__.pop("forward", None)
            else:
                part.__dict__["forward"] = forward


def _recorded(name: str, part: nn.Module, original: Callable[..., Any], state_of: Callable[[nn.Module], PythonState]) -> Callable[..., Any]:
    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        calls = _active.calls
        if calls is None or not torch.is_grad_enabled() or _is_in_checkpoint():
            return original(*args, **kwargs)
        state = ForwardState(part, state_of(part))
        return calls.run(_Call(f"{name!r} of stage {calls.index}", state, original, args, kwargs, calls.meter))

    return forward


def _is_in_checkpoint() -> bool:
    """Returns whether the call is inside of a user's checkpoint, which recomputes it in B. Before torch 2.8, its hooks are not visible."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class ChosenCalls:
    """The calls of chosen submodules in one forward of stage `index`; `meter` counts their bytes."""

    def __init__(self, index: int, meter: Meter | None) -> None:
        self.index = index
        self.meter = meter
        self._calls: list[_Call] = []

    @property
    def inputs(self) -> list[Tensor]:
        """Returns the tensors kept for R."""
        return [tensor for call in self._calls for tensor in call.inputs]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the calls of a forward."""
        outside, _active.calls = _active.calls, self
        try:
            yield
        finally:
            _active.calls = outside

    def run(self, call: _Call) -> Any:
        """Runs `call` for the first time and returns its output. Chosen submodules that it calls itself are part of it."""
        outside, _active.calls = _active.calls, None
        try:
            output = call.run()
        finally:
            _active.calls = outside
        if call.is_needed:
            self._calls.append(call)
        return output

    def recompute(self) -> None:
        """R: recomputes the calls that backward needs, in their original order.

        Raises `InputError` for a call that changed its input in place, and for one that saves other tensors than in F.
        """
        while self._calls:
            self._calls.pop(0).recompute(self.meter)


class _Call:
    """A call of a chosen submodule: `where` names it, `state` is the state before it, `forward` is its forward."""

    def __init__(
        self,
        where: str,
        state: ForwardState,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        meter: Meter | None,
    ) -> None:
        self.inputs = tensors_in([args, kwargs])
        self._where = where
        self._forward = forward
        self._args = args
        self._kwargs = kwargs
        self._state = state
        self._autocasts = _autocasts_of(self.inputs)
        self._hold = _copy_of(here.hold)
        self._work = pass_in_progress()
        self._versions = [tensor._version for tensor in self.inputs]
        self._counted: list[Held] = [] if meter is None else [meter.hold(tensor) for tensor in self.inputs]
        self._places: list[weakref.ref[_Placeholder]] = []

    @property
    def is_needed(self) -> bool:
        """Whether the backward pass needs any tensor of this call."""
        return any(place() is not None for place in self._places)

    def run(self) -> Any:
        """Runs the call for the first time and returns its output."""
        places, where = self._places, self._where

        def leave_out(tensor: Tensor) -> _Placeholder:
            place = _Placeholder(where, tensor)
            places.append(weakref.ref(place))
            return place

        with saving_through(leave_out, _Placeholder.tensor_in):
            output = self._forward(*self._args, **self._kwargs)
        self._state.end_first_run(self._where, _LEAVE_OUT)
        return output

    def recompute(self, meter: Meter | None) -> None:
        """Runs the call a second time, until all tensors that the backward pass needs are saved."""
        self._refuse_changed_inputs()
        places = [place() for place in self._places]
        filling = _Filling(places, meter)
        if not filling.num_needed:
            return
        try:
            with self._restored(), saving_through(filling.fill, _refuse_backward), without_new_hooks(self.inputs):
                self._forward(*self._args, **self._kwargs)
        except _AllSavedError:
            return
        first, second = len(self._places), filling.num_filled
        message = "{where} saved {first} tensors for its backward, and {second} when it was recomputed: {remedy}"
        raise InputError(message, where=self._where, first=first, second=second, remedy=_LEAVE_OUT)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restores the state of the first run: random and Python state, buffers, autocast, carried values, and the current pass."""
        outside, here.hold = here.hold, self._hold
        try:
            with self._state.restored(), _autocast_as(self._autocasts), self._work or nullcontext():
                yield
        finally:
            here.hold = outside

    def _refuse_changed_inputs(self) -> None:
        for tensor, version in zip(self.inputs, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    "the input of {where}, a {shape} {dtype}, was changed in place, so that it cannot be recomputed",
                    where=self._where,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype),
                    remedy=f"change a copy (x.clone()) instead, or {_LEAVE_OUT}",
                )


class _Placeholder:
    """Stands for a tensor that autograd saved in a chosen call of the module `where`; filled by R."""

    __slots__ = ("__weakref__", "_form", "_kept", "_version", "_where")

    def __init__(self, where: str, left_out: Tensor) -> None:
        self._where = where
        self._form = _form_of(left_out)
        self._kept: Held | Tensor | None = None
        self._version = 0

    def keep(self, tensor: Tensor, meter: Meter | None) -> None:
        """Stores `tensor`, detached. Raises `InputError` if its shape or dtype differ from the first run."""
        if _form_of(tensor) != self._form:
            message = "{where} saved a {saved} for its backward, and a {recomputed} when it was recomputed: {remedy}"
            raise InputError(message, where=self._where, saved=self._form, recomputed=_form_of(tensor), remedy=_LEAVE_OUT)
        detached = tensor.detach()
        self._version = detached._version
        self._kept = detached if meter is None else meter.hold(detached)

    def tensor_in(self) -> Tensor:
        """Returns the tensor. Raises `InputError` before R, and if the tensor was changed in place since, as autograd does."""
        if self._kept is None:
            raise InputError(
                "the forward computes gradients through {where}, which has saved no tensors: {remedy}", where=self._where, remedy=_LEAVE_OUT
            )
        tensor = self._kept.tensor if isinstance(self._kept, Held) else self._kept
        if tensor._version != self._version:
            message = "a {shape} {dtype} that the backward of {where} needs was changed in place after it was saved"
            raise InputError(
                message, shape=tuple(tensor.shape), dtype=str(tensor.dtype), where=self._where, remedy="change a copy (x.clone()) instead"
            )
        return tensor


class _AllSavedError(BaseException):
    """Ends a second run when it has saved all tensors needed. A BaseException, so that no `except Exception` in a model catches it."""


class _Filling:
    """Fills the `places` of the first run with the tensors that a second run saves; None stands for a place no longer needed."""

    def __init__(self, places: Sequence[_Placeholder | None], meter: Meter | None) -> None:
        self.num_needed = max((number for number, place in enumerate(places, 1) if place is not None), default=0)
        self.num_filled = 0
        self._places = places
        self._meter = meter

    def fill(self, tensor: Tensor) -> None:
        """Stores the next saved tensor."""
        place = self._places[self.num_filled]
        self.num_filled += 1
        if place is not None:
            place.keep(tensor, self._meter)
        if self.num_filled == self.num_needed:
            raise _AllSavedError


def _refuse_backward(_: None) -> Tensor:
    raise InputError("a module computes gradients within its own forward, and cannot be recomputed: {remedy}", remedy=_LEAVE_OUT)


def _form_of(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _copy_of(hold: Hold) -> Hold:
    """Returns a copy of the carried values for a second run, whose own stashes and losses are discarded."""
    copy = Hold(hold.stage, dict(hold.stashed), trains=hold.trains)
    copy.popped = set(hold.popped)
    copy.losses = {} if hold.losses is None else dict(hold.losses)
    return copy


class _Autocast(NamedTuple):
    """The autocast settings for one device type."""

    kind: str
    enabled: bool
    dtype: torch.dtype
    cached: bool


def _autocasts_of(tensors: Sequence[Tensor]) -> list[_Autocast]:
    """Returns the autocast settings for the CPU and the devices of `tensors`. A module may change them around a call."""
    kinds = sorted({"cpu", *(tensor.device.type for tensor in tensors)})
    cached = torch.is_autocast_cache_enabled()
    return [_Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached) for kind in kinds]


@contextmanager
def _autocast_as(wanted: Sequence[_Autocast]) -> Iterator[None]:
    """Restores the autocast settings of the first run. If they are active already, autocast's cached copies of weights stay in use."""
    with ExitStack() as stack:
        for kind, enabled, dtype, cached in wanted:
            if (enabled, enabled and dtype) != (now := torch.is_autocast_enabled(kind), now and torch.get_autocast_dtype(kind)):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
        yield
