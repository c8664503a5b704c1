"""Bytes on one GPU: activations, weights, gradients and optimizer state."""

from __future__ import annotations

from typing import NamedTuple

from zerobubble.cost_model.kernels import HALF
from zerobubble.cost_model.setting import Setting
from zerobubble.partition.layers import ADAM_BYTES, MASTER_BYTES, adam_bytes

WEIGHT_BYTES = 2
"""Bytes per parameter: in half precision, or in FP8 with a transposed copy."""
STATE_BYTES = adam_bytes(WEIGHT_BYTES)
SHARD_BYTES = 2 * MASTER_BYTES + ADAM_BYTES - STATE_BYTES
"""Bytes per parameter in the shards of FSDP2, beyond `STATE_BYTES`: weight and gradient are in float32, like the moments."""
RUNTIME_BYTES = 2 * 2**30
"""Bytes on each GPU outside PyTorch's allocator: the CUDA context and the buffers of communicators.

Those of a pipeline hold less than 1 GiB, with the sums over any number of replicas (`communicators.held_by`). For others, such as those of
tensor parallelism, NCCL allocates about 0.3 GiB each: 4 MiB (NCCL_BUFFSIZE) and the smaller buffers of its other protocols, to send and to
receive, on 16 to 32 channels (NVIDIA, NCCL user guide, environment variables).
"""


def attention_saved(setting: Setting) -> float:
    """Returns the bytes that F of the attention half of a layer keeps for B.

    With those of the other half, they are tokens x hidden (34 + 5 a s / h) for GPT (arXiv 2205.05198, table 2). Inputs of linear layers are
    kept in their precision, as in Transformer Engine; all else, such as attention outputs in FP8, in half precision.
    """
    if setting.recompute == "full":
        return HALF * setting.hidden_elements
    model, operand = setting.model, setting.operand_bytes
    copied = operand * setting.outputs if operand < HALF else 0
    kept = setting.outputs if setting.recompute == "latent" else setting.attended
    heads = HALF * kept + copied + (HALF + operand) * setting.latent  # Q, K, V, outputs; latent vectors before and after norms
    scores = setting.scores * (5 if model.dropout else 2) if setting.recompute == "none" and not model.fused_attention else 0
    return _norm_saved(setting) + heads + scores


def mlp_saved(setting: Setting, routed: bool) -> float:
    """Returns the bytes that F of the MLP half of a layer, or of its experts, keeps for B."""
    if setting.recompute == "full":
        return HALF * setting.hidden_elements
    inner = (HALF * (setting.model.inner_products - 1) + setting.operand_bytes) * setting.inner(routed)
    return _norm_saved(setting) + inner + (_experts_saved(setting) if routed else 0)


def layer_saved(setting: Setting, routed: bool) -> float:
    """Returns the bytes that F of one layer keeps for B: only its input if B recomputes the layer."""
    return HALF * setting.hidden_elements if setting.recompute == "full" else attention_saved(setting) + mlp_saved(setting, routed)


def _norm_saved(setting: Setting) -> float:
    """Returns the bytes of the inputs of a norm and of a linear layer, and of the dropout mask."""
    return setting.hidden_elements * (HALF + setting.operand_bytes + (1 if setting.model.dropout else 0))


def _experts_saved(setting: Setting) -> float:
    """Returns the bytes that routed experts keep for B: their inputs, and both sides of their activation, or one if recomputed."""
    assert setting.model.experts is not None
    operand = setting.operand_bytes
    between = HALF * (setting.model.inner_products - 1) + (0 if setting.recomputes_activation else operand)
    return setting.chosen * (operand * setting.model.hidden + between * setting.model.experts.inner)


def attention_pending(setting: Setting) -> float:
    """Returns the bytes that B of the attention half keeps for W: inputs of linear layers, and gradients of their outputs."""
    return setting.operand_bytes * (2 * setting.hidden_elements + setting.attended + 2 * setting.latent)


