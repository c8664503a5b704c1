"""Times on one GPU of a transformer layer without its routed experts, of the embedding and of the head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zerobubble.cost_model.kernels import HALF, Kernels, Product
from zerobubble.cost_model.setting import Linear, Setting


class Times(NamedTuple):
    """Seconds of F, of B and W in one pass, and the additional time of a separate B.

    `exposed` is communication that overlaps with the product of W: a B with a separate W waits for it (STP, arXiv 2510.27257).
    """

    forward: float
    backward: float
    weight: float
    exposed: float = 0.0

    @property
    def fused(self) -> float:
        """The seconds of F and of BW, a fused backward pass."""
        return self.forward + self.backward + self.weight

    def plus(self, other: Times, times: int = 1) -> Times:
        """Adds `times` the others."""
        return Times(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Times(0.0, 0.0, 0.0)


def attention_times(setting: Setting, kernels: Kernels) -> Times:
    """Returns the time of attention between the projections: scores, softmax, dropout and weighted sums. It has no W."""
    model = setting.model
    if model.fused_attention:
        scores = setting.tokens * model.sequence * model.heads / setting.tp / 2  # half of them are masked
        forward, backward = kernels.gpu.attention_flops(setting.queries)
        # Scores and weighted sums; recomputed scores, and the gradients of values and scores, of queries and keys.
        return Times(
            2 * scores * (model.key_width + model.value_width) / forward,
            2 * scores * (3 * model.key_width + 2 * model.value_width) / backward,
            0.0,
        )
    queries, keys, width = setting.queries, model.sequence, model.key_width
    batch = setting.attention_batch
    products = kernels.product(Product(queries, keys, width, batch)) + kernels.product(Product(queries, width, keys, batch))
    masks = 5 if model.dropout else 0  # read, write, and a byte of mask in each direction
    forward = products + kernels.memory_traffic(setting.scores * (4 + masks))
    return Times(forward, 2 * products + kernels.memory_traffic(setting.scores * (6 + masks)), 0.0)


def linear_times(linears: Iterable[Linear], setting: Setting, kernels: Kernels) -> Times:
    """Returns the time of linear layers for all tokens, with their communication."""
    total = NOTHING
    for linear in linears:
        products = times_of_products(linear, setting, kernels)
        times = products.plus(exchange_times(linear, setting, kernels, products))
        if setting.overlap_tp and setting.tp > 1:
            times = _in_parts(linear, setting, kernels, products, times)
        total = total.plus(times).plus(cast_times(linear, setting, kernels))
    return total


def _in_parts(linear: Linear, setting: Setting, kernels: Kernels, products: Times, whole: Times) -> Times:
    """Returns the time of a linear layer's products and communication where F and B overlap them in parts, one per GPU of the group.

    Each pass takes the faster of the two ways: parts have waves of their own, which can cost more than the communication that they hide.
    """
    parts = times_of_products(linear._replace(rows=linear.rows // setting.tp), setting, kernels)
    forward = setting.tp * parts.forward if linear.gathers or linear.sums else products.forward
    split = products._replace(forward=forward, backward=setting.tp * parts.backward if linear.sums else products.backward)
    split = split.plus(exchange_times(linear, setting, kernels, split, in_parts=True))
    return whole._replace(forward=min(whole.forward, split.forward), backward=min(whole.backward, split.backward))


def times_of_products(linear: Linear, setting: Setting, kernels: Kernels, batch: int = 1, precision: str | None = None) -> Times:
    """Returns the time of a linear layer's products, or of a `batch` of them in one kernel, optionally in another `precision`."""
    precision = precision or setting.precision
    rows, inputs, outputs = linear.rows, linear.inputs, linear.outputs
    return Times(
        kernels.product(Product(rows, outputs, inputs, batch), precision),
        kernels.product(Product(rows, inputs, outputs, batch), precision),
        weight_seconds(Product(outputs, inputs, rows, batch), setting, kernels, precision),
    )


