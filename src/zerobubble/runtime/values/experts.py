"""Marks experts that are spread over ranks as plain parameters, so that they are not treated as copies of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zerobubble.arguments import WHOLE, instance, optional, require, takes
from zerobubble.errors import InputError

_MARK = "_zerobubble_experts"
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class ExpertMark:
    """Marks tensors as this rank's part of experts that are spread over the ranks of `mesh`.

    The parts are stacked along dimension `dim`. With None each tensor is complete and has a unique name.
    """

    mesh: DeviceMesh
    dim: int | None

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns the complete tensor that `tensor` is this rank's part of, in the same memory."""
        return tensor if self.dim is None else DTensor.from_local(tensor, self.mesh, [Shard(self.dim)], run_check=False)

    def __deepcopy__(self, memo: object) -> Self:
        """Returns itself: copies of a module belong to the same ranks."""
        return self


@takes()
def mark_experts(module: Module, mesh: DeviceMesh, dim: int | None = 0) -> Module:
    """Mark all parameters and buffers in `module` as this rank's own experts, which the ranks of `mesh`, such as `mesh["ep"]`, spread.

    Give it what holds experts and nothing else, in `build`. A Pipeline then neither makes them equal on these ranks nor sums their
    gradients over them, and a norm counts them all. `dim` is the dimension along which experts are stacked: there the tensors of all ranks
    are joined in a checkpoint. With None each expert has tensors of its own, whose names include its number: `experts.7.up.weight` on the
    rank that holds expert 7. Experts that are DTensors need no mark. Gives `module` back; raises `InputError` for anything else.
    """
    require("mark_experts: module", module, instance(nn.Module))
    require("mark_experts: mesh", mesh, instance(DeviceMesh))
    require("mark_experts: dim", dim, optional(WHOLE))
    if mesh.ndim != 1:
        message = "mark_experts: mesh has {dimensions} dimensions"
        raise InputError(message, dimensions=mesh.ndim, remedy="give the one along which experts are spread, such as mesh['ep']")
    for name, tensor in module.state_dict(keep_vars=True).items():
        if dim is not None and isinstance(tensor, Tensor) and tensor.dim() <= dim:
            raise InputError(
                "mark_experts: {name!r} has shape {shape} and no dimension {dim} along which experts are stacked",
                name=name,
                shape=tuple(tensor.shape),
                dim=dim,
                remedy="give the module that holds experts alone, or dim=None where each has a name of its own",
            )
    module.__dict__[_MARK] = ExpertMark(mesh, dim)
    return module


def expert_marks(module: nn.Module) -> dict[str, ExpertMark]:
    """Returns the marks of the parameters and buffers in `module` that have one, under all of their names."""
    marks: dict[str, ExpertMark] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        mark = part.__dict__.get(_MARK)
        if mark is not None:
            tensors = (*part.named_parameters(prefix, remove_duplicate=False), *part.named_buffers(prefix, remove_duplicate=False))
            marks.update(dict.fromkeys((name for name, _ in tensors), mark))
    return marks
