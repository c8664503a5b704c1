"""The settings of the strategies for Lightning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zerobubble as zb
from zerobubble.integrations.batches import Dims

SPLIT_OPTIONS = ("cuts", "inside_blocks", "memory")


@dataclass(frozen=True)
class Settings:
    """The user's settings.

    Attributes:
        schedule: What `zb.Pipeline` accepts.
        num_microbatches: The number of microbatches of a batch.
        network: The name of the module to cut; None to find it.
        loss_weight: Returns the weight of a microbatch, given its part of the batch; None for its number of samples; "sum" for a sum.
        split: Options of `zb.split`.
        pipeline: Options of `zb.Pipeline`.
    """

    schedule: Any
    num_microbatches: int
    network: str | None
    loss_weight: Callable[[Any], Any] | str | None
    split: dict[str, Any]
    pipeline: dict[str, Any]

    @classmethod
    def from_options(
        cls,
        schedule: Any,
        num_microbatches: int,
        network: str | None,
        loss_weight: Callable[[Any], Any] | str | None,
        options: dict[str, Any],
    ) -> Settings:
        """Sorts the `options` of a strategy into those of `zb.split` and those of `zb.Pipeline`."""
        split = {name: value for name, value in options.items() if name in SPLIT_OPTIONS}
        pipeline = {name: value for name, value in options.items() if name not in SPLIT_OPTIONS}
        return cls(schedule, num_microbatches, network, loss_weight, split, pipeline)

    @property
    def batch_dims(self) -> Dims:
        """The batch dimensions of arguments, by name."""
        return self.pipeline.get("batch_dims") or {}

    def pipeline_of(
        self, network: nn.Module, example: Any, loss_fn: Any, loss_weight: Any, mesh: DeviceMesh, batch_dims: Dims
    ) -> zb.Pipeline:
        """Cuts the network, and returns its pipeline."""
        stages = zb.split(network, example=example, **self.split)
        options = self.pipeline | {"batch_dims": dict(batch_dims) or None}
        return zb.Pipeline(stages, self.schedule, self.num_microbatches, loss_fn, loss_weight=loss_weight, mesh=mesh, **options)
