"""Tensors of which each rank holds a part, such as experts and the rows of a divided head: a checkpoint has them whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint.tensor_part import TensorPart
from zerobubble.runtime.values.experts import ExpertMark, expert_marks
from zerobubble.runtime.values.head_rows import HeadRows, head_rows
from zerobubble.runtime.values.memory import local_part

Mark = ExpertMark | HeadRows
"""What says of which whole a tensor is a part."""

Marks = Mapping[nn.Parameter, Mark]
"""Of parameters that are this rank's part of a whole."""


def marks_in(module: nn.Module) -> dict[str, Mark]:
    """The marks of parameters and buffers in `module`, under all of their names."""
    return {**expert_marks(module), **head_rows(module)}


def marks_of(modules: Iterable[nn.Module]) -> dict[nn.Parameter, Mark]:
    """The parameters in `modules` that are marked."""
    found: dict[nn.Parameter, Mark] = {}
    for module in modules:
        marks = marks_in(module)
        named = module.named_parameters(remove_duplicate=False)
        found.update((parameter, marks[name]) for name, parameter in named if name in marks)
    return found


def whole(parameter: nn.Parameter, name: str, key: str, tensor: Tensor, marks: Marks) -> Tensor:
    """What all ranks keep together where `tensor` is what the optimizer of this one keeps as `key` of its part, the parameter `name`.

    Numbers alone are the same on all ranks. Raises `InputError` for anything else that is not of the shape of the parameter.
    """
    mark = marks.get(parameter)
    if mark is None or (tensor.numel() == 1 and tensor.shape != parameter.shape):
        return tensor
    if tensor.shape == parameter.shape:
        return joined(mark, tensor)
    if isinstance(mark, ExpertMark) and mark.dim is None:
        return tensor
    raise InputError(
        f"the optimizer keeps {key!r} of shape {tuple(tensor.shape)} for {name}, of which this rank has a part of shape "
        f"{tuple(parameter.shape)}: such parts cannot be joined in a checkpoint; train it with an optimizer whose state has the shape "
        "of the parameter, as Adam's and SGD's"
    )


def joined(mark: Mark, tensor: Tensor) -> Tensor:
    """The whole of which `tensor` is this rank's part, in the same memory."""
    return TensorPart(tensor, mark.first_row, mark.num_rows) if isinstance(mark, HeadRows) else mark.whole(tensor)


def part(kept: Tensor) -> Tensor:
    """The numbers that this rank holds."""
    return kept.local if isinstance(kept, TensorPart) else local_part(kept)
