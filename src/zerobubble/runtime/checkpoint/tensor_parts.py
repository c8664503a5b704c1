"""Tensors of which each rank holds a part, such as experts and the rows of a divided head, and which a checkpoint holds whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerobubble.errors import InputError
from zerobubble.runtime.stage.head_part import HeadRows, head_rows
from zerobubble.runtime.values.experts import ExpertMark, expert_marks
from zerobubble.runtime.values.memory import local_part

Mark = ExpertMark | HeadRows
"""Marks a tensor as a part of a whole tensor."""

Marks = Mapping[nn.Parameter, Mark]
"""The marks of parameters that are this rank's part of a whole."""


def marks_in(module: nn.Module) -> dict[str, Mark]:
    """Returns the marks of parameters and buffers in `module`, under all of their names."""
    return {**expert_marks(module), **head_rows(module)}


def marks_of(modules: Iterable[nn.Module]) -> dict[nn.Parameter, Mark]:
    """Returns the marked parameters in `modules`."""
    marked: dict[nn.Parameter, Mark] = {}
    for module in modules:
        marks = marks_in(module)
        named = module.named_parameters(remove_duplicate=False)
        marked.update((parameter, marks[name]) for name, parameter in named if name in marks)
    return marked


def whole(parameter: nn.Parameter, name: str, key: str, tensor: Tensor, marks: Marks) -> Tensor:
    """Returns the whole of `tensor`, which the optimizer keeps as `key` for `parameter`, called `name`; `tensor` itself if it is whole.

    Single numbers are the same on all ranks. Raises `InputError` for any other tensor without the shape of the parameter.
    """
    mark = marks.get(parameter)
    if mark is None or (tensor.numel() == 1 and tensor.shape != parameter.shape):
        return tensor
    if tensor.shape == parameter.shape:
        return joined(mark, tensor)
    if isinstance(mark, ExpertMark) and mark.dim is None:
        return tensor
    raise InputError(
        "the optimizer keeps {key!r} of shape {got} for {parameter}, of which this rank has a part of shape {expected}, and such parts "
        "cannot be joined in a checkpoint",
        key=key,
        got=tuple(tensor.shape),
        parameter=name,
        expected=tuple(parameter.shape),
        remedy="use an optimizer whose state has the shape of the parameter, such as Adam or SGD",
    )


def joined(mark: Mark, tensor: Tensor) -> Tensor:
    """Returns the whole of which `tensor` is this rank's part, in the same memory."""
    return TensorPart(tensor, mark.first_row, mark.num_rows) if isinstance(mark, HeadRows) else mark.whole(tensor)


def part(kept: Tensor) -> Tensor:
    """Returns the local part of a tensor."""
    return kept.local if isinstance(kept, TensorPart) else local_part(kept)


class TensorPart(Tensor):
    """Wraps `local` as the part of a larger tensor with `num_rows` rows that begins at `first_row`.

    Like a DTensor, it has the shape of the larger tensor and only local values. torch.distributed.checkpoint writes and reads such types by
    three methods, and finds rows however the parts were cut when they were saved.
    """

    local: Tensor
    begins: torch.Size

    @staticmethod
    def __new__(cls, local: Tensor, first_row: int, num_rows: int) -> TensorPart:
        shape = torch.Size((num_rows, *local.shape[1:]))
        tensor: TensorPart = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        tensor.local = local
        tensor.begins = torch.Size((first_row, *(0 for _ in local.shape[1:])))
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} cannot take a TensorPart, which only checkpoints can use")

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
