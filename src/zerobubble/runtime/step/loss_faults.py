"""Faults of losses: a `loss_fn` that raises or trains parameters which no stage holds, and steps whose loss requires no gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zerobubble.errors import InputError
from zerobubble.runtime.device import note_of_devices
from zerobubble.runtime.values.shapes import describe_pytree

_DETACHING = (
    ".detach(), torch.no_grad, an integer result such as that of argmax, a torch.utils.checkpoint without use_reentrant=False whose inputs "
    "require none"
)


def note_given(error: Exception, function: str, **arguments: Any) -> None:
    """Adds to an `error` of the user's `function` the shapes of the arguments that it was given."""
    shapes = ", ".join(f"{name}={describe_pytree(value)}" for name, value in arguments.items())
    error.add_note(
        f"{function} was given {shapes}{note_of_devices(str(error), tree_leaves(arguments))}{_note_of_output(error, **arguments)}"
    )


def _note_of_output(error: Exception, output: Any = None, **_: Any) -> str:
    """Returns what to do about an error that a loss raises because it needs a tensor, and the `output` of the model is something else."""
    if output is None or isinstance(output, Tensor) or not isinstance(error, (AttributeError, TypeError)):
        return ""
    part = f"output[{next(iter(output), '')!r}]" if isinstance(output, dict) else "output[0]"
    return f"; if it needs a tensor of these, pass loss_fn=lambda output, target: loss({part}, target)"


def unknown_parameter(loss: Tensor, made_of: Iterable[Tensor], held: Iterable[Tensor]) -> InputError | None:
    """Returns the error if the `loss` depends on a parameter that is not `held`, other than through the tensors it is `made_of`.

    No optimizer, norm, checkpoint or replica would know such a parameter. Only the graph between these tensors and the loss is traversed,
    once per node.
    """
    held_ids = {id(tensor) for tensor in held}
    seen = {None, *(tensor.grad_fn for tensor in made_of)}
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, nn.Parameter) and id(parameter) not in held_ids:
            message = "loss_fn trains a parameter of shape {shape} that no stage holds, so no optimizer, checkpoint or replica has it"
            remedy = "give the nn.Module that holds it as loss_fn, or put it into the last stage"
            return InputError(message, shape=tuple(parameter.shape), remedy=remedy)
        left += [following for following, _ in node.next_functions]
    return None


def why_nothing_trains(flows_of_ranks: Sequence[Mapping[int, tuple[bool, bool]]], output_requires_grad: bool) -> str:
    """Returns why no loss requires a gradient, and the remedy.

    `flows_of_ranks` has the `GradientFlow` of each rank's stages. `output_requires_grad` says whether any output of the model requires a
    gradient.
    """
    flows: dict[int, tuple[bool, bool]] = {}
    for theirs in flows_of_ranks:
        for stage, (trains, requires_grad) in theirs.items():
            before = flows.get(stage, (False, False))
            flows[stage] = before[0] or trains, before[1] or requires_grad
    return f"the loss does not require a gradient, so this step trained nothing: {_reason(flows, output_requires_grad)}"


def _reason(flows: Mapping[int, tuple[bool, bool]], output_requires_grad: bool) -> str:
    if output_requires_grad:
        return f"loss_fn detaches it from the output of the model, which requires one ({_DETACHING}, .item()); return the loss itself"
    if not any(trains for trains, _ in flows.values()):
        return "no parameter of any stage requires one; unfreeze parameters, or call eval_step"
    in_order = sorted(flows.items())
    are_reached = [False, *(requires_grad for _, (_, requires_grad) in in_order)]
    cut = max(stage for (stage, (trains, _)), is_reached in zip(in_order, are_reached, strict=False) if trains or is_reached)
    whose = "parameters" if flows[cut][0] else "inputs"
    return f"the output of stage {cut} does not require one although its {whose} do ({_DETACHING}); return the output itself"
