"""Parameters that FSDP2 divides over ranks with other data (`fully_shard`), whose gradients it sums by itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def let_fsdp2_sum(modules: Mapping[int, nn.Module]) -> None:
    """Have FSDP2 sum gradients over ranks and not average them: the loss of each rank is its part in the mean over the whole batch."""
    for module in modules.values():
        for part in module.modules():
            # By its name before torch 2.8.
            choose = getattr(part, "set_gradient_divide_factor", None) or getattr(part, "set_reduce_scatter_divide_factor", None)
            if choose is not None:
                choose(1.0)
            only_sums = getattr(part, "set_force_sum_reduction_for_comms", None)
            if only_sums is not None:  # else numbers of 32 and 16 bits are scaled on their way, which gloo cannot
                only_sums(True)
