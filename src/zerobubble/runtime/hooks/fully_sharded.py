"""Configures FSDP2 (`fully_shard`), which sums the gradients of the parameters that it shards by itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def let_fsdp2_sum(modules: Mapping[int, nn.Module]) -> None:
    """Makes FSDP2 sum gradients over ranks instead of averaging them: each rank's loss is its part of the mean over the whole batch."""
    for module in modules.values():
        for part in module.modules():
            # The second name is that of torch before 2.8.
            choose = getattr(part, "set_gradient_divide_factor", None) or getattr(part, "set_reduce_scatter_divide_factor", None)
            if choose is not None:
                choose(1.0)
            only_sums = getattr(part, "set_force_sum_reduction_for_comms", None)
            if only_sums is not None:  # else gradients of 32 and 16 bits are scaled in the collective, which gloo does not support
                only_sums(True)
