"""What one GPU holds: bytes of activations, weights, gradients and the optimizer's state."""

from __future__ import annotations

from zerobubble.cost_model.kernels import HALF
from zerobubble.cost_model.setting import Setting

WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 12
"""Bytes per parameter: in half precision, its gradient in float32, and Adam's two moments and the parameter in float32."""


def layer_saved(setting: Setting) -> float:
    """Bytes that F of one layer keeps for B, by arXiv 2205.05198, table 2: for GPT and no parallelism tokens x hidden (34 + 5 a s / h)."""
    if setting.recompute == "full":
        return HALF * setting.wide
    model = setting.model
    masks = 2 if model.dropout else 0
    wide = setting.wide * (8 + masks)  # the inputs of two norms and of two linear layers, and the masks
    heads = HALF * (2 * setting.narrow + 2 * setting.kv_narrow)  # Q, K, V and the input of the projection
    inner = HALF * setting.inner_narrow * (3 if model.gated else 2)
    scores = setting.scores * (5 if model.dropout else 2) if setting.recompute == "none" and not model.fused_attention else 0
    return wide + heads + inner + scores


def layer_pending(setting: Setting) -> float:
    """Bytes that B of one layer keeps for W: inputs of linear layers, and gradients of their outputs."""
    wide = 4 * HALF * setting.wide
    heads = HALF * (2 * setting.narrow + 2 * setting.kv_narrow)
    return wide + heads + HALF * setting.inner_narrow * (3 if setting.model.gated else 2)


def embedding_saved(setting: Setting) -> float:
    """Bytes that F of the embedding keeps: the mask of its dropout."""
    return setting.wide if setting.model.dropout else 0.0


def head_saved(setting: Setting) -> float:
    """Bytes that F of the head keeps for B: the inputs of norm and product, and the logits in float32."""
    return 2 * HALF * setting.wide + 4 * setting.tokens * setting.words


def head_pending(setting: Setting) -> float:
    """Bytes that B of the head keeps for W: the product's input and the gradient of the logits."""
    return HALF * setting.wide + HALF * setting.tokens * setting.words


def optimizer_bytes(parameters: int, sharers: int) -> int:
    """Bytes of the optimizer's state, which GPUs with the same parameters divide among them."""
    return -(-STATE_BYTES * parameters // sharers)