def mlp_pending(setting: Setting, routed: bool) -> float:
    """Returns the bytes that B of the MLP half, or of the experts, keeps for W."""
    experts, elements = setting.model.experts, 2 * setting.hidden_elements + setting.inner(routed) * setting.model.inner_products
    if routed and experts is not None:
        elements += setting.chosen * (2 * setting.model.hidden + setting.model.inner_products * experts.inner)
    return setting.operand_bytes * elements


def embedding_saved(setting: Setting) -> float:
    """Returns the bytes that F of the embedding keeps: its dropout mask."""
    return setting.hidden_elements if setting.model.dropout else 0.0


def head_saved(setting: Setting) -> float:
    """Returns the bytes that F of the head keeps for B: the inputs of norm and product, and the logits in float32."""
    return 2 * HALF * setting.hidden_elements + 4 * setting.tokens * setting.padded_vocabulary


def head_pending(setting: Setting) -> float:
    """Returns the bytes that B of the head keeps for W: the product's input and the gradient of the logits."""
    return HALF * setting.hidden_elements + HALF * setting.tokens * setting.padded_vocabulary


class Parameters(NamedTuple):
    """Parameters on a GPU: those of routed experts, replicated on fewer GPUs, and all others."""

    common: int
    experts: int

    def plus(self, other: Parameters) -> Parameters:
        return Parameters(self.common + other.common, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.common + self.experts


def parameters_of(setting: Setting, dense: int, routed: int, vocabularies: int) -> Parameters:
    """Returns the parameters on one GPU of these numbers of layers without and with experts, and of embeddings and heads."""
    model, tp = setting.model, setting.tp
    whole = model.latent_parameters * (tp - 1) // tp  # replicated in the group
    common = sum(
        count * (model.common_parameters(with_experts) // tp + whole) for count, with_experts in ((dense, False), (routed, True)) if count
    )
    experts = 0 if model.experts is None else routed * model.experts.routed // setting.ep * model.expert_parameters
    return Parameters(common + vocabularies * setting.padded_vocabulary * model.hidden, experts)


def halves_of_layer(setting: Setting, routed: bool) -> tuple[Parameters, Parameters]:
    """Returns the parameters on one GPU of the two halves of a layer, attention and the rest."""
    whole = parameters_of(setting, int(not routed), int(routed), 0)
    replicated = setting.model.latent_parameters
    attention = (setting.model.attention_parameters - replicated) // setting.tp + replicated
    return Parameters(attention, 0), Parameters(whole.common - attention, whole.experts)


def optimizer_bytes(setting: Setting, parameters: Parameters) -> int:
    """Returns the bytes of optimizer state, whole or sharded over GPUs with the same parameters."""
    common, experts = (STATE_BYTES * count for count in parameters)
    return -(-common // setting.sharers) + -(-experts // setting.expert_sharers) if setting.shard_optimizer else common + experts


def weight_bytes(setting: Setting, parameters: Parameters) -> int:
    """Returns the bytes of weights. If they are sharded, the share of weights and summed gradients comes in addition to gathered ones.

    Shards are in float32, with no other copy, so a parameter has 16 bytes in all shards: weight, gradient and Adam's moments.
    """
    whole = WEIGHT_BYTES * parameters.total
    if not setting.shard_weights or setting.sharers == 1:
        return whole
    common, experts = (SHARD_BYTES * count for count in parameters)
    return whole + -(-common // setting.sharers) + -(-experts // setting.expert_sharers)


def gradient_bytes(setting: Setting, parameters: Parameters) -> int:
    """Returns the bytes of weight gradients, whole or sharded over GPUs with the same parameters."""
    common, experts = (setting.gradient_bytes * count for count in parameters)
    return -(-common // setting.sharers) + -(-experts // setting.expert_sharers) if setting.shard_gradients else common + experts


def state_bytes(setting: Setting, parameters: Parameters) -> int:
    """Returns the bytes of weights, gradients and optimizer state."""
    return weight_bytes(setting, parameters) + gradient_bytes(setting, parameters) + optimizer_bytes(setting, parameters)
