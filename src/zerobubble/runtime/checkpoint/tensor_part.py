"""A tensor that is a part of a larger one, as torch.distributed.checkpoint writes and reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class TensorPart(Tensor):
    """`local` as the part of a larger tensor that begins at its row `first_row`; the larger one has `num_rows`.

    It has the shape of the larger tensor, as a DTensor has, and no numbers but `local`. torch.distributed.checkpoint writes and reads these
    by the three methods that it asks of such types, and finds rows again however parts were cut.
    """

    local: Tensor
    begins: torch.Size

    @staticmethod
    def __new__(cls, local: Tensor, first_row: int, num_rows: int) -> TensorPart:
        shape = torch.Size((num_rows, *local.shape[1:]))
        made: TensorPart = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local = local
        made.begins = torch.Size((first_row, *(0 for _ in local.shape[1:])))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a part of a tensor: only checkpoints take it")

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        data = TensorWriteData(self._chunk, TensorProperties.create_from_tensor(self.local), self.shape)
        return [WriteItem(MetadataIndex(fqn, self.begins), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.begins, self.local.shape)
