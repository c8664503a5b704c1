"""Assigns the modules of a torchtitan model to stages, by torchtitan's names."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _split_module

from zerobubble.errors import InputError
from zerobubble.runtime.frameworks import STAND_INS

FIRST, LAST = ("tok_embeddings",), ("norm", "lm_head")
"""The modules before and after the layers."""
VISION = "vision_encoder"
PARTIAL_DTENSOR = "partial_dtensor"
"""The `spmd_backend` whose activations are DTensors with tensor parallelism."""


def part_of(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Returns a copy of `model` with the modules of these names, whose layers defer weight gradients to W inside a pass.

    This is done here because torchtitan's `parallelize` then wraps the `forward` of instances, and the pipeline cannot replace it later.
    """
    part: nn.Module = _split_module(model, list(names))
    for module in part.modules():
        stand_in = None if "forward" in vars(module) else STAND_INS.get(type(module).forward)
        if stand_in is not None:
            module.forward = MethodType(stand_in, module)
    return part


def exchange_local_tensors(part: nn.Module, mesh: DeviceMesh, placements: tuple[Placement, ...], *, first: bool, last: bool) -> None:
    """Lets a part take and return the local tensors of its activations, which are DTensors on `mesh` inside the part.

    Args:
        part: The modules of a stage.
        mesh: The ranks of tensor parallelism.
        placements: The placements of activations between layers.
        first: Whether the stage is the first, whose input is tokens.
        last: Whether it is the last, whose output goes to the loss.
    """

    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return DTensor.from_local(args[0], mesh, placements, run_check=False), *args[1:]

    def give(_: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
        assert output.placements == placements, (output.placements, placements)
        local = output.to_local()
        return local.clone() if isinstance(local, AsyncCollectiveTensor) else local  # waits for the collective

    if not first:
        part.register_forward_pre_hook(take)
    if not last:
        part.register_forward_hook(give)


def names_of_stages(model: Any, parallelism: Any, num_stages: int, first_layers: Sequence[str] = ()) -> list[list[str]]:
    """Returns the names of the modules of each stage.

    They come from `module_fqns_per_model_part` if it is set, else from the `first_layers` of a plan's stages, else from
    torchtitan. Raises `InputError` if they do not give `num_stages` stages, or a stage without the layers that torchtitan needs.
    """
    names = _names(model, parallelism, num_stages, first_layers)
    bare = [str(stage) for stage, of_stage in enumerate(names) if not any(name.startswith("layers.") for name in of_stage)]
    if bare and parallelism.context_parallel_degree > 1 and parallelism.spmd_backend == PARTIAL_DTENSOR:
        raise InputError(
            "torchtitan's context parallelism needs a layer in every stage with spmd_backend={backend!r}, and stages {got} have none",
            backend=PARTIAL_DTENSOR,
            got=", ".join(bare),
            remedy="choose a schedule with fewer stages, or set parallelism.module_fqns_per_model_part",
        )
    return names


def _names(model: Any, parallelism: Any, num_stages: int, first_layers: Sequence[str]) -> list[list[str]]:
    listed = parallelism.module_fqns_per_model_part
    if listed is not None:
        if len(listed) != num_stages:
            raise InputError(
                "parallelism.module_fqns_per_model_part has {got} parts, but the schedule has {expected} stages: give one list for each",
                argument="module_fqns_per_model_part",
                got=len(listed),
                expected=num_stages,
            )
        return [list(names) for names in listed]
    num_layers = len(model.layers)
    if first_layers:
        names = _cut_at([*FIRST, *(f"layers.{number}" for number in range(num_layers)), *LAST], first_layers)
    else:
        before, after = parallelism.pipeline_parallel_first_stage_less_layers, parallelism.pipeline_parallel_last_stage_less_layers
        try:
            names = _generate_llm_fqn_per_model_part(num_stages, num_layers, before, after)
        except ValueError as error:
            raise InputError(
                "torchtitan cannot cut {got} layers into {expected} stages: {reason}",
                got=num_layers,
                expected=num_stages,
                reason=str(error).rstrip("."),
                remedy="set parallelism.module_fqns_per_model_part, or lower pipeline_parallel_first_stage_less_layers and "
                "pipeline_parallel_last_stage_less_layers",
            ) from error
    if getattr(model, VISION, None) is not None:
        names[0].insert(0, VISION)
    return names


def _cut_at(names: Sequence[str], first: Sequence[str]) -> list[list[str]]:
    """Splits `names` before each name in `first`."""
    unknown = [name for name in first if name not in names]
    if unknown:
        raise InputError(
            "the plan cuts at layers that the model does not have: {got}; it has {expected}",
            got=", ".join(unknown),
            expected=", ".join(names),
        )
    parts: list[list[str]] = [[]]
    for name in names:
        if name in first:
            parts.append([])
        parts[-1].append(name)
    return parts
