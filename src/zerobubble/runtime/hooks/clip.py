"""Gradients clipped by the norm of the whole model's, as `torch.nn.utils.clip_grad_norm_` does on one device.

Every rank tells the norm of each of its gradients, and every rank puts them together in the order of the stages: the sum that one device
makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.arguments import shown
from zerobubble.errors import InputError
from zerobubble.runtime.step.hook import AttachedPipeline
from zerobubble.runtime.values.gradients import Gradients

Norms = dict[int, Tensor]
"""The norms of the gradients of each stage that has any, one after another on the CPU."""


def clip_grad_norm(
    pipeline: AttachedPipeline, max_norm: float, norm_type: float, *, error_if_nonfinite: bool, losses: Tensor | None
) -> Tensor:
    """Clip the gradients of all ranks by their common norm, which is given back; see `Pipeline.clip_grad_norm_`."""
    gradients = pipeline.gradients
    arguments = ClipArguments.of(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    with pipeline.activity("while clipping gradients"):
        parts = {} if arguments.fault else counted(pipeline.modules, pipeline.counted_elsewhere)
        norm_type = norm_type if arguments.fault else float(norm_type)
        mine = norms_of(parts, norm_type, gradients)
        norms, spoilt, told = gather_norms(mine, spoilt_in(pipeline.modules, parts, mine, gradients), arguments, pipeline)
        with pipeline.alike():
            refuse_wrong_arguments(told)
        total = total_norm(norms, norm_type).to(pipeline.device)
        if error_if_nonfinite:
            with pipeline.alike():
                refuse(total, norm_type, spoilt, losses)
        scale(pipeline.parameters(), max_norm, total, gradients)
    return total


def counted(modules: Mapping[int, nn.Module], elsewhere: Iterable[nn.Parameter] = ()) -> dict[int, list[nn.Parameter]]:
    """The parameters of each stage of this rank, in order, but for those that count `elsewhere`; one of several stages counts with the
    first of them."""
    taken: set[nn.Parameter] = set(elsewhere)
    found: dict[int, list[nn.Parameter]] = {}
    for stage, module in sorted(modules.items()):
        found[stage] = [parameter for parameter in module.parameters() if parameter not in taken]
        taken.update(found[stage])
    return found


def norms_of(parts: Mapping[int, list[nn.Parameter]], norm_type: float, gradients: Gradients) -> Norms:
    """The norms of the gradients of a rank's parameters, by stage; `counted` gives those that a norm of the whole model counts."""
    norms: Norms = {}
    for stage, parameters in parts.items():
        found = [gradient.detach() for parameter in parameters if (gradient := gradients.of(parameter)) is not None]
        if found:
            norms[stage] = torch.stack([torch.linalg.vector_norm(gradient, norm_type) for gradient in found]).cpu()
    return norms


def spoilt_in(
    modules: Mapping[int, nn.Module], parts: Mapping[int, list[nn.Parameter]], norms: Norms, gradients: Gradients
) -> dict[int, list[str]]:
    """The parameters of each stage of a rank whose gradients' norms, as `norms_of` gives them, are not finite, by name."""
    spoilt: dict[int, list[str]] = {}
    for stage, found in norms.items():
        fine = found.isfinite()
        if not fine.all():
            names = {parameter: name for name, parameter in modules[stage].named_parameters()}
            held = [names[parameter] for parameter in parts[stage] if gradients.of(parameter) is not None]
            spoilt[stage] = [name for name, is_fine in zip(held, fine.tolist(), strict=True) if not is_fine]
    return spoilt


class ClipArguments(NamedTuple):
    """What a rank is called with, in words: every rank must be called with the same. `fault` says what is wrong with it, if anything is."""

    max_norm: str
    norm_type: str
    error_if_nonfinite: str
    fault: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items() if name != "fault")

    @classmethod
    def of(cls, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> ClipArguments:
        """These arguments, of which numbers may be tensors or text such as "inf", too."""
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


def refuse_wrong_arguments(told: Sequence[ClipArguments]) -> None:
    """Raise `InputError`, the same on every rank, where ranks were called with wrong arguments, or with other ones."""
    faults = [f"rank {rank}: clip_grad_norm_: {arguments.fault}" for rank, arguments in enumerate(told) if arguments.fault]
    if faults:
        raise InputError("; ".join(faults))
    if len(set(told)) > 1:
        found = "; ".join(f"rank {rank} has {arguments}" for rank, arguments in enumerate(told))
        raise InputError(f"clip_grad_norm_ is called with other arguments on some ranks, whose gradients would be scaled apart: {found}")


def gather_norms(
    mine: Norms, spoilt: Mapping[int, list[str]], arguments: ClipArguments, pipeline: AttachedPipeline
) -> tuple[Norms, dict[int, list[str]], list[ClipArguments]]:
    """The norms of all stages, in order, what is `spoilt` of them, and the `arguments` of each rank, on every rank.

    Of copies of a stage, whose gradients are the same, the norms are the first rank's.
    """
    entries = {stage: (norms.tolist(), norms.dtype, spoilt.get(stage)) for stage, norms in mine.items()}
    gathered = pipeline.gather((entries, arguments), "gathering the norms of gradients")
    told = [theirs for theirs, _ in gathered]
    found = {stage: entry for norms in reversed(told) for stage, entry in norms.items()}
    ordered = sorted(found.items())
    return (
        {stage: torch.tensor(values, dtype=dtype) for stage, (values, dtype, _) in ordered},
        {stage: names for stage, (_, _, names) in ordered if names},
        [arguments for _, arguments in gathered],
    )


def total_norm(norms: Norms, norm_type: float) -> Tensor:
    """The norm of all gradients as one vector, 0 without any."""
    return torch.linalg.vector_norm(torch.cat(list(norms.values())), norm_type) if norms else torch.tensor(0.0)


def refuse(total: Tensor, norm_type: float, spoilt: Mapping[int, list[str]], losses: Tensor | None) -> None:
    """Raise `InputError` for a `total` norm that is not finite, naming stages and parameters, and microbatches by their `losses`."""
    if total.isfinite():
        return
    where = [f"in stage {stage} ({_listed(names)})" for stage, names in spoilt.items()]
    lost = [] if losses is None else (~losses.isfinite()).nonzero().flatten().tolist()
    if lost:
        where.append(f"in the loss of microbatch{'es' if len(lost) > 1 else ''} {', '.join(map(str, lost))} of the last step")
    raise InputError(
        f"the norm of order {norm_type:g} of all gradients is {total.item()}{', not finite ' if where else ''}{', '.join(where)}: "
        "leave this step out, or let error_if_nonfinite be False to scale by it all the same"
    )


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def scale(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor, gradients: Gradients) -> None:
    """Scale gradients as `torch.nn.utils.clip_grads_with_norm_` does, wherever they are."""
    if gradients.dtype is None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        gradient = gradients.of(parameter)
        if gradient is not None:
            gradient.mul_(factor.to(gradient.device))
