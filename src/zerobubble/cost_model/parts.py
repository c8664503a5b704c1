"""The parts of a transformer that form stages, with their times and bytes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from math import ceil
from typing import NamedTuple

from zerobubble.cost_model.held import (
    attention_pending,
    attention_saved,
    embedding_saved,
    head_pending,
    head_saved,
    layer_saved,
    mlp_pending,
    mlp_saved,
)
from zerobubble.cost_model.kernels import HALF, Kernels
from zerobubble.cost_model.layer import (
    NOTHING,
    Times,
    attention_times,
    cast_times,
    elementwise_times,
    embedding_times,
    head_times,
    inner_times,
    layout_times,
    linear_times,
    passing_times,
    times_of_products,
    up_seconds,
)
from zerobubble.cost_model.setting import Linear, Setting


class ModelPart(NamedTuple):
    """A part of a model: seconds of its passes, and bytes that F keeps for B (`saved`) and B for W (`pending`), per microbatch."""

    times: Times
    saved: float
    pending: float

    def plus(self, other: ModelPart, times: int = 1) -> ModelPart:
        """Adds `times` the other part."""
        return ModelPart(self.times.plus(other.times, times), self.saved + times * other.saved, self.pending + times * other.pending)


NO_PART = ModelPart(NOTHING, 0.0, 0.0)


def attention_part(setting: Setting, kernels: Kernels) -> ModelPart:
    """Returns the first half of a transformer layer, with its norm and residual; recomputation counts as part of B."""
    core = attention_times(setting, kernels)
    linears, rest = linear_times(setting.attention_linears(), setting, kernels), elementwise_times(setting, kernels)
    once = core.plus(linears).plus(rest).plus(layout_times(setting, kernels)).plus(passing_times(setting, kernels, core))
    cheap = 0.0 if setting.model.fused_attention else core.forward
    latent = cheap + up_seconds(setting, kernels)
    return ModelPart(_recomputing(setting, once, cheap, latent), attention_saved(setting), attention_pending(setting))


def mlp_part(setting: Setting, kernels: Kernels, routed: bool) -> ModelPart:
    """Returns the second half of a transformer layer, an MLP or experts, with its norm and residual."""
    linears, rest = linear_times(setting.mlp_linears(routed), setting, kernels), elementwise_times(setting, kernels)
    once, cheap = linears.plus(rest).plus(inner_times(setting, kernels, routed)), 0.0
    if routed:
        once, cheap = once.plus(expert_times(setting, kernels)), activation_seconds(setting, kernels)
    return ModelPart(_recomputing(setting, once, cheap, cheap), mlp_saved(setting, routed), mlp_pending(setting, routed))


def _recomputing(setting: Setting, once: Times, cheap: float, latent: float) -> Times:
    """Returns the times of passes with the seconds that B recomputes at each level."""
    recomputed = {"none": 0.0, "selective": cheap, "latent": latent, "full": once.forward}[setting.recompute]
    return once._replace(backward=once.backward + recomputed)


class Halves(NamedTuple):
    """A transformer layer: whole, and its two halves. If B recomputes it, the whole keeps one input, the halves one each."""

    whole: ModelPart
    attention: ModelPart
    mlp: ModelPart

    @classmethod
    def from_setting(cls, setting: Setting, kernels: Kernels, routed: bool) -> Halves:
        """Returns the layer of `setting`, with or without routed experts."""
        attention, mlp = attention_part(setting, kernels), mlp_part(setting, kernels, routed)
        return cls(attention.plus(mlp)._replace(saved=layer_saved(setting, routed)), attention, mlp)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A whole model on one GPU: its layers in order, between embedding and head.

    It does not depend on the numbers of ranks, stages and replicas.
    """

    embedding: ModelPart
    layers: tuple[Halves, ...]
    head: ModelPart

    @classmethod
    def from_setting(cls, setting: Setting, kernels: Kernels) -> ModelParts:
        """Returns the parts of the model of `setting`."""
        embedding = ModelPart(embedding_times(setting, kernels), embedding_saved(setting), 0.0)
        first, others = setting.model.dense_layers, setting.model.layers - setting.model.dense_layers
        halves = [(Halves.from_setting(setting, kernels, routed),) * count for routed, count in ((False, first), (True, others)) if count]
        head = ModelPart(head_times(setting, kernels), head_saved(setting), head_pending(setting))
        return cls(embedding, tuple(chain.from_iterable(halves)), head)

    def of_stages(self, counts: Sequence[float]) -> list[ModelPart]:
        """Returns the stages with these numbers of layers, the first with the embedding and the last with the head."""
        stages = [self._run(first, end) for first, end in pairwise(accumulate(counts, initial=0.0))]
        stages[0] = stages[0].plus(self.embedding)
        stages[-1] = stages[-1].plus(self.head)
        return stages

    def _run(self, first: float, end: float) -> ModelPart:
        """Returns the sum of the layers in [`first`, `end`); equal layers are multiplied, so that equal stages are bitwise equal."""
        piece = piece_of_layers(first, end)
        total = NO_PART
        for layer, equal in groupby(self.layers[piece.first : piece.end]):
            total = total.plus(layer.whole, len(list(equal)))
        if piece.mlp is not None:
            total = total.plus(self.layers[piece.mlp].mlp)
        return total if piece.attention is None else total.plus(self.layers[piece.attention].attention)


