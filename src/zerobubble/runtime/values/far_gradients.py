"""Refuses gradients, as of a gradient penalty, with respect to tensors that another stage computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.values.hold import here

_TRACED = "CompiledFunctionBackward"
"""The name of the node of a graph that AOTAutograd has traced."""
_UNUSED = "appears to not have been used in the graph"
"""How `torch.autograd.grad` ends for a tensor that its outputs do not depend on, as far as this stage's graph goes."""


def refuse_far_gradient(error: Exception, whose: str) -> None:
    """Raises `InputError` if `error` comes from a call of `torch.autograd.grad`, in the user's code `whose`, beyond a stage's graph."""
    if isinstance(error, RuntimeError) and _UNUSED in str(error):
        raise InputError(
            "{whose} calls torch.autograd.grad with respect to a tensor on which this stage's graph does not depend, such as the input of "
            "the model: autograd goes back only to the inputs of the stage",
            whose=whose,
            remedy="compute such a gradient penalty in one stage with all layers between both tensors, or on the output alone",
        ) from error


class Origin(NamedTuple):
    """A `tensor` that arrived at a stage, an output of `part`, and the arrived tensors `behind` it, from which it was computed."""

    part: str
    tensor: Tensor
    behind: Sequence[Tensor]


@runtime_checkable
class KnowsOrigins(Protocol):
    """A stage module that was cut from a model by `zb.split`."""

    def origins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Origin]:
        """Returns the origin of each tensor that arrives with these arguments."""
        ...


def refuse_lost_paths(run_engine: Callable[..., Any]) -> Callable[..., Any]:
    """Returns autograd's `run_engine` with a check of gradients within a forward.

    Raises `InputError` for a gradient with respect to a tensor from which another tensor behind the outputs may have been computed without
    a path in autograd's graph: by an earlier stage, so that both are leaves here, or by the same traced stage.
    """

    @wraps(run_engine)
    def run(outputs: Sequence[Any], gradients: Any, retain: Any, create: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if inputs and here.hold.origins is not None:
            _refuse_lost_paths(outputs, inputs, here.hold.origins())
        return run_engine(outputs, gradients, retain, create, inputs, *args, **kwargs)

    return run


def _refuse_lost_paths(outputs: Iterable[Any], inputs: Iterable[Any], origins: Sequence[Origin]) -> None:
    used = _Behind(outputs)
    for wanted in inputs:
        sources = _Behind([wanted])
        for origin in origins:
            if id(origin.tensor) in used.leaves and sources.leaves <= set(map(id, origin.behind)):
                raise InputError(
                    "stage {stage} or its loss_fn calls torch.autograd.grad with respect to a tensor from which an earlier stage computed "
                    "the output of part {part!r}, and this gradient would exclude the path through the part",
                    stage=here.hold.stage,
                    part=origin.part,
                    remedy="cut the model so that the part is in this stage, by zb.split(model, cuts=[...]), whose entry for this stage is "
                    f"{origin.part!r} or an earlier part",
                )
        if here.hold.is_traced and any(node in sources.traced and places - sources.traced[node] for node, places in used.traced.items()):
            raise InputError(
                "loss_fn calls torch.autograd.grad with respect to an output of stage {stage}, which is traced, and this gradient would "
                "exclude paths through its other outputs",
                stage=here.hold.stage,
                remedy=f'give zb.Pipeline(..., split={{{here.hold.stage}: "deferred"}})',
            )


class _Behind:
    """What lies behind `tensors`, or edges: the `id` of each leaf, and for each node of a traced graph which of its outputs are used."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self.leaves: set[int] = set()
        self.traced: dict[Any, set[int]] = {}
        seen: set[Any] = set()
        left: list[tuple[Any, int]] = []
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.grad_fn is None:
                self.leaves.add(id(tensor))
            else:
                left.append((tensor.grad_fn, tensor.output_nr) if isinstance(tensor, Tensor) else tuple(tensor)[:2])
        while left:
            node, place = left.pop()
            if node is not None and node.name() == _TRACED:
                self.traced.setdefault(node, set()).add(place)
            if node is None or node in seen:
                continue
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                self.leaves.add(id(leaf))
            left += node.next_functions
