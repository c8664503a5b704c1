"""Times of a transformer layer's routed experts on one GPU, including the all-to-all exchange of tokens."""

from __future__ import annotations

from math import ceil

from zerobubble.cost_model.kernels import HALF, Kernels
from zerobubble.cost_model.layer import Times, cast_times, times_of_products
from zerobubble.cost_model.setting import Linear, Setting


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
    exchange = 2 * kernels.to_experts(HALF * setting.own_tokens * hidden, experts, setting.ep, setting.neighbours)
    backward = kernels.stream(chosen * experts.inner * (10 if model.gated else 6))
    return total.plus(Times(exchange + activation_seconds(setting, kernels), exchange + backward, 0.0))


def _ordered(setting: Setting, kernels: Kernels) -> Times:
    """Returns the time to permute tokens to expert order, and their sums to sequence order; in B, the reverse."""
    moved = HALF * setting.model.hidden * (3 * setting.chosen + setting.own_tokens)
    return Times(kernels.stream(moved), kernels.stream(moved), 0.0)


def activation_seconds(setting: Setting, kernels: Kernels) -> float:
    """Returns the seconds of one activation between the products of routed experts."""
    assert setting.model.experts is not None
    return kernels.stream(setting.chosen * setting.model.experts.inner * (6 if setting.model.gated else 4))
