"""What slices of a sequence leave to later slices of their microbatch on a stage: keys and values, counts of tokens, and gradients.

A `JoinSlices` module in a stage writes what it is given into a buffer for the whole sequence, and returns the part of the buffer up to its
slice. Slices share the buffer: nothing is copied twice, and what autograd saves of a slice is a view. The gradient for earlier slices is
summed in a second buffer. The backward passes of a microbatch run in reverse order of its slices, so the sum for a slice is complete when
its own backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zerobubble.errors import InputError
from zerobubble.ir import Op
from zerobubble.kinds import ValueKind, traits_of

Work = Callable[[Any], object]
Prove = Callable[[list[Any], Callable[[int], AbstractContextManager[None]]], None]


class _Now(NamedTuple):
    """The slice that a pass computes on a stage, whether the pass is a forward (F or R), and the modules that it has called.

    With `only_shapes`, modules run to find out the shapes of what they return.
    """

    slices: StageSlices
    number: int
    is_forward: bool
    called: set[int]
    only_shapes: bool = False


_now: _Now | None = None


class _Shared:
    """The buffer of one `JoinSlices` for one microbatch, by slice where it begins and ends, and the gradient of all of it."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.values: Tensor | None = None
        self.gradients: Tensor | None = None
        self.ends: list[int] = [0]
        self.pending: set[int] = set()

    def place(self, number: int, length: int) -> tuple[int, int]:
        """Returns where a slice of this length begins and ends."""
        if number + 1 == len(self.ends):
            self.ends.append(self.ends[number] + length)
        start, end = self.ends[number : number + 2]
        if end - start != length:
            raise InputError("a slice has {got} tokens in one call and {expected} in another", got=length, expected=end - start)
        return start, end

    def write(self, number: int, value: Tensor, count: int) -> Tensor:
        """Writes the value of a slice, and returns the values of all slices up to it."""
        start, end = self.place(number, value.size(self.dim))
        if self.values is None or self.values.size(self.dim) < end:
            self._grow(value, start, max(end, count * value.size(self.dim)))
        assert self.values is not None
        # `.data` has its own version counter: what autograd saved of earlier slices is not changed by writing behind it.
        self.values.data.narrow(self.dim, start, end - start).copy_(value)
        return self.values.data.narrow(self.dim, 0, end)

    def _grow(self, value: Tensor, start: int, size: int) -> None:
        grown = value.new_empty((*value.shape[: self.dim], size, *value.shape[self.dim + 1 :]))
        if self.values is not None:
            grown.narrow(self.dim, 0, start).copy_(self.values.narrow(self.dim, 0, start))
        self.values = grown

    def take_gradient(self, number: int, gradient: Tensor) -> Tensor:
        """Returns the gradient of a slice's own value, from that of all values up to it; the rest is kept for the slices before."""
        start, end = self.ends[number], self.ends[number + 1]
        self.pending.discard(number)
        of_values = gradient.narrow(self.dim, start, end - start)
        if self.gradients is not None:
            of_values = of_values + self.gradients.narrow(self.dim, start, end - start)
        if start:
            before = gradient.narrow(self.dim, 0, start)
            if self.gradients is None:
                self.gradients = before.clone()
            else:
                self.gradients = self.gradients.narrow(self.dim, 0, start).add_(before)
        return of_values


