"""Lists all assumptions of an estimate, as sentences with the numbers used."""

from __future__ import annotations

from collections.abc import Iterator

from zerobubble.cost_model.held import STATE_BYTES, WEIGHT_BYTES
from zerobubble.cost_model.kernels import Efficiency
from zerobubble.cost_model.setting import Setting
from zerobubble.units import show_bytes


def assumptions_of(setting: Setting, efficiency: Efficiency) -> tuple[str, ...]:
    """Returns a sentence for each assumption about hardware, kernels, communication and memory."""
    return (*_of_hardware(setting, efficiency), *_of_passes(setting, efficiency), *_of_exchanges(setting, efficiency), *_of_memory(setting))


def _of_hardware(setting: Setting, efficiency: Efficiency) -> Iterator[str]:
    gpu = setting.gpu
    peak = gpu.flops_of(setting.precision) / 1e12
    yield (
        f"An {gpu.name} computes {peak:,.0f} TFLOP/s in {setting.precision}, moves {show_bytes(round(gpu.memory))} of its memory a second, "
        f"and sends {show_bytes(round(gpu.link))} a second to the {gpu.domain - 1} others of its domain and "
        f"{show_bytes(round(gpu.network))} beyond."
    )
    sustained = gpu.sustained_of(setting.precision) / 1e12
    yield (
        f"Power and clocks leave {sustained:,.0f} TFLOP/s of that. Matrix products reach {efficiency.products:.2f} of these, less what "
        f"idle processors of the last wave of 256 x 128 tiles and {efficiency.wave} terms a wave for its begin and end cost."
    )
    yield f"What is bound by memory reaches {efficiency.memory:.2f} of its bandwidth; none of it overlaps with products."


def _of_passes(setting: Setting, efficiency: Efficiency) -> Iterator[str]:
    model = setting.model
    if model.fused_attention:
        forward, backward = (flops / 1e12 for flops in setting.gpu.attention_flops)
        reached = f"{forward:,.0f} TFLOP/s in F and {backward:,.0f} in B"
        yield f"Attention is fused, in half precision, computes the half of the scores that the mask leaves, and reaches {reached}."
    else:
        yield "Attention writes all its scores to memory; scale, mask and softmax are one kernel, dropout another."
    yield "Bias, dropout and residual are one kernel, and so are bias and activation; the host never keeps a GPU waiting."
    if setting.precision == "fp8":
        yield "In fp8 inputs and gradients of linear layers are scaled by their largest value, cast and transposed by separate kernels."
    yield {
        "none": "Nothing is recomputed.",
        "selective": "B recomputes large but cheap tensors: attention if not fused, and the activation of routed experts.",
        "full": "B recomputes all of its layers.",
    }[setting.recompute]
    yield f"Microbatches are {setting.microbatch} x {model.sequence} tokens, the vocabulary is padded to {setting.words * setting.tp:,}."


def _of_exchanges(setting: Setting, efficiency: Efficiency) -> Iterator[str]:
    yield f"Collectives and messages reach {efficiency.links:.2f} of a link's bandwidth after {efficiency.latency * 1e6:.0f} us."
    if setting.tp > 1:
        kind = "gathers and reduce-scatters along the sequence" if setting.sequence_parallel else "all-reduces"
        where = "in F and B" if setting.overlap_tp else "in B only"
        yield (
            f"The {kind} of {setting.tp} GPUs overlap with products {where}; {efficiency.contention:.2f} of the overlapped time is "
            "still paid, and all communication that takes longer than the products. A separate B waits for the sum that "
            "otherwise overlaps with the product of W."
        )
        if setting.overlap_tp:
            yield f"Products that overlap with communication of F and B are split into {setting.tp} parts, each with its own waves."
    if setting.pp * setting.v > 1:
        over = "the domain's links" if setting.within_domain else "the network"
        yield f"Messages between stages go over {over}, each GPU of a group sending its share, and keep no rank busy."
    if setting.cp > 1:
        yield f"{setting.cp} groups pass keys and values on during attention, which takes equally long on each, and wait for the rest."
    if setting.model.experts is not None:
        yield from _of_experts(setting)
    if setting.sharers > 1:
        yield (
            f"{setting.sharers} GPUs with the same parameters sum gradients in {setting.gradients} during the passes, divide the "
            "optimizer's state and gather parameters after its step."
        )
    if setting.model.tied and setting.pp * setting.v > 1:
        yield "The sum of the tied embedding's gradients between the first and the last stage is left out."


def _of_experts(setting: Setting) -> Iterator[str]:
    experts = setting.model.experts
    assert experts is not None
    yield f"Each token goes to {experts.chosen} of {experts.routed} experts; every one of them gets as many, and none is dropped."
    if setting.ep > 1:
        limit = f", at most {experts.nodes} of them" if experts.nodes else ""
        yield (
            f"Experts lie on {setting.ep} GPUs, {min(setting.ep, setting.neighbours)} of them in a domain; tokens go once to each that has "
            f"experts of theirs, and over the network once to each domain{limit}, in half precision, without overlap."
        )
    if setting.expert_sharers > 1:
        yield f"{setting.expert_sharers} GPUs have the same experts, and sum their gradients and divide their optimizer's state alone."
    yield "Tokens are permuted to expert order and back by separate kernels, and the products of all experts of a GPU are one kernel."


def _of_memory(setting: Setting) -> Iterator[str]:
    yield (
        f"A parameter takes {WEIGHT_BYTES} bytes, its gradient {setting.gradient_bytes} and Adam {STATE_BYTES}"
        f"{' over all GPUs that share it' if setting.sharers > 1 else ''}; norms and biases are left out."
    )
    yield "Activations are kept in half precision."
    yield "What a pass needs while it runs, buffers of exchanges and gaps of the allocator are left out."
    yield "The optimizer's step begins when the slowest rank's last pass has ended, and clips gradients; data is there when it is needed."
