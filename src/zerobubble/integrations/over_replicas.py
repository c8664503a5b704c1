"""Collectives of `Accelerator` among the replicas of a pipeline, of which one rank each takes part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils import _pytree as pytree


def gather_over_replicas(group: dist.ProcessGroup, accelerator: Any, data: Any, use_gather_object: bool = False) -> Any:
    """Gathers like `Accelerator.gather_for_metrics` from one rank of each replica, or like `gather` without an accelerator.

    With one replica, a number has no dimension, as on one device, where Accelerator then drops no rows of the last batch.
    """

    def gather(tensor: Tensor) -> Tensor:
        if group.size() == 1:
            return tensor
        tensor = tensor[None] if tensor.ndim == 0 else tensor.contiguous()
        everywhere = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(everywhere, tensor, group=group)
        return torch.cat(everywhere)

    gathered = recursively_apply(gather, data, error_on_other_type=True)
    state = accelerator.gradient_state if accelerator is not None else None
    has_numbers = any(isinstance(leaf, Tensor) and not leaf.ndim for leaf in pytree.tree_leaves(gathered))
    if state is not None and state.end_of_dataloader and state.remainder > 0 and not has_numbers:
        return recursively_apply(lambda tensor: tensor[: state.remainder], gathered)
    return gathered


def reduce_over_replicas(group: dist.ProcessGroup, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    """Reduces like `Accelerator.reduce`, over one rank of each replica."""

    def reduce(tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total * (scale if reduction == "sum" else scale / group.size() if reduction == "mean" else 1.0)

    return recursively_apply(reduce, data, error_on_other_type=True)