class Piece(NamedTuple):
    """Consecutive layers: those in [`first`, `end`), before them the MLP of layer `mlp`, after them the attention of layer `attention`."""

    first: int
    end: int
    mlp: int | None
    attention: int | None


def piece_of_layers(first: float, end: float) -> Piece:
    """Returns the layers in [`first`, `end`), multiples of a half: an attention is the first half of its layer, an MLP the second."""
    if first == end:
        return Piece(ceil(first), ceil(first), None, None)
    return Piece(ceil(first), int(end), int(first) if first % 1 else None, int(end) if end % 1 else None)


def expert_times(setting: Setting, kernels: Kernels) -> Times:
    """Returns the time of the router, of the all-to-all exchanges, and of the grouped products of all experts in one kernel.

    Tokens are permuted to expert order and back, each a read and a write. Nothing overlaps with the exchanges.
    """
    model, experts = setting.model, setting.model.experts
    assert experts is not None
    hidden, chosen, tokens = model.hidden, setting.chosen, ceil(setting.own_tokens)
    local = experts.routed // setting.ep
    rows, products = ceil(chosen / local), 2 if model.gated else 1
    into, out = Linear(rows, hidden, products * experts.inner), Linear(rows, experts.inner, hidden)
    total = times_of_products(Linear(tokens, hidden, experts.routed), setting, kernels, precision="bf16").plus(_ordered(setting, kernels))
    for linear in (into, out):
        every = linear._replace(rows=ceil(chosen))
        total = total.plus(times_of_products(linear, setting, kernels, local)).plus(cast_times(every, setting, kernels))
    # The second exchange of each pass has sums, which stay in half precision; the first has inputs of products.
    exchange = sum(
        kernels.to_experts(number * setting.own_tokens * hidden, experts, setting.ep, setting.neighbors)
        for number in (setting.operand_bytes, HALF)
    )
    backward = kernels.memory_traffic(chosen * experts.inner * (10 if model.gated else 6))
    return total.plus(Times(exchange + activation_seconds(setting, kernels), exchange + backward, 0.0))


def _ordered(setting: Setting, kernels: Kernels) -> Times:
    """Returns the time to permute tokens to expert order, and their sums to sequence order; in B, the reverse."""
    moved = HALF * setting.model.hidden * (3 * setting.chosen + setting.own_tokens)
    return Times(kernels.memory_traffic(moved), kernels.memory_traffic(moved), 0.0)


def activation_seconds(setting: Setting, kernels: Kernels) -> float:
    """Returns the seconds of one activation between the products of routed experts."""
    assert setting.model.experts is not None
    return kernels.memory_traffic(setting.chosen * setting.model.experts.inner * (6 if setting.model.gated else 4))