class StageSlices:
    """What slices leave to later ones on one stage, for all microbatches in flight; `count` is the number of slices of a microbatch.

    `prove(pieces, in_slice)` gets the inputs of all slices of the first microbatch; see `slice_proof.prove_slices`.
    """

    def __init__(self, stage: int, count: int, trains: bool, prove: Prove) -> None:
        self.stage = stage
        self.count = count
        self._trains = trains
        self._prove = prove
        self._inputs: list[Any] | None = []
        self._shared: dict[int, dict[int, _Shared]] = {}

    def wrap(self, op: Op, work: Work) -> Work:
        """Returns `work`, the work of a pass, in the context of its slice."""
        makes = traits_of(op.kind).makes
        is_forward = ValueKind.SAVED in makes or ValueKind.ACTIVATION in makes
        is_backward = ValueKind.GRADIENT in makes
        is_first_forward = ValueKind.ACTIVATION in makes and op.microbatch < self.count

        def in_slice(taken: Any) -> object:
            if is_first_forward and self._inputs is not None:
                self._note(taken)
            with self._pass(op.microbatch, is_forward):
                result = work(taken)
            if is_backward:
                self._end_backward(op.microbatch)
            elif not self._trains and (op.microbatch + 1) % self.count == 0:
                self._shared.pop(op.microbatch // self.count, None)
            return result

        return in_slice

    def _note(self, inputs: Any) -> None:
        """Keeps the inputs of a slice of the first microbatch, and proves the stage once all are there."""
        assert self._inputs is not None
        self._inputs.append(inputs)
        if len(self._inputs) == self.count:
            pieces, self._inputs = self._inputs, None
            trial = StageSlices(self.stage, self.count, False, self._prove)
            self._prove(pieces, lambda piece: trial._pass(piece, is_forward=True))

    @contextmanager
    def _pass(self, number: int, is_forward: bool) -> Iterator[None]:
        global _now
        before, _now = _now, _Now(self, number, is_forward, set())
        try:
            yield
        finally:
            _now = before

    def _end_backward(self, number: int) -> None:
        """Frees the buffers behind the first slice. Raises `InputError` if a gradient from later slices has not reached this one."""
        whole, piece = divmod(number, self.count)
        shared = self._shared.get(whole, {})
        if any(piece in values.pending and values.gradients is not None for values in shared.values()):
            raise InputError(
                "stage {stage} leaves keys of slice {slice} to later slices, but its own outputs do not depend on them, so their gradient "
                "is lost",
                stage=self.stage,
                slice=piece,
                remedy="use the joined values in the slice itself, as causal attention does",
            )
        if piece == 0:
            self._shared.pop(whole, None)

    def shared(self, module: nn.Module, number: int, dim: int) -> _Shared:
        """Returns the buffer of a module for the microbatch of slice `number`."""
        return self._shared.setdefault(number // self.count, {}).setdefault(id(module), _Shared(dim))

    def clear(self) -> None:
        """Drops what microbatches in flight have left."""
        self._shared.clear()
        if self._inputs:
            self._inputs = []


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, shared: _Shared, piece: int, count: int) -> Tensor:
        ctx.shared, ctx.piece = shared, piece
        return shared.write(piece, value.detach(), count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shared.take_gradient(ctx.piece, gradient), None, None, None


def join(module: nn.Module, value: Tensor, dim: int) -> Tensor:
    """Returns `value` behind the values that `module` was given for earlier slices, along `dim`; `value` itself outside of slices."""
    if _now is None:
        return value
    now, dim = _now, dim % value.dim()
    shared, piece = now.slices.shared(module, now.number, dim), now.number % now.slices.count
    if now.only_shapes or isinstance(value, FakeTensor) or value.is_meta:
        start, end = shared.place(piece, value.size(dim))
        return torch.cat([value] + [value.narrow(dim, 0, 1)] * start, dim) if end else value
    if now.is_forward and id(module) in now.called:
        raise InputError(
            "a {kind} is called twice in one forward of stage {stage}",
            kind=type(module).__name__,
            stage=now.slices.stage,
            remedy="use one for each",
        )
    now.called.add(id(module))
    if torch.is_grad_enabled() and value.requires_grad:
        shared.pending.add(piece)
    joined: Tensor = _Join.apply(value, shared, piece, now.slices.count)  # type: ignore[no-untyped-call]
    return joined


@contextmanager
def only_shapes() -> Iterator[None]:
    """A context in which modules run to find out shapes: what they are given is not kept for later slices."""
    global _now
    before = _now
    if _now is not None:
        _now = _now._replace(only_shapes=True)
    try:
        yield
    finally:
        _now = before


def is_in_slices() -> bool:
    """Whether a pass of a slice runs."""
    return _now is not None


def tokens_before(module: nn.Module, length: int) -> int:
    """Returns the number of tokens in earlier slices, as `module` counts them; this slice has `length`. It is 0 outside of slices."""
    if _now is None:
        return 0
    shared, piece = _now.slices.shared(module, _now.number, 0), _now.number % _now.slices.count
    return shared.place(piece, length)[0]
