"""Passes of a traced stage replayed as CUDA graphs: the device gets a pass in one call, however many kernels it has.

A graph reads and writes the same memory each time. A microbatch in flight therefore has a slot: what its F saves lies there until its W
has read it, and then the slot serves another one. Only what leaves the stage is copied out, and what comes to it is copied in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zerobubble.errors import InputError

Part = Callable[[list[Any]], Sequence[Any]]
_WARM_UP = 2
"""Calls of a part before it is captured: libraries make their workspaces and compilers choose their kernels in them."""


class Slot:
    """The static memory of one microbatch in flight, and the graphs of its passes, which share a pool: they run one after another.

    `has_all` tells whether every pass of the microbatch so far has run in the slot, so that its next pass finds there what it reads.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.recordings: WeakKeyDictionary[CapturedPart, _Recording] = WeakKeyDictionary()  # a trace that is dropped frees its memory
        self.has_all = False

    def storages(self) -> set[int]:
        """The storages that lie in the slot."""
        values = [value for recording in self.recordings.values() for value in (*recording.inputs, *recording.outputs)]
        return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}


class Slots:
    """The slots of a stage. `enter` before each pass of a microbatch, `leave` after its last."""

    def __init__(self) -> None:
        self.now = Slot()
        self._of_microbatch: dict[int, Slot] = {}
        self._free: list[Slot] = []

    def enter(self, microbatch: int) -> None:
        """Let the passes that run now be those of `microbatch`, whose first is F."""
        if microbatch not in self._of_microbatch:
            slot = self._of_microbatch[microbatch] = self._free.pop() if self._free else Slot()
            slot.has_all = True
        self.now = self._of_microbatch[microbatch]

    def leave(self, microbatch: int) -> None:
        """`microbatch` has been through its last pass."""
        self._free.append(self._of_microbatch.pop(microbatch))

    def clear(self) -> None:
        """No microbatch is in flight."""
        self._free += self._of_microbatch.values()
        self._of_microbatch.clear()


class CapturedPart:
    """A part of a stage's graph that is captured in each slot it runs in. Of its results the first `num_leaving` leave the stage.

    `stays` are tensors that stay where they are, such as parameters; where one is replaced, the part is captured anew. Raises `InputError`
    for what no CUDA graph can hold.
    """

    def __init__(self, part: Part, slots: Slots, num_leaving: int, stays: Callable[[], Sequence[Tensor]]) -> None:
        self._part = part
        self._slots = slots
        self._num_leaving = num_leaving
        self._stays = stays
        self._calls = 0

    def in_static_memory(self, tensors: list[Any]) -> list[Any]:
        """`tensors` where the part will read them, so that a later pass of the same microbatch finds them there."""
        recording = self._recording(tensors)
        return tensors if recording is None else recording.fill_in(tensors)

    def __call__(self, tensors: list[Any]) -> Sequence[Any]:
        recording = self._recording(tensors)
        if recording is None:
            self._slots.now.has_all = False
            self._calls += 1
            return self._part(tensors)
        recording.fill_in(tensors)
        tensors.clear()
        recording.replay()
        leaving, staying = recording.outputs[: self._num_leaving], recording.outputs[self._num_leaving :]
        return [*[value.clone() if isinstance(value, Tensor) else value for value in leaving], *staying]

    def _recording(self, tensors: Sequence[Any]) -> _Recording | None:
        """What replays this part in the slot of the microbatch; None while the part is run as it is."""
        slot = self._slots.now
        if self._calls < _WARM_UP or not slot.has_all:
            return None
        recording = slot.recordings.get(self)
        if recording is None or not recording.fits(tensors):
            slot.recordings.pop(self, None)
            recording = slot.recordings[self] = self._record(slot, tensors)
        return recording

    def _record(self, slot: Slot, tensors: Sequence[Any]) -> _Recording:
        stays = slot.storages() | {tensor.untyped_storage().data_ptr() for tensor in self._stays()}
        inputs = [_static_memory_for(tensor, stays) for tensor in tensors]
        try:
            slot.pool, replay, outputs = record(self._part, inputs, slot.pool)
        except RuntimeError as error:
            raise _refusal(str(error).strip().splitlines()[0]) from error
        if any(tensor.layout is not torch.strided for tensor in outputs if isinstance(tensor, Tensor)):
            raise _refusal("it gives a sparse tensor")
        return _Recording(inputs, replay, outputs, _replaced(tensors, inputs))


class _Recording(NamedTuple):
    """A captured part: `replay` makes `outputs` of `inputs`, all of them static; those at the positions `copied_in` are copied in."""

    inputs: list[Any]
    replay: Callable[[], object]
    outputs: Sequence[Any]
    copied_in: tuple[int, ...]

    def fits(self, given: Sequence[Any]) -> bool:
        """Whether it can be replayed with these inputs."""
        for position, (new, own) in enumerate(zip(given, self.inputs, strict=True)):
            if not isinstance(new, Tensor):
                if new != own:
                    return False
            elif position in self.copied_in:
                if (new.shape, new.stride()) != (own.shape, own.stride()):
                    return False
            elif new.data_ptr() != own.data_ptr():
                return False
        return True

    def fill_in(self, given: Sequence[Any]) -> list[Any]:
        """Copy in what is not in its static memory yet; gives the inputs where the graph reads them."""
        for position in self.copied_in:
            if given[position].data_ptr() != self.inputs[position].data_ptr():
                copy_into(self.inputs[position], given[position])
        return [own if position in self.copied_in else new for position, (new, own) in enumerate(zip(given, self.inputs, strict=True))]


def record(part: Part, inputs: Sequence[Any], pool: Any) -> tuple[Any, Callable[[], object], Sequence[Any]]:
    """Capture `part` on static `inputs`: (the pool, what replays it, its static outputs, which have their values after a replay)."""
    pool = pool if pool is not None else torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = part(list(inputs))
    return pool, graph.replay, outputs


def copy_into(static: Tensor, given: Tensor) -> None:
    """Copy `given` into a tensor of its shape. Where the strides of `static` are 0, both hold one number many times, copied once."""
    once = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in static.stride()])
    static[once].copy_(given[once])


def _refusal(reason: str) -> InputError:
    return InputError(f"a pass cannot be captured as a CUDA graph: {reason}; make the pipeline without cuda_graphs")


def _static_memory_for(tensor: Any, stays: set[int]) -> Any:
    """Where a graph reads an input: where it is, if its storage is among those that stay, or from a copy of the same layout."""
    if not isinstance(tensor, Tensor) or tensor.untyped_storage().data_ptr() in stays:
        return tensor
    static = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copy_into(static, tensor)
    return static


def _replaced(given: Sequence[Any], inputs: Sequence[Any]) -> tuple[int, ...]:
    """The positions where a graph reads a copy and not what was given."""
    return tuple(position for position, (new, own) in enumerate(zip(given, inputs, strict=True)) if new is not own)
