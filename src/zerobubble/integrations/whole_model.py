"""Helpers for frameworks that keep the whole model on every rank, while each rank trains its own stages of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_structure, tree_unflatten

import zerobubble as zb


class CalledError(BaseException):
    """Raised in place of a module's forward, to capture the arguments of the call.

    It is a BaseException, so that no `except Exception` in user code catches it. `has_gradients` says whether the call records them.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the module was called")
        self.module, self.call_args, self.call_kwargs = module, args, kwargs
        self.has_gradients = torch.is_grad_enabled()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """A context in which one object has other attributes or methods, such as another `forward`."""
    own = vars(owner)  # `setattr` of a module takes ten times as long, and a step does this for each microbatch
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


@contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    """A context inside `replaced(module, forward=...)` in which the module has its own forward."""
    instead = module.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if instead is not None:
            module.__dict__["forward"] = instead


def equal_arguments(one: Any, other: Any) -> bool:
    """Returns whether two nested structures of arguments have equal tensors."""
    (values, form), (others, other_form) = (tree_flatten(arguments) for arguments in (one, other))
    if form != other_form:
        return False
    tensors = [(a, b) for a, b in zip(values, others, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return all(a is b or torch.equal(a, b) for a, b in tensors)


def raise_called(module: nn.Module) -> Callable[..., Any]:
    """Returns a forward for `module` that raises `CalledError`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise CalledError(module, args, kwargs)

    return forward


def from_last_stage(pipe: zb.Pipeline, found: Any, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Returns, on all ranks of the pipeline in `group`, what the rank of the last stage has `found`. All other ranks pass None.

    For a bidirectional schedule, this is the last stage of route 0, the route on which `eval_step` runs.
    """
    last = pipe.schedule.placement.routes[0][-1]
    root = dist.get_process_group_ranks(group)[last]
    leaves, structure = tree_flatten(found)
    tensors = {place: leaf.contiguous() for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    places = tree_unflatten(list(range(len(leaves))), structure)  # torch warns of pickled structures
    shared: list[Any] = [places, [leaf if place not in tensors else None for place, leaf in enumerate(leaves)]]
    shared.append([(place, tensor.shape, tensor.dtype) for place, tensor in tensors.items()])
    dist.broadcast_object_list(shared, src=root, group=group, device=device)
    places, leaves, shapes = shared
    for place, shape, dtype in shapes:
        leaves[place] = tensors[place] if pipe.rank == last else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(leaves[place], src=root, group=group)
    return tree_unflatten(leaves, tree_structure(places))


def tensors_of_stages(pipe: zb.Pipeline) -> set[int]:
    """Returns the ids of the parameters and buffers of this rank's stages."""
    buffers = [buffer for stage in pipe.modules.values() for buffer in stage.buffers()]
    return {id(tensor) for tensor in (*pipe.parameters(), *buffers)}


@torch.no_grad()
def copy_from(rank: int, tensor: Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Copies the values of `tensor` on `rank` to all other ranks of `group`, in place. The values are exchanged through tensors on
    `device`."""
    value = tensor.detach().to(device).contiguous()
    dist.broadcast(value, src=rank, group=group)
    if dist.get_rank() != rank:
        tensor.detach().copy_(value)
