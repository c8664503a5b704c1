"""Reads what determines the costs of a run from torchtitan's configuration: the shape of the model, parallel sizes and the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.distributed.activation_checkpoint import FullAC

from zerobubble.cost_model import Experts, Latent, Model
from zerobubble.cost_model.estimate import layers_of
from zerobubble.cost_model.gpus import known_gpu
from zerobubble.cost_model.setting import Setting
from zerobubble.errors import InputError
from zerobubble.partition import Layer


@dataclass(frozen=True)
class Run:
    """A model, and the parallel sizes and the batch with which it is trained.

    `pp` are the ranks of the pipeline, `microbatch` the sequences of a microbatch, `recompute` the name of a level of the cost model.
    """

    model: Model
    pp: int
    num_microbatches: int
    microbatch: int
    dp: int
    cp: int
    tp: int
    ep: int
    recompute: str

    def layers(self, gpu: str) -> tuple[Layer, ...]:
        """Returns the estimated costs of embedding, layers and head on this GPU, by torchtitan's names of modules."""
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
        names = ("tok_embeddings", *(f"layers.{number}" for number in range(self.model.layers)), "norm")
        return tuple(replace(layer, name=name) for layer, name in zip(layers_of(setting), names, strict=True))


def run_of(model: Any, name: str, training: Any, parallelism: Any, ac_config: Any, *, dp: int) -> Run:
    """Returns the run of these parts of a configuration, with `dp` replicas."""
    size = parallelism.pipeline_parallel_microbatch_size
    return Run(
        model=model_of(model, name, training.seq_len),
        pp=parallelism.pipeline_parallel_degree,
        num_microbatches=training.local_batch_size // size,
        microbatch=size,
        dp=dp,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        recompute="full" if isinstance(ac_config, FullAC.Config) else "none",
    )


def model_of(config: Any, name: str, sequence: int) -> Model:
    """Returns the shape of a decoder of torchtitan. Raises `InputError` that names everything that the cost model does not describe."""
    faults = list(_faults(config))
    if faults:
        raise InputError(
            "the cost model does not describe {got}: {reason}",
            got=name,
            reason="; ".join(faults),
            remedy="profile a run and plan with --costs",
        )
    attention = config.first_attention
    moes = [layer.moe for layer in config.layers if layer.moe is not None]
    dense = [layer.feed_forward.w1.out_features for layer in config.layers if layer.moe is None]
    experts = _experts(moes[0], len(dense)) if moes else None
    is_latent = hasattr(attention, "kv_lora_rank")
    heads = attention.n_heads
    return Model(
        name=name,
        layers=len(config.layers),
        hidden=config.dim,
        heads=heads,
        kv_heads=getattr(attention, "n_kv_heads", None) or heads,
        inner=dense[0] if dense else moes[0].routed_experts.inner_experts.hidden_dim,
        vocabulary=config.vocab_size,
        sequence=sequence,
        gated=True,
        dropout=False,
        tied=config.enable_weight_tying,
        fused_attention=True,
        latent=_latent(attention) if is_latent else None,
        experts=experts,
        head_width=None if is_latent else (getattr(attention, "head_dim", None) or config.dim // heads),
    )


def _faults(config: Any) -> Iterator[str]:
    if not getattr(config, "layers", None) or getattr(config, "first_attention", None) is None:
        yield "it is not a decoder with attention layers"
        return
    if getattr(config, "vision_encoder", None) is not None:
        yield "it has a vision encoder"
    if getattr(config, "mtp_layers", None):
        yield "it has multi-token prediction layers"
    kinds = {type(getattr(layer, "attention", None)) for layer in config.layers}
    if len(kinds) > 1:
        yield f"its layers have different attention ({', '.join(sorted(kind.__qualname__ for kind in kinds))})"
    if any(getattr(layer.attention, "sliding_window_size", None) for layer in config.layers if layer.attention is not None):
        yield "it has sliding-window attention"
    if getattr(config.first_attention, "q_lora_rank", None) == 0:
        yield "its latent attention has queries without a latent vector"
    routed = [layer.moe is not None for layer in config.layers]
    if routed != sorted(routed):
        yield "layers without experts come after layers with experts"


def _latent(attention: Any) -> Latent:
    return Latent(
        attention.q_lora_rank, attention.kv_lora_rank, attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    )


def _experts(moe: Any, dense_layers: int) -> Experts:
    inner = moe.routed_experts.inner_experts.hidden_dim
    shared = 0 if moe.shared_experts is None else moe.shared_experts.w1.out_features // inner
    return Experts(moe.num_experts, moe.router.top_k, inner, shared, dense_layers, moe.router.num_limited_groups or 0)
