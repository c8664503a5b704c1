"""Helpers for frameworks that keep the whole model on every rank, while each rank trains its own stages of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_structure, tree_unflatten

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.runtime.frameworks import GENERATORS, PythonState, changed
from zerobubble.units import first_of


class CalledError(BaseException):
    """Raised in place of a module's forward, to capture the arguments of the call.

    It is a BaseException, so that no `except Exception` in user code catches it.

    Attributes:
        has_gradients: Whether the call records gradients.
        undone: Names of what is set for the call only, such as inside a `with`, which the error ends.
        left: Names of hooks that were registered for the call, and that the error leaves behind.
    """

    undone: Sequence[str] = ()
    left: Sequence[str] = ()

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the module was called")
        self.module, self.call_args, self.call_kwargs = module, args, kwargs
        self.has_gradients = torch.is_grad_enabled()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """A context in which one object has other attributes or methods, such as another `forward`."""
    values = vars(owner)  # `setattr` of a module takes ten times as long, and a step does this for each microbatch
    before = {name: values[name] for name in attributes if name in values}
    values.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del values[name]
        values.update(before)


@contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    """A context inside `replaced(module, forward=...)` in which the module has its own forward."""
    instead = module.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if instead is not None:
            module.__dict__["forward"] = instead


def equal_arguments(first: Any, second: Any) -> bool:
    """Returns whether two nested structures of arguments have equal tensors."""
    (values, form), (others, other_form) = (tree_flatten(arguments) for arguments in (first, second))
    if form != other_form:
        return False
    tensors = [(a, b) for a, b in zip(values, others, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return all(a is b or torch.equal(a, b) for a, b in tensors)


@contextmanager
def calls_raised(modules: Sequence[nn.Module], *, compares: bool = False, left_out: Sequence[Any] = ()) -> Iterator[None]:
    """A context in which a call of any of the modules raises `CalledError`.

    With `compares`, the error names what is set for the call only. Objects `left_out` are not searched. This takes some 10 ms.
    """
    hooks = {module: _hooks_of(module) for module in modules} if compares else {}
    undone: Callable[[], list[str]] = list

    def raising(module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal undone
            if compares:
                undone = _changes_from_now(module, left_out)
            raise CalledError(module, args, kwargs)

        return forward

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced(module, forward=raising(module)))
        try:
            yield
        except CalledError as error:
            if compares:
                error.undone, error.left = undone(), _differing(hooks[error.module], _hooks_of(error.module))
            raise


def refuse_set_for_call(names: Iterable[str], function: str, remedy: str) -> None:
    """Raises `InputError` if a function of the user sets anything for its call of the network."""
    if distinct := [*dict.fromkeys(names)]:
        raise InputError(
            "{function} sets {names} for its call of the network, and a pipeline runs the network outside of {function}",
            function=function,
            names=first_of(distinct),
            remedy=remedy,
        )


def _changes_from_now(module: nn.Module, left_out: Sequence[Any]) -> Callable[[], list[str]]:
    """Returns a function that names what forward of a module reads, and what has changed since."""
    settings, attributes = _settings_of(module), PythonState(module, left_out=left_out).snapshot()

    def names() -> list[str]:
        places = changed(attributes)
        return _differing(settings, _settings_of(module)) + [repr(name) for name, place in places.items() if place.path not in GENERATORS]

    return names


_ATTENTION = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


def _settings_of(module: nn.Module) -> dict[str, Any]:
    """Returns modes of torch, and by name the mode and hooks of each module and the version of each tensor."""
    modes: dict[str, Any] = {
        "the gradient mode": torch.is_grad_enabled(),
        "the inference mode": torch.is_inference_mode_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the state of torch.random": torch.random.get_rng_state().numpy().tobytes(),
        "the backends of attention": [enabled() for enabled in _ATTENTION],  # type: ignore[no-untyped-call]
    }
    for kind in ("cpu", "cuda"):
        modes[f"torch.autocast({kind!r})"] = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    tensors = {
        repr(name): (id(tensor), tensor.requires_grad, 0 if tensor.is_inference() else tensor._version)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    training = {f"the training mode of {name or 'the network'!r}": child.training for name, child in module.named_modules()}
    return modes | tensors | training | _hooks_of(module)


def _hooks_of(module: nn.Module) -> dict[str, Any]:
    hooks = {
        f"hooks of {name or 'the network'!r}": (*child._forward_pre_hooks.values(), *child._forward_hooks.values())
        for name, child in module.named_modules()
    }
    of_all = nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks
    return hooks | {"hooks of all modules": tuple(hook for table in of_all for hook in table.values())}


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in before | now if before.get(name) != now.get(name)]


def from_last_stage(pipe: zb.Pipeline, value: Any, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Returns, on all ranks of the pipeline in `group`, the `value` that the rank of the last stage passes. All other ranks pass None.

    For a bidirectional schedule, this is the last stage of route 0, the route on which `eval_step` runs.
    """
    last = pipe.schedule.placement.routes[0][-1]
    root = dist.get_process_group_ranks(group)[last]
    leaves, structure = tree_flatten(value)
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