def weight_seconds(product: Product, setting: Setting, kernels: Kernels, precision: str = "bf16") -> float:
    """Returns the seconds of a product whose result is added to gradients.

    The product adds it itself, as in Megatron-LM. With `shard_gradients`, it writes half precision, and a separate kernel adds that to the
    sum (reads 2 bytes and a gradient, writes a gradient), as in FSDP2 (`FSDPParam.accumulate_unsharded_grad_if_needed` of torch).
    """
    if not setting.shard_gradients:
        return kernels.product(product, precision, setting.gradient_bytes)
    added = product.batch * product.rows * product.columns * (HALF + 2 * setting.gradient_bytes)
    return kernels.product(product, precision) + kernels.memory_traffic(added)


def cast_times(linear: Linear, setting: Setting, kernels: Kernels) -> Times:
    """Returns the time to cast the inputs of a linear layer and the gradients of its outputs to FP8; none in other precisions.

    The cast finds the maximum (reads 2 bytes), then reads 2 bytes and writes 1 byte twice, plain and transposed. For gathered tensors, the
    group first reduces the maximum, then each GPU casts its part.
    """
    if setting.precision != "fp8":
        return NOTHING
    parts = setting.own_tokens / setting.tokens
    inputs = 6 * linear.rows * linear.inputs * (parts if linear.gathers else 1)
    gradient = 6 * linear.rows * linear.outputs * (parts if linear.sums else 1)
    agreed = 2 * kernels.efficiency.latency if setting.tp > 1 and setting.sequence_parallel else 0.0
    return Times(kernels.memory_traffic(inputs) + linear.gathers * agreed, kernels.memory_traffic(gradient) + linear.sums * agreed, 0.0)


def exchange_times(linear: Linear, setting: Setting, kernels: Kernels, products: Times, in_parts: bool = False) -> Times:
    """Returns the time of tensor-parallel communication around a linear layer, overlapped with its `products` if possible.

    If F gathers inputs, B gathers them a second time during its own product, and reduces their gradients during the product of W; it waits
    for this if W is a separate pass. If F sums outputs, B gathers their gradients for its product. F and this product wait for
    communication or, if it is `in_parts`, overlap with all of it but one part. Without sequence parallelism, all-reduces are used.
    In FP8, a gathered element has one byte.
    """
    if setting.tp == 1:
        return NOTHING
    number = 1 if setting.precision == "fp8" and setting.sequence_parallel else HALF
    share = (setting.tp - 1) / setting.tp

    def by_parts(exchange: float, product: float) -> float:
        return kernels.overlapped(exchange, share * product) if in_parts else exchange

    if linear.gathers:
        gathered = kernels.gather(number * linear.rows * linear.inputs, setting.tp)
        summed = kernels.gather(HALF * linear.rows * linear.inputs, setting.tp)
        if not setting.sequence_parallel:
            reduction = kernels.overlapped(2 * summed, products.weight)
            return Times(0.0, reduction, 0.0, 2 * summed - reduction)
        gather, reduction = kernels.overlapped(gathered, products.backward), kernels.overlapped(summed, products.weight)
        return Times(by_parts(gathered, products.forward), gather + reduction, 0.0, summed - reduction)
    if linear.sums:
        summed = kernels.gather(HALF * linear.rows * linear.outputs, setting.tp)
        if not setting.sequence_parallel:
            return Times(by_parts(2 * summed, products.forward), 0.0, 0.0)
        gathered = kernels.gather(number * linear.rows * linear.outputs, setting.tp)
        return Times(by_parts(summed, products.forward), by_parts(gathered, products.backward), 0.0)
    return NOTHING


def up_seconds(setting: Setting, kernels: Kernels) -> float:
    """Returns the seconds to make queries, keys and values of all heads from latent vectors."""
    if setting.model.latent is None:
        return 0.0
    ups = [linear for linear in setting.attention_linears() if linear.inputs in (setting.model.latent.queries, setting.model.latent.keys)]
    return sum(
        times_of_products(linear, setting, kernels).forward
        + cast_times(linear, setting, kernels).forward
        + exchange_times(linear, setting, kernels, NOTHING).forward
        for linear in ups
    )


def elementwise_times(setting: Setting, kernels: Kernels) -> Times:
    """Returns the time of memory-bound operations of a half of a layer: its norm, residual and dropout.

    Kernels are fused as in Megatron-LM: bias, dropout and residual; bias and activation.
    """
    dropout = setting.model.dropout
    forward, backward = (
        setting.hidden_elements * (2 * HALF + (7 if dropout else 6)),
        setting.hidden_elements * (6 + 6 + (5 if dropout else 0)),
    )
    return Times(kernels.memory_traffic(forward), kernels.memory_traffic(backward), 0.0)


