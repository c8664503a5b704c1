"""Refuses calls of torch that mistake a rank of a pipeline for a replica of the whole model. Their training would be silently wrong.

Clips by value without gradients, too: all parameters of a rank's optimizer may be in the stages of others.

Functions are replaced where torch itself looks them up, so it does not matter when and how a program imported what it calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils.data import DistributedSampler

from zerobubble.errors import InputError
from zerobubble.runtime.hooks.optimizer_watch import owners_of, watched_runners
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.runtime.values.far_gradients import refuse_lost_paths

CLIP = "_clip_grads_with_norm_"
"""The function that `torch.nn.utils.clip_grad_norm_` calls. With a norm from the caller, `clip_grads_with_norm_` is another name for it."""
NORM = "_get_total_norm"
"""The function that `clip_grad_norm_` calls first, and whose other name is `get_total_norm`: `func` inside of a wrapper."""
GROUPING = "_group_tensors_by_device_and_dtype"
"""The function with which `clip_grad_value_` groups gradients. It refuses an empty list."""
ENGINE = "_engine_run_backward"
"""The function that `torch.autograd.grad` calls."""
COMBINING: set[str] = set()
"""Modules that take norms of the gradients of each rank, and combine them over ranks. The integration with their framework adds them."""


@cache
def refuse_calls_for_one_rank() -> None:
    """Makes torch refuse what `norm`, `clip` and `iterate` refuse below, while a pipeline of several ranks is open, and `backward`.

    It also refuses wrong gradients within a forward. It is done once.
    """
    # Private functions, which a later torch may drop; then their use is not refused.
    wrapper = getattr(clip_grad, NORM, None)
    if wrapper is not None and "func" in wrapper.__code__.co_freevars:
        cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
        cell.cell_contents = _norm(cell.cell_contents)
    if hasattr(clip_grad, CLIP):
        setattr(clip_grad, CLIP, _clip(getattr(clip_grad, CLIP)))
    if hasattr(clip_grad, GROUPING):
        setattr(clip_grad, GROUPING, _grouping(getattr(clip_grad, GROUPING)))
    if hasattr(torch.autograd, ENGINE):
        setattr(torch.autograd, ENGINE, refuse_lost_paths(getattr(torch.autograd, ENGINE)))
    torch.autograd.backward = _backward(torch.autograd.backward)
    DistributedSampler.__iter__ = _iterate(DistributedSampler.__iter__)  # type: ignore[method-assign]


def _norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def norm(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Refuses gradients or parameters of one rank of a pipeline."""
        held = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if sys._getframe(2).f_globals.get("__name__") not in COMBINING:  # the frame after the wrapper's
            for runner in watched_runners():
                parameters = list(runner.parameters())
                gradients = (runner.gradients.get(parameter) for parameter in parameters)
                owned = {id(tensor) for tensor in (*parameters, *gradients) if tensor is not None}
                if _open_ranks(runner) > 1 and any(id(tensor) in owned for tensor in held):
                    _refuse_norm("the norm", runner, "max_norm")
        return original(held, *args, **kwargs)

    return norm


def _clip(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], max_norm: float, *args: Any, **kwargs: Any) -> None:
        """Refuses the parameters of one rank of a pipeline: their norm is not the norm of the model."""
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for owner, _ in owners_of(held):
            if _open_ranks(owner) > 1:
                _refuse_norm("clip_grad_norm_ of torch clips by the norm", owner, str(max_norm))
        original(held, max_norm, *args, **kwargs)

    return clip


def _grouping(original: Callable[..., dict[Any, Any]]) -> Callable[..., dict[Any, Any]]:
    @wraps(original)
    def group(tensors: Sequence[Sequence[Tensor]], *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Returns no groups of no tensors."""
        return original(tensors, *args, **kwargs) if any(tensors) else {}

    return group


def _refuse_norm(what: str, runner: StepRunner, max_norm: str) -> NoReturn:
    raise InputError(
        "{what} of the stages of one rank of {ranks} is not the norm of the model",
        argument="parameters",
        what=what,
        expected="the parameters of the whole model",
        ranks=_open_ranks(runner),
        remedy=f"call {runner.cut_model.pipe}.clip_grad_norm_({max_norm}) on every rank, which returns the norm of all gradients; inf "
        "clips nothing",
    )


def _backward(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Refuses tensors without a graph, such as the loss of a step after its backward pass."""
        try:
            original(tensors, *args, **kwargs)
        except RuntimeError as error:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            has_stepped = any(runner.losses.losses is not None for runner in watched_runners())
            if has_stepped and all(isinstance(root, Tensor) and not root.requires_grad for root in roots):
                raise InputError(
                    "backward() needs a tensor with a graph, and {got} has none",
                    got="this one" if len(roots) == 1 else "each of these",
                    remedy="if it is the loss of pipe.step, remove backward(): step has run the backward pass, and gradients are in .grad",
                ) from error
            raise

    return backward


def _iterate(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @wraps(original)
    def iterate(sampler: DistributedSampler[Any]) -> Iterator[Any]:
        """Refuses samples for this rank alone: the ranks of a pipeline work on the same microbatches."""
        ranks = max(map(_open_ranks, watched_runners()), default=1)
        if dist.is_initialized() and takes_rank_for_replica(sampler, dist.get_world_size(), dist.get_rank(), ranks):
            raise InputError(
                "a DistributedSampler over all {got} ranks gives the {ranks} ranks of a pipeline different samples",
                argument="num_replicas",
                got=sampler.num_replicas,
                expected="the number of replicas",
                ranks=ranks,
                remedy="leave it out, or make it with num_replicas and rank of the replica, such as mesh['dp'].size() and "
                "mesh['dp'].get_local_rank()",
            )
        return original(sampler)

    return iterate


def takes_rank_for_replica(sampler: DistributedSampler[Any], world_size: int, rank: int, num_ranks: int) -> bool:
    """Returns whether `sampler` divides data over all ranks, as `rank` of them, although a replica has the `num_ranks` of a pipeline."""
    return num_ranks > 1 and (sampler.num_replicas, sampler.rank) == (world_size, rank)


def _open_ranks(pipeline: StepRunner) -> int:
    """Returns the number of ranks of a pipeline; 1 if it is closed."""
    return pipeline.num_ranks if pipeline.guard.closed is None else 1
