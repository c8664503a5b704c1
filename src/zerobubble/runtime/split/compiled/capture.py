"""Replays the passes of a traced stage as CUDA graphs: one launch per pass, however many kernels it has.

A CUDA graph reads and writes the same addresses on every replay. Two microbatches in flight must therefore not share a graph: the F of the
second would overwrite what the W of the first still reads. So each microbatch in flight has a slot with its own static memory and its own
graphs. Its F, B and W run in that slot, and the slot is reused after W. Inputs are copied into static memory, and results that leave the
stage are copied out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.device import interface

Part = Callable[[list[Any]], Sequence[Any]]
_WARM_UP = 2
"""Eager calls of a part before its capture. Libraries allocate workspaces and compilers tune kernels in them, which a capture forbids."""


class Slot:
    """The static memory and the graphs of one microbatch in flight. The graphs share a memory pool, since they run one after another.

    `is_complete` is True while every pass of the microbatch has run in this slot, so that its next pass finds its inputs here.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.recordings: WeakKeyDictionary[CapturedPart, _Recording] = WeakKeyDictionary()  # weak: dropping a trace frees its memory
        self.is_complete = False

    def storages(self) -> set[int]:
        """Returns the addresses of all storages in the slot."""
        values = [value for recording in self.recordings.values() for value in (*recording.inputs, *recording.outputs)]
        return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}


class CaptureSlots:
    """The slots of a stage. Call `enter` before each pass of a microbatch and `leave` after its last pass."""

    def __init__(self) -> None:
        self.now = Slot()
        self._of_microbatch: dict[int, Slot] = {}
        self._free: list[Slot] = []

    def enter(self, microbatch: int) -> None:
        """Selects the slot of `microbatch` for the passes that follow. The first pass of a microbatch is F."""
        if microbatch not in self._of_microbatch:
            slot = self._of_microbatch[microbatch] = self._free.pop() if self._free else Slot()
            slot.is_complete = True
        self.now = self._of_microbatch[microbatch]

    def leave(self, microbatch: int) -> None:
        """Frees the slot of `microbatch` after its last pass."""
        self._free.append(self._of_microbatch.pop(microbatch))

    def clear(self) -> None:
        """Frees the slots of all microbatches."""
        self._free += self._of_microbatch.values()
        self._of_microbatch.clear()


class CapturedPart:
    """A part of a stage's graph, captured once in each slot. The first `num_returned` of its results leave the stage.

    `fixed_tensors` returns the tensors that keep their addresses, such as parameters. If one is replaced, the part is captured again.
    Raises `InputError` if the part cannot be captured.
    """

    def __init__(self, part: Part, slots: CaptureSlots, num_returned: int, fixed_tensors: Callable[[], Sequence[Tensor]]) -> None:
        self._part = part
        self._slots = slots
        self._num_returned = num_returned
        self._fixed_tensors = fixed_tensors
        self._calls = 0

    def in_static_memory(self, tensors: list[Any]) -> list[Any]:
        """Copies `tensors` to where the part reads them, so that a later pass of the same microbatch finds them there."""
        recording = self._recording(tensors)
        return tensors if recording is None else recording.copy_in(tensors)

    def __call__(self, tensors: list[Any]) -> Sequence[Any]:
        recording = self._recording(tensors)
        if recording is None:
            self._slots.now.is_complete = False
            self._calls += 1
            return self._part(tensors)
        recording.copy_in(tensors)
        tensors.clear()
        recording.replay()
        leaving, staying = recording.outputs[: self._num_returned], recording.outputs[self._num_returned :]
        return [*[value.clone() if isinstance(value, Tensor) else value for value in leaving], *staying]

    def _recording(self, tensors: Sequence[Any]) -> _Recording | None:
        """Returns the recording for the current slot, None while the part runs eagerly."""
        slot = self._slots.now
        if self._calls < _WARM_UP or not slot.is_complete:
            return None
        recording = slot.recordings.get(self)
        if recording is None or not recording.fits(tensors):
            slot.recordings.pop(self, None)
            recording = slot.recordings[self] = self._record(slot, tensors)
        return recording

    def _record(self, slot: Slot, tensors: Sequence[Any]) -> _Recording:
        fixed = slot.storages() | {tensor.untyped_storage().data_ptr() for tensor in self._fixed_tensors()}
        inputs = [_static_memory_for(tensor, fixed) for tensor in tensors]
        try:
            slot.pool, replay, outputs = record(self._part, inputs, slot.pool)
        except RuntimeError as error:
            raise _refusal(str(error).strip().splitlines()[0]) from error
        if any(tensor.layout is not torch.strided for tensor in outputs if isinstance(tensor, Tensor)):
            raise _refusal("it returns a sparse tensor")
        both = enumerate(zip(tensors, inputs, strict=True))
        return _Recording(inputs, replay, outputs, tuple(position for position, (tensor, read) in both if tensor is not read))


class _Recording(NamedTuple):
    """A captured part. `replay` computes `outputs` from `inputs`, all in static memory. Inputs at the positions `copied_in` need a copy
    first.
    """

    inputs: list[Any]
    replay: Callable[[], object]
    outputs: Sequence[Any]
    copied_in: tuple[int, ...]

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Returns whether a replay is valid for these inputs."""
        for position, (new, static) in enumerate(zip(inputs, self.inputs, strict=True)):
            if not isinstance(new, Tensor):
                if new != static:
                    return False
            elif position in self.copied_in:
                if (new.shape, new.stride()) != (static.shape, static.stride()):
                    return False
            elif new.data_ptr() != static.data_ptr():
                return False
        return True

    def copy_in(self, inputs: Sequence[Any]) -> list[Any]:
        """Copies inputs into static memory where needed, and returns the tensors that the graph reads."""
        for position in self.copied_in:
            if inputs[position].data_ptr() != self.inputs[position].data_ptr():
                copy_into(self.inputs[position], inputs[position])
        both = enumerate(zip(inputs, self.inputs, strict=True))
        return [static if position in self.copied_in else new for position, (new, static) in both]


def record(part: Part, inputs: Sequence[Any], pool: Any) -> tuple[Any, Callable[[], object], Sequence[Any]]:
    """Captures `part` on static `inputs`. Returns the pool, a function that replays the graph, and the static outputs, valid after a
    replay.
    """
    device = next(value.device for value in inputs if isinstance(value, Tensor))
    return interface(device).capture(lambda: part(list(inputs)), pool)


def copy_into(static: Tensor, source: Tensor) -> None:
    """Copies `source` into a tensor of the same shape. Expanded dimensions (stride 0) are copied once."""
    once = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in static.stride()])
    static[once].copy_(source[once])


def _refusal(reason: str) -> InputError:
    return InputError(
        "a pass cannot be captured as a CUDA graph: {reason}; {remedy}", reason=str(reason), remedy="make the pipeline without cuda_graphs"
    )


def _static_memory_for(tensor: Any, fixed: set[int]) -> Any:
    """Returns the tensor a graph reads for an input: the input itself if its storage is fixed, else a copy with the same layout."""
    if not isinstance(tensor, Tensor) or tensor.untyped_storage().data_ptr() in fixed:
        return tensor
    static = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copy_into(static, tensor)
    return static