def layout_times(setting: Setting, kernels: Kernels) -> Times:
    """Returns the time of memory-bound operations inside attention: the layout of heads, and norms of latent vectors."""
    turned = 2 * HALF * setting.attended * (1 if setting.model.dropout else 2)  # rotary embeddings, in models without dropout, are another
    return Times(
        kernels.memory_traffic(turned + 2 * HALF * setting.latent), kernels.memory_traffic(turned + 3 * HALF * setting.latent), 0.0
    )


def inner_times(setting: Setting, kernels: Kernels, routed: bool) -> Times:
    """Returns the time of memory-bound operations inside the MLP, or the shared experts: the activation."""
    inner, gated = setting.inner(routed), setting.model.gated
    return Times(kernels.memory_traffic(inner * (6 if gated else 4)), kernels.memory_traffic(inner * (10 if gated else 6)), 0.0)


def passing_times(setting: Setting, kernels: Kernels, attention: Times) -> Times:
    """Returns the time of context parallelism: exchanging keys and values (in B also their gradients), and merging partial results.

    The exchange overlaps with `attention`. Attention has one kernel for each group's keys; after it, F scales the partial output and adds
    it to the sum (reads 2 + 2 bytes, writes 2), and B adds the partial gradients of queries, keys and values. As in Transformer Engine.

    With `gather_keys`, attention waits for all keys and values and has one kernel, as in Llama 3 (arXiv 2407.21783, section 3.3.2). B
    gathers them a second time, and sums their gradients.
    """
    if setting.cp == 1:
        return NOTHING
    if setting.gather_keys:
        neighbors = max(1, setting.gpu.domain_size // setting.tp)
        whole = kernels.gather(HALF * setting.cp * setting.keys_and_values, setting.cp, neighbors)
        return Times(whole, 2 * whole, 0.0)
    exchange = (setting.cp - 1) * kernels.send(HALF * setting.keys_and_values, setting.tp * setting.cp <= setting.gpu.domain_size)
    # The causal mask hides half of the pairs of a query and a group's keys: on average, a kernel has half of the queries or of the keys.
    merged = 3 * HALF * setting.cp / 2
    outputs, gradients = setting.outputs, setting.attended - setting.outputs
    return Times(
        kernels.overlapped(exchange, attention.forward) + kernels.memory_traffic(merged * outputs),
        kernels.overlapped(2 * exchange, attention.backward) + kernels.memory_traffic(merged * gradients),
        0.0,
    )


def embedding_times(setting: Setting, kernels: Kernels) -> Times:
    """Returns the time of the embedding lookup, summed over the tensor-parallel group, with dropout."""
    exchanged = kernels.gather(HALF * setting.tokens * setting.model.hidden, setting.tp) * (1 if setting.sequence_parallel else 2)
    look_up = kernels.memory_traffic(setting.hidden_elements * (9 if setting.model.dropout else 4))
    return Times(
        look_up + exchanged,
        kernels.memory_traffic(setting.hidden_elements * 5),
        kernels.memory_traffic(setting.tokens * setting.model.hidden * 10),
    )


def head_times(setting: Setting, kernels: Kernels) -> Times:
    """Returns the time of the last norm, the product with the vocabulary in half precision, and the loss in float32."""
    hidden, tokens, vocabulary = setting.model.hidden, setting.tokens, setting.padded_vocabulary
    gather = kernels.gather(HALF * tokens * hidden, setting.tp)
    exchanged = gather if setting.sequence_parallel else 0.0
    # Forward: cast (2 + 4), maximum (4), difference (8), exponential and sum (8). Backward: read the softmax, write and cast the gradient.
    logits = tokens * vocabulary
    rest = (
        kernels.memory_traffic(logits * 26 + setting.hidden_elements * 4),
        kernels.memory_traffic(logits * 14 + setting.hidden_elements * 6),
    )
    return Times(
        kernels.product(Product(tokens, vocabulary, hidden)) + rest[0] + exchanged,
        kernels.product(Product(tokens, hidden, vocabulary)) + rest[1] + gather * kernels.efficiency.contention,
        weight_seconds(Product(vocabulary, hidden, tokens), setting, kernels),
        gather * (1 - kernels.efficiency.contention),
    )
