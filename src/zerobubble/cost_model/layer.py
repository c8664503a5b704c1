"""What one GPU computes of a transformer layer, of the embedding and of the head, in seconds."""

from __future__ import annotations

from typing import NamedTuple

from zerobubble.cost_model.kernels import HALF, Kernels, Product
from zerobubble.cost_model.setting import Linear, Setting


class Times(NamedTuple):
    """Seconds of F, B and W."""

    forward: float
    backward: float
    weight: float

    def plus(self, other: Times, times: int = 1) -> Times:
        """These and `times` the others."""
        return Times(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Times(0.0, 0.0, 0.0)


def layer_times(setting: Setting, kernels: Kernels) -> Times:
    """One transformer layer; what is computed again counts as part of B."""
    core = attention_times(setting, kernels)
    products, rest, exchanges = linear_times(setting, kernels), elementwise_times(setting, kernels), exchange_times(setting, kernels)
    once = core.plus(products).plus(rest).plus(exchanges).plus(passing_times(setting, kernels, core))
    again = {"none": 0.0, "selective": core.forward, "full": once.forward}[setting.recompute]
    return once._replace(backward=once.backward + again)


def attention_times(setting: Setting, kernels: Kernels) -> Times:
    """Scores, softmax, dropout and the sums of values, all that lies between the projections; there is no W."""
    if setting.model.fused_attention:
        flops = 2 * setting.tokens * setting.model.sequence * setting.model.hidden / setting.tp  # half of the scores are masked
        shares = kernels.efficiency
        forward = kernels.fused_attention(flops, shares.attention_forward)
        return Times(forward, kernels.fused_attention(2.5 * flops, shares.attention_backward), 0.0)
    queries, keys, width = setting.queries, setting.model.sequence, setting.model.hidden // setting.model.heads
    batch = setting.attention_batch
    products = kernels.product(Product(queries, keys, width, batch)) + kernels.product(Product(queries, width, keys, batch))
    masks = 5 if setting.model.dropout else 0  # read, write, and a byte of mask either way
    forward = products + kernels.stream(setting.scores * (4 + masks))
    return Times(forward, 2 * products + kernels.stream(setting.scores * (6 + masks)), 0.0)


def linear_times(setting: Setting, kernels: Kernels) -> Times:
    """The four linear layers of a transformer layer."""
    total = NOTHING
    for linear in setting.linears:
        total = total.plus(_one_linear(linear, setting, kernels))
    return total


def _one_linear(linear: Linear, setting: Setting, kernels: Kernels) -> Times:
    tokens, precision = setting.tokens, setting.precision
    times = Times(
        kernels.product(Product(tokens, linear.outputs, linear.inputs), precision),
        kernels.product(Product(tokens, linear.inputs, linear.outputs), precision),
        kernels.product(Product(linear.outputs, linear.inputs, tokens), precision, sums=True),
    )
    if precision != "fp8":
        return times
    # The largest value is looked for (2 bytes read), then numbers are cast (2 read) and written twice, as they are and transposed (1 each).
    given, gradient = (setting.wide, tokens * linear.outputs) if linear.gathers else (tokens * linear.inputs, setting.wide)
    return times.plus(Times(kernels.stream(6 * given), kernels.stream(6 * gradient), 0.0))


def elementwise_times(setting: Setting, kernels: Kernels) -> Times:
    """Norms, residuals, dropout, the activation of the MLP and the layout of heads: what is bound by memory alone.

    Kernels are fused as Megatron-LM fuses them: bias, dropout and residual; bias and activation.
    """
    model = setting.model
    heads = 2 * setting.narrow + 2 * setting.kv_narrow
    turned = 2 * HALF * heads * (1 if model.dropout else 2)  # a model without dropout has rotary embeddings, another read and write
    forward = 2 * setting.wide * (2 * HALF + (7 if model.dropout else 6)) + turned
    forward += setting.inner_narrow * (6 if model.gated else 4)
    backward = 2 * setting.wide * (6 + 6 + (5 if model.dropout else 0)) + turned
    backward += setting.inner_narrow * (10 if model.gated else 6)
    return Times(kernels.stream(forward), kernels.stream(backward), 0.0)


def exchange_times(setting: Setting, kernels: Kernels) -> Times:
    """Gathers and sums of hidden states in the tensor-parallel group.

    F waits for the two of both blocks. In B what follows a column-parallel layer is hidden beside its products; with sequence parallelism
    inputs are gathered again, hidden too, and the gradient of a row-parallel layer is gathered, which B waits for.
    """
    one = kernels.gather(HALF * setting.tokens * setting.model.hidden, setting.tp)
    paid = kernels.efficiency.contention
    waited_for = paid if setting.overlap_tp else 1.0
    gathered = 2 * one * waited_for if setting.sequence_parallel else 0.0
    return Times(4 * one * waited_for, gathered + 4 * one * paid, 0.0)


def passing_times(setting: Setting, kernels: Kernels, attention: Times) -> Times:
    """What passing on keys and values costs in context parallelism, and in B their gradients, too, beside `attention`.

    A part of what is hidden is paid, and all that takes longer than the attention.
    """
    one = (setting.cp - 1) * kernels.send(2 * HALF * setting.kv_narrow, setting.tp * setting.cp <= setting.gpu.domain)
    paid = kernels.efficiency.contention
    forward, backward = (max(paid * time, time - beside) for time, beside in ((one, attention.forward), (2 * one, attention.backward)))
    return Times(forward, backward, 0.0)


def embedding_times(setting: Setting, kernels: Kernels) -> Times:
    """The look-up of words, whose parts are summed over the tensor-parallel group, with dropout."""
    exchanged = kernels.gather(HALF * setting.tokens * setting.model.hidden, setting.tp) * (1 if setting.sequence_parallel else 2)
    look_up = kernels.stream(setting.wide * (9 if setting.model.dropout else 4))
    return Times(look_up + exchanged, kernels.stream(setting.wide * 5), kernels.stream(setting.tokens * setting.model.hidden * 10))


def head_times(setting: Setting, kernels: Kernels) -> Times:
    """The last norm, the product with the vocabulary in half precision and the loss in float32."""
    hidden, tokens, words = setting.model.hidden, setting.tokens, setting.words
    one = kernels.gather(HALF * tokens * hidden, setting.tp)
    exchanged = one if setting.sequence_parallel else 0.0
    # Forward: cast (2 + 4), largest (4), difference (8), exponential and sum (8). Backward: read the softmax, write and cast the gradient.
    logits = tokens * words
    rest = (kernels.stream(logits * 26 + setting.wide * 4), kernels.stream(logits * 14 + setting.wide * 6))
    return Times(
        kernels.product(Product(tokens, words, hidden)) + rest[0] + exchanged,
        kernels.product(Product(tokens, hidden, words)) + rest[1] + one * kernels.efficiency.contention,
        kernels.product(Product(words, hidden, tokens), sums=True),
    )
