"""Clips gradients by the norm of the whole model, as `torch.nn.utils.clip_grad_norm_` does on one device.

All ranks gather the norm of each gradient, and combine them in the order of the stages. This is the order of one device, so the bits of the
result are the same, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError, raise_faults, shown
from zerobubble.runtime.stage.sharded import ShardedTensors
from zerobubble.runtime.step.hook import AttachedPipeline
from zerobubble.runtime.transport.terms import by_rank, each_has
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.memory import local_part
from zerobubble.units import first_of


class StageNorms(NamedTuple):
    """The parameters of a stage that have a gradient, and the `values` of their norms, on the CPU."""

    parameters: list[nn.Parameter]
    values: Tensor


Norms = dict[int, StageNorms]
"""The norms by stage, for stages that have gradients."""


def norm_to_clip_by(
    pipeline: AttachedPipeline, max_norm: float, norm_type: float, *, error_if_nonfinite: bool, losses: Tensor | None
) -> Tensor:
    """Returns the norm of the gradients of all ranks, by which each must `scale` its own; see `Pipeline.clip_grad_norm_`."""
    gradients = pipeline.gradients
    arguments = ClipArguments.parse(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    arguments = arguments._replace(fault=arguments.fault or pipeline.scaling.fault(pipeline.parameters()))
    with pipeline.activity("while clipping gradients"):
        parts = {} if arguments.fault else counted(pipeline.modules, pipeline.counted_elsewhere)
        norm_type = 2.0 if arguments.fault else float(norm_type)
        mine = norms_of(parts, norm_type, gradients, pipeline.sharded)
        # A rank with wrong arguments still takes part in the exchange: the others wait for it there, and all raise its fault together.
        norms, not_finite, all_arguments = gather_norms(mine, not_finite_in(pipeline.modules, mine), arguments, pipeline)
        with pipeline.agreed_errors():
            refuse_wrong_arguments(all_arguments, pipeline.peers.members)
        total = total_norm(norms, norm_type).to(pipeline.device)
        if error_if_nonfinite:
            with pipeline.agreed_errors():
                refuse(total, norm_type, not_finite, losses)
    return total


def counted(modules: Mapping[int, nn.Module], elsewhere: Iterable[nn.Parameter] = ()) -> dict[int, list[nn.Parameter]]:
    """Returns the parameters of each stage of this rank, in order, except those counted `elsewhere`.

    A parameter of several stages counts with the first of them.
    """
    taken: set[nn.Parameter] = set(elsewhere)
    of_stage: dict[int, list[nn.Parameter]] = {}
    for stage, module in sorted(modules.items()):
        of_stage[stage] = [parameter for parameter in module.parameters() if parameter not in taken]
        taken.update(of_stage[stage])
    return of_stage


def norms_of(parts: Mapping[int, list[nn.Parameter]], norm_type: float, gradients: Gradients, sharded: ShardedTensors) -> Norms:
    """Returns the norms of the gradients of a rank's parameters, by stage; see `counted` for the parameters in a norm of the whole model.

    A sharded gradient has the norm of the whole on each rank: all ranks that hold a shard must call it.
    """
    norm_of: dict[nn.Parameter, float] = {}
    dtypes: dict[int, torch.dtype] = {}
    for stage, parameters in parts.items():
        there = [(parameter, gradient.detach()) for parameter in parameters if (gradient := gradients.get(parameter)) is not None]
        if there:
            norms = torch.stack([_norm(gradient, norm_type, in_parts=sharded.is_sharded(parameter)) for parameter, gradient in there]).cpu()
            dtypes[stage] = norms.dtype
            norm_of.update(zip((parameter for parameter, _ in there), norms.tolist(), strict=True))
    norm_of |= sharded.whole_norms(norm_of, norm_type)
    result: Norms = {}
    for stage, parameters in parts.items():
        held = [parameter for parameter in parameters if parameter in norm_of]
        if held:
            values = torch.tensor([norm_of[parameter] for parameter in held], dtype=dtypes.get(stage, held[0].dtype), device="cpu")
            result[stage] = StageNorms(held, values)
    return result


def _norm(gradient: Tensor, norm_type: float, *, in_parts: bool) -> Tensor:
    """Returns the norm of the local part of a gradient that is known `in_parts`; else of all of it, for which all its ranks must call."""
    if in_parts:
        part = local_part(gradient)
        return torch.linalg.vector_norm(part, norm_type) if part.numel() else part.new_zeros(())
    norm: Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def not_finite_in(modules: Mapping[int, nn.Module], norms: Norms) -> dict[int, list[str]]:
    """Returns the names of the parameters with `norms` that are not finite, by stage."""
    not_finite: dict[int, list[str]] = {}
    for stage, of_stage in norms.items():
        fine = of_stage.values.isfinite()
        if not fine.all():
            names = {parameter: name for name, parameter in modules[stage].named_parameters()}
            held = [names[parameter] for parameter in of_stage.parameters]
            not_finite[stage] = [name for name, is_fine in zip(held, fine.tolist(), strict=True) if not is_fine]
    return not_finite


class ClipArguments(NamedTuple):
    """A description of the arguments of a rank's call, which must be the same on every rank. `fault` names the fault in them, if any."""

    max_norm: str
    norm_type: str
    error_if_nonfinite: str
    fault: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items() if name != "fault")

    @classmethod
    def parse(cls, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> ClipArguments:
        """Parses the arguments of a call. Numbers may also be tensors, or text such as "inf"."""
        numbers = []
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            try:
                numbers.append(float(value))
            except (TypeError, ValueError, RuntimeError):
                return cls("", "", "", f"{name} must be a number, got {shown(value)}")
        if not numbers[0] >= 0 or isnan(numbers[1]):
            return cls(
                "", "", "", f"max_norm must be at least 0 and norm_type an order such as 2 or inf, got {numbers[0]} and {numbers[1]}"
            )
        return cls(repr(numbers[0]), repr(numbers[1]), str(bool(error_if_nonfinite)))


def refuse_wrong_arguments(all_arguments: Sequence[ClipArguments], members: Sequence[int]) -> None:
    """Raises the same `InputError` on every rank if a rank's arguments are wrong or differ between the ranks, which are `members`."""
    raise_faults(by_rank(members, [arguments.fault and f"clip_grad_norm_: {arguments.fault}" for arguments in all_arguments]))
    if len(set(all_arguments)) > 1:
        calls = each_has(members, map(str, all_arguments))
        raise InputError(
            ("clip_grad_norm_ is called with other arguments on some ranks, whose gradients would be scaled apart: {found}"), found=calls
        )


def gather_norms(
    mine: Norms, not_finite: Mapping[int, list[str]], arguments: ClipArguments, pipeline: AttachedPipeline
) -> tuple[dict[int, Tensor], dict[int, list[str]], list[ClipArguments]]:
    """Gathers the norms of all stages, in order, the `not_finite` parameters, and the `arguments` of each rank.

    Copies of a stage have equal gradients: the norms of the first rank count.
    """
    entries = {stage: (norms.values.tolist(), norms.values.dtype, not_finite.get(stage)) for stage, norms in mine.items()}
    gathered = pipeline.gather((entries, arguments), "gathering the norms of gradients")
    entry_of = {stage: entry for norms, _ in reversed(gathered) for stage, entry in norms.items()}
    ordered = sorted(entry_of.items())
    return (
        {stage: torch.tensor(values, dtype=dtype, device="cpu") for stage, (values, dtype, _) in ordered},
        {stage: names for stage, (_, _, names) in ordered if names},
        [arguments for _, arguments in gathered],
    )


def total_norm(norms: Mapping[int, Tensor], norm_type: float) -> Tensor:
    """Returns the norm of all gradients as one vector, 0 without any."""
    return torch.linalg.vector_norm(torch.cat(list(norms.values())), norm_type) if norms else torch.tensor(0.0, device="cpu")


def refuse(total: Tensor, norm_type: float, not_finite: Mapping[int, list[str]], losses: Tensor | None) -> None:
    """Raises `InputError` for a `total` norm that is not finite, naming stages and parameters, and microbatches by their `losses`."""
    if total.isfinite():
        return
    where = [f"in stage {stage} ({first_of(names)})" for stage, names in not_finite.items()]
    lost = [] if losses is None else (~losses.isfinite()).nonzero().flatten().tolist()
    if lost:
        where.append(f"in the loss of microbatch{'es' if len(lost) > 1 else ''} {', '.join(map(str, lost))} of the last step")
    raise InputError(
        "the norm of order {order:g} of all gradients is {norm}{where}",
        order=norm_type,
        norm=total.item(),
        where=f", not finite {', '.join(where)}" if where else "",
        remedy="leave this step out, or let error_if_nonfinite be False to scale by it all the same",
    )


def scale(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor, gradients: Gradients) -> None:
    """Scales gradients as `torch.nn.utils.clip_grads_with_norm_` does, in `.grad` or `main_grad`, and the local part of sharded ones."""
    held, max_norm = list(parameters), float(max_norm)  # which may be text, as for torch
    scaled = [(parameter, gradient) for parameter in held if (gradient := gradients.get(parameter)) is not None]
    sharded = {parameter for parameter, gradient in scaled if local_part(gradient) is not gradient}
    if gradients.dtype is None:
        torch.nn.utils.clip_grads_with_norm_([parameter for parameter in held if parameter not in sharded], max_norm, total)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter, gradient in scaled:
        if parameter in sharded or gradients.dtype is not None:
            local_part(gradient).mul_(factor.to(gradient.device))
