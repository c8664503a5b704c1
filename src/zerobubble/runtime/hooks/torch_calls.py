"""Refuses calls of torch that mistake a rank of a pipeline for a replica of the whole model. Their training would be silently wrong.

Both functions are replaced where torch itself looks them up, so it does not matter when and how a program imported what it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils.data import DistributedSampler

from zerobubble.errors import InputError
from zerobubble.runtime.hooks.optimizer_watch import owners_of, watched_runners
from zerobubble.runtime.step.runner import StepRunner

CLIP = "_clip_grads_with_norm_"
"""The function that `torch.nn.utils.clip_grad_norm_` calls. With a norm from the caller, `clip_grads_with_norm_` is another name for it."""


@cache
def refuse_calls_for_one_rank() -> None:
    """Makes torch refuse, while a pipeline of several ranks is open, what `clip` and `iterate` refuse below. It is done once."""
    if hasattr(clip_grad, CLIP):  # a private function, which a later torch may drop; then its clipping is not refused
        setattr(clip_grad, CLIP, _clip(getattr(clip_grad, CLIP)))
    DistributedSampler.__iter__ = _iterate(DistributedSampler.__iter__)  # type: ignore[method-assign]


def _clip(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], max_norm: float, *args: Any, **kwargs: Any) -> None:
        """Refuses the parameters of one rank of a pipeline: their norm is not that of the model."""
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for ranks in map(_open_ranks, (owner for owner, _ in owners_of(held))):
            if ranks > 1:
                raise InputError(
                    "clip_grad_norm_ of torch clips by the norm of the stages of one rank of {ranks}",
                    argument="parameters",
                    expected="the parameters of the whole model",
                    ranks=ranks,
                    remedy=f"call pipe.clip_grad_norm_({max_norm}) on every rank",
                )
        original(held, max_norm, *args, **kwargs)

    return clip


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
    """Returns whether `sampler` is that of `rank` of all ranks, although a replica has several: the `num_ranks` of a pipeline."""
    return num_ranks > 1 and (sampler.num_replicas, sampler.rank) == (world_size, rank)


def _open_ranks(pipeline: StepRunner) -> int:
    """Returns the number of ranks of a pipeline; 1 if it is closed."""
    return pipeline.num_ranks if pipeline.guard.closed is None else 1
