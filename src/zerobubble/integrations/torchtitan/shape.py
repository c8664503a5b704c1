"""Reads what determines the costs of a run from torchtitan's configuration: the shape of the model, parallel sizes and the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchtitan.distributed.activation_checkpoint import FullAC

from zerobubble.cost_model import Experts, Latent, Model
from zerobubble.integrations.described_run import DescribedRun, not_described


def run_of(model: Any, name: str, training: Any, parallelism: Any, ac_config: Any, *, dp: int, dp_shard: int) -> DescribedRun:
    """Returns the run of these parts of a configuration, with `dp` replicas, sharded over `dp_shard` ranks."""
    size = parallelism.pipeline_parallel_microbatch_size
    shape = model_of(model, name, training.seq_len)
    return DescribedRun(
        model=shape,
        names=("tok_embeddings", *(f"layers.{number}" for number in range(shape.layers)), "norm"),
        pp=parallelism.pipeline_parallel_degree,
        num_microbatches=training.local_batch_size // size,
        microbatch=size,
        dp=dp,
        dp_shard=dp_shard,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        recompute="full" if isinstance(ac_config, FullAC.Config) else "none",
    )


def model_of(config: Any, name: str, sequence: int) -> Model:
    """Returns the shape of a decoder of torchtitan. Raises `InputError` that names everything that the cost model does not describe."""
    faults = list(_faults(config))
    if faults:
        raise not_described(name, "; ".join(faults))
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
