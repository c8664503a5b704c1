"""Who writes what of a checkpoint: all ranks tell what they have, over the pipeline's own connections, and come to the same plan.

torch.distributed.checkpoint makes the plan, whose steps it would otherwise have a process group of torch exchange. The pipeline's own
connections also join ranks of which torch has no group, such as those that are left when others are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from zerobubble.runtime.checkpoint.together import Together


class PlannedTensor(NamedTuple):
    """A `WriteItem` of torch as a plain value: a tensor of this name and whole `size`, or the part of it that begins at `begins`."""

    name: str
    offset: torch.Size | None
    hint: int | None
    kind: WriteItemType
    begins: torch.Size
    part_size: torch.Size
    dtype: torch.dtype
    size: torch.Size

    @classmethod
    def of(cls, item: WriteItem) -> PlannedTensor:
        """What `item` says; a checkpoint has nothing but tensors."""
        index, data = item.index, item.tensor_data
        assert data is not None, f"{index.fqn} is no tensor"
        chunk = data.chunk
        return cls(index.fqn, index.offset, index.index, item.type, chunk.offsets, chunk.sizes, data.properties.dtype, data.size)

    def item(self) -> WriteItem:
        """The item that says this."""
        chunk = ChunkStorageMetadata(self.begins, self.part_size)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size)
        return WriteItem(MetadataIndex(self.name, self.offset, self.hint), self.kind, tensor_data=data)


def plan_together(
    tensors: Mapping[str, Tensor], writer: FileSystemWriter, planner: SavePlanner, together: Together
) -> tuple[SavePlan, Metadata]:
    """What this rank writes of its `tensors`, so that what several ranks have is written once, and what is known of all ranks' tensors."""
    is_first = together.rank == 0
    planner.set_up_planner(dict(tensors), writer.storage_meta(), is_first)
    writer.set_up_storage_writer(is_first)
    mine = writer.prepare_local_plan(planner.create_local_plan())
    told = together.gather([PlannedTensor.of(item) for item in mine.items], "planning who writes what of a checkpoint")
    plans, known = planner.create_global_plan([_plan_of(planned) for planned in told])
    return planner.finish_plan(writer.prepare_global_plan(plans)[together.rank]), known


def _plan_of(planned: list[PlannedTensor]) -> SavePlan:
    """The plan of a rank that has told what it has; names are those of no nested dicts."""
    return SavePlan([each.item() for each in planned], planner_data={each.name: (each.name,) for each in planned})
