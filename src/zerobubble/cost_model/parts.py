"""The parts of a transformer that form stages, with their times and bytes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import ceil
from typing import NamedTuple

from zerobubble.cost_model.held import embedding_saved, head_pending, head_saved, layer_pending, layer_saved
from zerobubble.cost_model.kernels import HALF, Kernels
from zerobubble.cost_model.layer import (
    NOTHING,
    Times,
    attention_times,
    cast_times,
    elementwise_times,
    embedding_times,
    head_times,
    linear_times,
    passing_times,
    times_of_products,
    up_seconds,
)
from zerobubble.cost_model.setting import Linear, Setting


def layer_times(setting: Setting, kernels: Kernels, routed: bool) -> Times:
    """Returns one transformer layer, with or without routed experts; recomputation counts as part of B."""
    core = attention_times(setting, kernels)
    linears, rest = linear_times(setting, kernels, routed), elementwise_times(setting, kernels, routed)
    once = core.plus(linears).plus(rest).plus(passing_times(setting, kernels, core))
    cheap = 0.0 if setting.model.fused_attention else core.forward
    if routed:
        once = once.plus(expert_times(setting, kernels))
        cheap += activation_seconds(setting, kernels)
    heads = cheap + up_seconds(setting, kernels)
    recomputed = {"none": 0.0, "selective": cheap, "latent": heads, "full": once.forward}[setting.recompute]
    return once._replace(backward=once.backward + recomputed)


class Part(NamedTuple):
    """A part of a model: seconds of its passes, and bytes that F keeps for B (`saved`) and B for W (`pending`), per microbatch."""

    times: Times
    saved: float
    pending: float

    def plus(self, other: Part, times: int = 1) -> Part:
        """Adds `times` the other part."""
        return Part(self.times.plus(other.times, times), self.saved + times * other.saved, self.pending + times * other.pending)


NO_PART = Part(NOTHING, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Parts:
    """A whole model on one GPU: its layers in order, between embedding and head.

    It does not depend on the numbers of ranks, stages and replicas.
    """

    embedding: Part
    layers: tuple[Part, ...]
    head: Part

    @classmethod
    def of(cls, setting: Setting, kernels: Kernels) -> Parts:
        """Returns the parts of the model of `setting`."""
        embedding = Part(embedding_times(setting, kernels), embedding_saved(setting), 0.0)
        dense, routed = (
            Part(layer_times(setting, kernels, routed), layer_saved(setting, routed), layer_pending(setting, routed)) if count else NO_PART
            for routed, count in ((False, setting.model.dense_layers), (True, setting.model.layers - setting.model.dense_layers))
        )
        head = Part(head_times(setting, kernels), head_saved(setting), head_pending(setting))
        first = setting.model.dense_layers
        return cls(embedding, (dense,) * first + (routed,) * (setting.model.layers - first), head)

    def of_stages(self, counts: Sequence[int]) -> list[Part]:
        """Returns the stages with these numbers of layers, the first with the embedding and the last with the head."""
        stages = [self._run(first, end) for first, end in pairwise(accumulate(counts, initial=0))]
        stages[0] = stages[0].plus(self.embedding)
        stages[-1] = stages[-1].plus(self.head)
        return stages

    def _run(self, first: int, end: int) -> Part:
        """Returns the sum of the layers in [`first`, `end`); equal layers are multiplied, so that equal stages are bitwise equal."""
        total = NO_PART
        for layer, equal in groupby(self.layers[first:end]):
            total = total.plus(layer, len(list(equal)))
        return total


def expert_times(setting: Setting, kernels: Kernels) -> Times:
    """Returns the time of the router, of the all-to-all exchanges, and of the grouped products of all experts in one kernel.

    Tokens are permuted to expert order and back, each a read and a write. Nothing overlaps with the exchanges.
    """
    model, experts = setting.model, setting.model.experts
    assert experts is not None
    hidden, chosen, own = model.hidden, setting.chosen, ceil(setting.own_tokens)
    local = experts.routed // setting.ep
    rows, products = ceil(chosen / local), 2 if model.gated else 1
    into, out = Linear(rows, hidden, products * experts.inner), Linear(rows, experts.inner, hidden)
    total = times_of_products(Linear(own, hidden, experts.routed), setting, kernels, precision="bf16").plus(_ordered(setting, kernels))
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
