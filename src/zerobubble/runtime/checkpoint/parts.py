"""The parts of a checkpoint: all ranks plan which rank writes which tensors, then each writes its part, and rank 0 completes the
checkpoint.

Only planning needs all ranks at once. After writing, rank N adds a file `part.N` with its checksums and the places of its tensors. It shows
rank 0 that the part is complete. A part that failed leaves `failed.N`.

torch.distributed.checkpoint plans on each rank what it writes. torch would exchange these plans over a process group. They are exchanged
over the pipeline's own connections instead, since ranks that survive others have no common group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from zerobubble.runtime.checkpoint.checksums import CHECKSUMS_FILE, Checksum, SummedFiles, as_text
from zerobubble.runtime.checkpoint.folder import SCHEDULE
from zerobubble.runtime.checkpoint.ranks import CheckpointRanks
from zerobubble.runtime.device import interface


class CheckpointPart:
    """What this rank writes of a checkpoint into `folder`, after all ranks have planned together.

    With `copies`, tensors are copied there now, so that training may continue while they are written. Earlier copies are overwritten.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], folder: Path, ranks: CheckpointRanks, copies: dict[MetadataIndex, Tensor] | None
    ) -> None:
        self.folder = folder
        self.is_first = ranks.rank == 0
        self._rank = ranks.rank
        self._numbers = ranks.numbers
        self._num_ranks = ranks.num_ranks
        self._writer = FileSystemWriter(folder)
        self._writer.fs = self._files = SummedFiles()
        self._planner = DefaultSavePlanner() if copies is None else _Copying(copies)
        self._plan, self._metadata = _plan_together(tensors, self._writer, self._planner, ranks)

    def write(self) -> None:
        """Writes this rank's part, without any other rank."""
        try:
            results = self._writer.write_data(self._plan, self._planner).value()
            note = self.folder / f"part.{self._rank}.writing"
            note.write_text(json.dumps([[_result_form(result) for result in results], self._files.checksums]))
            os.rename(note, self._note(self._rank))
        except BaseException as error:
            with suppress(OSError):  # if not even that can be written, rank 0 times out on this part
                (self.folder / f"failed.{self._rank}").touch()
            if self._files.fault is not None:
                raise self._files.fault from error
            raise

    def missing(self) -> list[int]:
        """Returns the ranks whose parts are not complete. Raises `OSError` if one has failed."""
        files = set(os.listdir(self.folder))
        for rank in range(self._num_ranks):
            if f"failed.{rank}" in files:
                raise OSError(f"rank {self._numbers[rank]} failed to write its part")
        return [rank for rank in range(self._num_ranks) if self._note(rank).name not in files]

    def num_bytes(self) -> int:
        """Returns the bytes in the folder."""
        return sum(entry.stat().st_size for entry in os.scandir(self.folder))

    def complete(self, schedule: Mapping[str, Any] | None) -> None:
        """Writes the metadata, the `schedule`, and the checksums of all files: on rank 0, once all parts are complete."""
        notes = [self._note(rank) for rank in range(self._num_ranks)]
        results, checksums = zip(*(json.loads(note.read_text()) for note in notes), strict=True)
        for theirs in checksums:
            self._files.checksums |= {name: Checksum(*numbers) for name, numbers in theirs.items()}
        self._writer.finish(self._metadata, [[_result_of(form) for form in theirs] for theirs in results])
        if schedule is not None:
            self._files.write_text(self.folder / SCHEDULE, json.dumps(schedule) + "\n")
        self._files.write_text(self.folder / CHECKSUMS_FILE, as_text(self._files.checksums))
        for note in notes:
            note.unlink()

    def _note(self, rank: int) -> Path:
        return self.folder / f"part.{rank}"


def _result_form(result: WriteResult) -> list[Any]:
    """Returns the JSON form of the place where a tensor was written. A pickle there could run code of others in rank 0."""
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, place.relative_path, place.offset, place.length]


def _result_of(form: list[Any]) -> WriteResult:
    name, offset, hint, num_bytes, *place = form
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), hint)
    return WriteResult(index, num_bytes, _StorageInfo(*place))


class _Copying(DefaultSavePlanner):
    """Copies the tensors that this rank writes, once the plan says which these are."""

    def __init__(self, copies: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Copies what this rank writes."""
        plan = super().finish_plan(new_plan)
        written = {item.index for item in plan.items}
        for index in [index for index in self._copies if index not in written]:
            del self._copies[index]
        devices = set()
        for item in plan.items:
            devices.add(self._copy(item))
        for device in devices:
            interface(device).synchronize()
        return plan

    def _copy(self, item: WriteItem) -> torch.device:
        """Copies the tensor of `item`, and returns the device whose copy may still be in progress."""
        tensor = super().resolve_data(item)
        assert isinstance(tensor, Tensor), "a checkpoint has nothing but tensors"
        copy = self._copies.get(item.index)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = interface(tensor.device).host_memory(tensor.shape, tensor.dtype)
        self._copies[item.index] = copy.copy_(tensor, non_blocking=True)
        return tensor.device

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the copy."""
        return self._copies[write_item.index]


class _PlannedTensor(NamedTuple):
    """A `WriteItem` of torch as a plain value.

    It is the part of a tensor of this name and `size` that begins at `begins` and has `part_size`; it may be all of it.
    """

    name: str
    offset: torch.Size | None
    hint: int | None
    kind: WriteItemType
    begins: torch.Size
    part_size: torch.Size
    dtype: torch.dtype
    size: torch.Size

    @classmethod
    def from_item(cls, item: WriteItem) -> _PlannedTensor:
        """Returns the plain form of `item`; a checkpoint holds tensors only."""
        index, data = item.index, item.tensor_data
        assert data is not None, f"{index.fqn} is no tensor"
        chunk = data.chunk
        return cls(index.fqn, index.offset, index.index, item.type, chunk.offsets, chunk.sizes, data.properties.dtype, data.size)

    def item(self) -> WriteItem:
        """Returns the item in this form."""
        chunk = ChunkStorageMetadata(self.begins, self.part_size)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size)
        return WriteItem(MetadataIndex(self.name, self.offset, self.hint), self.kind, tensor_data=data)


def _plan_together(
    tensors: Mapping[str, Tensor], writer: FileSystemWriter, planner: SavePlanner, ranks: CheckpointRanks
) -> tuple[SavePlan, Metadata]:
    """Returns what this rank writes of its `tensors`, such that one rank writes each, and the metadata of all ranks' tensors."""
    is_first = ranks.rank == 0
    planner.set_up_planner(dict(tensors), writer.storage_meta(), is_first)
    writer.set_up_storage_writer(is_first)
    mine = writer.prepare_local_plan(planner.create_local_plan())
    of_ranks = ranks.gather([_PlannedTensor.from_item(item) for item in mine.items], "planning who writes what of a checkpoint")
    plans, metadata = planner.create_global_plan([_plan_of(planned) for planned in of_ranks])
    return planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank]), metadata


def _plan_of(planned: list[_PlannedTensor]) -> SavePlan:
    """Returns the plan of a rank with these tensors.

    Their names are plain keys, not paths in nested dicts, so each is its own path in `planner_data`.
    """
    return SavePlan([tensor.item() for tensor in planned], planner_data={tensor.name: (tensor.name,) for tensor in planned})
