"""Gradients clipped by the norm of the whole model's, as `torch.nn.utils.clip_grad_norm_` does on one device.

Every rank tells the norm of each of its gradients, and every rank puts them together in the order of the stages: the sum that one device
makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.gradients import Gradients
from zerobubble.runtime.messages.meeting import meeting
from zerobubble.runtime.messages.transport import Transport

Norms = dict[int, Tensor]
"""The norms of the gradients of each stage that has any, one after another on the CPU."""


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


def gather_norms(mine: Norms, transport: Transport) -> Norms:
    """The norms of all stages, in order, on every rank; of copies of a stage, whose gradients are the same, the first rank's."""
    with meeting("gathering the norms of gradients"):
        told = transport.gather_objects({stage: (norms.tolist(), norms.dtype) for stage, norms in mine.items()})
    found = {stage: numbers for norms in reversed(told) for stage, numbers in norms.items()}
    return {stage: torch.tensor(values, dtype=dtype) for stage, (values, dtype) in sorted(found.items())}


def total_norm(norms: Norms, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
    """The norm of all gradients as one vector, 0 without any.

    Raises `InputError` naming the stages when it is not finite and `error_if_nonfinite` is set.
    """
    total = torch.linalg.vector_norm(torch.cat(list(norms.values())), norm_type) if norms else torch.tensor(0.0)
    if error_if_nonfinite and not total.isfinite():
        stages = ", ".join(str(stage) for stage, found in norms.items() if not found.isfinite().all())
        raise InputError(
            f"the norm of order {norm_type:g} of all gradients is {total.item()}{f', not finite in stage {stages}' if stages else ''}: "
            "leave this step out, or let error_if_nonfinite be False to scale by it all the same"
        )
    return total


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
