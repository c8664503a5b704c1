"""What one GPU computes of a transformer layer's routed experts, in seconds, and the exchanges of tokens with the GPUs that have them."""

from __future__ import annotations

from math import ceil

from zerobubble.cost_model.kernels import HALF, Kernels
from zerobubble.cost_model.layer import Times, cast_times, times_of_products
from zerobubble.cost_model.setting import Linear, Setting


def expert_times(setting: Setting, kernels: Kernels) -> Times:
    """The router, the exchanges with the GPUs that have a token's experts, and the experts' products, of all of them in one kernel.

    What comes is put in the order of experts and, behind them, back: each time read and written. Nothing is hidden beside the exchanges.
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
    """Tokens are read and written in the order of experts, and their sums in the order of the sequence; in B the same the other way."""
    moved = HALF * setting.model.hidden * (3 * setting.chosen + setting.own_tokens)
    return Times(kernels.stream(moved), kernels.stream(moved), 0.0)


def activation_seconds(setting: Setting, kernels: Kernels) -> float:
    """Seconds of the activation between the products of routed experts, once."""
    assert setting.model.experts is not None
    return kernels.stream(setting.chosen * setting.model.experts.inner * (6 if setting.model.gated else 4))
