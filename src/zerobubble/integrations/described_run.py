"""A training run as the configuration of a framework describes it: what determines the costs of its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerobubble.cost_model import Model
from zerobubble.cost_model.estimate import layers_of
from zerobubble.cost_model.gpus import known_gpu
from zerobubble.cost_model.setting import Setting
from zerobubble.errors import InputError
from zerobubble.partition import Layer


def not_described(what: str, reason: str) -> InputError:
    """Returns the error for a run whose costs the cost model cannot estimate."""
    remedy = "profile a run and plan with --costs"
    return InputError("the cost model does not describe {got}: {reason}", got=what, reason=reason, remedy=remedy)


@dataclass(frozen=True)
class DescribedRun:
    """A model, and the parallel sizes and the batch with which it is trained.

    Attributes:
        names: The names in the model's code of the first modules of the embedding, of each layer and of the head.
        pp: The number of ranks of the pipeline.
        microbatch: The number of sequences of a microbatch.
        recompute: The name of a level of the cost model.
        dp: The number of replicas; FSDP2 shards them over `dp_shard` ranks each, times `cp`.
        positions: The number of parameters of learned positions, which the embedding holds in addition to those of tokens.
    """

    model: Model
    names: tuple[str, ...]
    pp: int
    num_microbatches: int
    microbatch: int
    recompute: str
    dp: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    positions: int = 0

    def layers(self, gpu: str) -> tuple[Layer, ...]:
        """Returns the estimated costs of embedding, layers and head on this GPU.

        Without FSDP2, each rank has 16 bytes per parameter of its layers. With FSDP2, it has 2 bytes for gathered weights, 4 for whole
        gradients, and its share of the 16.
        """
        setting = Setting(
            model=self.model,
            gpu=known_gpu(gpu),
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            pp=self.pp,
            dp=self.dp,
            microbatch=self.microbatch,
            recompute=self.recompute,
        )
        sharded = self.dp_shard * self.cp > 1
        kept = replace(setting, dp=self.dp_shard, gradients="fp32" if sharded else "bf16", shard_optimizer=sharded, shard_weights=sharded)
        sizes = [layer.parameters_bytes for layer in layers_of(kept)]
        sizes[0] = round(sizes[0] * (1 + self.positions / (self.model.vocabulary * self.model.hidden)))
        named = zip(layers_of(setting), self.names, sizes, strict=True)
        return tuple(replace(layer, name=name, parameters_bytes=size) for layer, name, size in named)
