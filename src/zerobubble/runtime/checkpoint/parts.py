"""The parts of a checkpoint: the ranks plan together who writes what, then each writes its part, and rank 0 completes the whole.

Only the planning needs all ranks at once. A part that is written leaves a note of what lies where and of its checksums, `part.N`, next to
it in the folder, by which rank 0 knows that it is there; one that failed leaves `failed.N`.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from zerobubble.runtime.checkpoint.checksums import FILE, SummedFiles, as_text
from zerobubble.runtime.checkpoint.folder import SCHEDULE
from zerobubble.runtime.checkpoint.planning import plan_together
from zerobubble.runtime.checkpoint.together import Together


class Part:
    """What this rank writes of a checkpoint into `folder`, once all ranks have planned together.

    With `copies`, tensors are copied there now, so that training may go on while they are written; copies made before are overwritten.
    """

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path, together: Together, copies: dict[MetadataIndex, Tensor] | None) -> None:
        self.folder = folder
        self.is_first = together.rank == 0
        self._rank = together.rank
        self._num_ranks = together.num_ranks
        self._writer = FileSystemWriter(folder)
        self._writer.fs = self._files = SummedFiles()
        self._planner = DefaultSavePlanner() if copies is None else _Copying(copies)
        self._plan, self._known = plan_together(tensors, self._writer, self._planner, together)

    def write(self) -> None:
        """Write this rank's part; it takes no other rank."""
        try:
            results = self._writer.write_data(self._plan, self._planner).value()
            note = self.folder / f"part.{self._rank}.writing"
            note.write_bytes(pickle.dumps((results, self._files.checksums)))
            os.rename(note, self._note(self._rank))
        except BaseException as error:
            with suppress(OSError):  # where not even that can be written, nothing more of this part arrives
                (self.folder / f"failed.{self._rank}").touch()
            if self._files.fault is not None:
                raise self._files.fault from error
            raise

    def missing(self) -> list[int]:
        """The ranks whose parts are not there yet; raises `OSError` where one has failed."""
        found = set(os.listdir(self.folder))
        for rank in range(self._num_ranks):
            if f"failed.{rank}" in found:
                raise OSError(f"rank {rank} failed to write its part")
        return [rank for rank in range(self._num_ranks) if self._note(rank).name not in found]

    def num_bytes(self) -> int:
        """How much is in the folder."""
        return sum(entry.stat().st_size for entry in os.scandir(self.folder))

    def complete(self, schedule: Mapping[str, Any] | None) -> None:
        """On rank 0, once all parts are there: write the list of what lies where, the `schedule`, and the checksums of all files."""
        notes = [self._note(rank) for rank in range(self._num_ranks)]
        results, checksums = zip(*(pickle.loads(note.read_bytes()) for note in notes), strict=True)
        for theirs in checksums:
            self._files.checksums |= theirs
        self._writer.finish(self._known, list(results))
        if schedule is not None:
            self._files.write_text(self.folder / SCHEDULE, json.dumps(schedule) + "\n")
        self._files.write_text(self.folder / FILE, as_text(self._files.checksums))
        for note in notes:
            note.unlink()

    def _note(self, rank: int) -> Path:
        return self.folder / f"part.{rank}"


class _Copying(DefaultSavePlanner):
    """Copies the tensors that this rank writes when it has become known which these are."""

    def __init__(self, copies: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Copy what this rank writes."""
        plan = super().finish_plan(new_plan)
        written = {item.index for item in plan.items}
        for index in [index for index in self._copies if index not in written]:
            del self._copies[index]
        devices = {self._copy(item) for item in plan.items}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return plan

    def _copy(self, item: WriteItem) -> torch.device:
        tensor = super().resolve_data(item)
        assert isinstance(tensor, Tensor), "a checkpoint has nothing but tensors"
        copy = self._copies.get(item.index)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu")
        self._copies[item.index] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
        return tensor.device

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The copy."""
        return self._copies[write_item.index]
