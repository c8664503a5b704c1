"""Lists all assumptions of an estimate, as sentences with the numbers used."""

from __future__ import annotations

from collections.abc import Iterator

from zerobubble.cost_model.gpus import BANDWIDTHS
from zerobubble.cost_model.held import RUNTIME_BYTES, SHARD_BYTES, STATE_BYTES, WEIGHT_BYTES
from zerobubble.cost_model.kernels import Efficiency
from zerobubble.cost_model.setting import ERROR_BARS, Setting
from zerobubble.units import show_bytes


def assumptions_of(setting: Setting, efficiency: Efficiency) -> tuple[str, ...]:
    """Returns a sentence for each assumption about hardware, kernels, communication and memory."""
    return (*_of_hardware(setting, efficiency), *_of_passes(setting), *_of_exchanges(setting, efficiency), *_of_memory(setting))


def main_assumptions_of(setting: Setting) -> tuple[str, ...]:
    """Returns the assumptions that matter most for the memory and time of a step."""
    return _of_parameters(setting), _of_runtime(), _of_error(setting)


def _of_parameters(setting: Setting) -> str:
    weight, gradient, state = WEIGHT_BYTES, setting.gradient_bytes, STATE_BYTES
    float32 = ", as many as with weights in float32 (4, 4 and 8)" if gradient == weight else ""
    sharded = f"; Adam's{' and gradients' if setting.shard_gradients else ''} are sharded over {setting.sharers} GPUs"
    if setting.shard_weights:
        sharded = f"; FSDP2 shards Adam's over {setting.sharers} GPUs, with {SHARD_BYTES} more for its shares of weights and gradients"
    whole = f"; each of {setting.sharers} replicas has all of them"
    replicas = "" if setting.sharers == 1 else sharded if setting.shard_optimizer else whole
    return (
        f"Bytes per parameter: {weight + gradient + state}, of them {weight} for the weight, {gradient} for the gradient, {state} for "
        f"Adam{float32}{replicas}. Norms and biases are not included."
    )


def _of_runtime() -> str:
    return f"CUDA and NCCL take {show_bytes(RUNTIME_BYTES)}. Not included: temporary memory of passes and fragmentation of the allocator."


def _of_error(setting: Setting) -> str:
    return f"Nothing was measured: step times of published runs ({setting.kind}) differ by up to {100 * ERROR_BARS[setting.kind]:g} %."


def _of_hardware(setting: Setting, efficiency: Efficiency) -> Iterator[str]:
    gpu = setting.gpu
    peak = gpu.flops_of(setting.precision) / 1e12
    memory, link, network = (show_bytes(round(getattr(gpu, name))) for name in BANDWIDTHS)
    yield (
        f"Peak of one {gpu.name}: {peak:,.0f} TFLOP/s in {setting.precision}. Bandwidths: memory {memory}/s, links to "
        f"{gpu.domain_size - 1} other GPUs {link}/s, network {network}/s."
    )
    sustained = gpu.sustained_of(setting.precision) / 1e12
    yield (
        f"Power limits and clocks reduce the peak to {sustained:,.0f} TFLOP/s. Matrix products reach {efficiency.products:.2f} of that. "
        "The last wave of 256 x 128 tiles may leave SMs idle, and every wave has an overhead as if each sum had "
        f"{efficiency.wave} more terms."
    )
    slowest = efficiency.slowest_of(setting.gpus)
    yield (
        f"Speeds of GPUs have a standard deviation of {efficiency.spread:.3f} of the mean; passes take {slowest:.3f} times as long on the "
        "slowest of all."
    )
    yield f"Memory-bound operations reach {efficiency.memory_of(gpu):.2f} of the memory bandwidth and do not overlap with matrix products."


def _of_passes(setting: Setting) -> Iterator[str]:
    model = setting.model
    if model.fused_attention:
        forward, backward = (flops / 1e12 for flops in setting.gpu.attention_flops(setting.queries))
        reached = f"{forward:,.0f} TFLOP/s in F and {backward:,.0f} in B"
        yield f"Attention is fused, runs in half precision, skips the masked half of the scores, and reaches {reached}."
    else:
        yield "Attention is not fused and writes all scores to memory. Scale, mask and softmax are one kernel; dropout is another."
    yield "Bias, dropout and residual are one kernel; bias and activation are another. GPUs never wait for the host."
    if setting.precision == "fp8":
        yield "FP8: separate kernels scale inputs and gradients of linear layers by their largest value, and cast and transpose them."
    yield {
        "none": "Nothing is recomputed.",
        "selective": "B recomputes large but cheap tensors: attention if not fused, and the activation of routed experts.",
        "latent": "B recomputes the activation of routed experts, and queries, keys and values from latent vectors.",
        "full": "B recomputes all of its layers.",
    }[setting.recompute]
    vocabulary = setting.padded_vocabulary * setting.tp
    yield f"A microbatch has {setting.microbatch} x {model.sequence} tokens. The vocabulary is padded to {vocabulary:,}."


def _of_exchanges(setting: Setting, efficiency: Efficiency) -> Iterator[str]:
    yield (
        f"Collectives and messages reach {efficiency.links_of(setting.gpu):.2f} of the bandwidth of a link, with a latency of "
        f"{efficiency.latency * 1e6:.0f} us."
    )
    if setting.tp > 1:
        kind = "All-gathers and reduce-scatters along the sequence" if setting.sequence_parallel else "All-reduces"
        where = "F and B" if setting.overlap_tp else "B only"
        yield (
            f"{kind} among {setting.tp} tensor-parallel GPUs overlap with matrix products in {where}. {efficiency.contention:.2f} of the "
            "overlapped time still counts, as does communication beyond the time of the products. A B without W waits for its reduction, "
            "which otherwise overlaps with the product of W."
        )
        if setting.overlap_tp:
            yield (
                f"Products that overlap with communication of F and B are split into {setting.tp} parts, each with its own waves, where "
                "that is faster than waiting for the communication."
            )
    if setting.pp * setting.v > 1:
        over = "the links between GPUs of a machine" if setting.within_domain else "the network"
        yield f"Messages between stages use {over}. Each GPU of a tensor-parallel group sends its part, and no rank is busy with it."
    if setting.gather_keys:
        yield (
            f"{setting.cp} context-parallel groups gather all keys and values before attention, which waits for them. B gathers them "
            "again, and sums their gradients."
        )
    elif setting.cp > 1:
        yield (
            f"{setting.cp} context-parallel groups exchange keys and values during attention. Attention takes equally long on each, and "
            "communication beyond that time counts, as do kernels that merge partial results."
        )
    if setting.model.experts is not None:
        yield from _of_experts(setting)
    if setting.sharers > 1:
        sums = f"{setting.sharers} GPUs with the same parameters reduce gradients in {setting.gradients} during the passes"
        if setting.shard_optimizer:
            both = "gradients and " if setting.shard_gradients else ""
            yield f"{sums}, shard {both}the optimizer state, and gather parameters after the optimizer step."
        else:
            yield f"{sums}, and each updates all parameters: the optimizer state is not sharded."
    if setting.model.tied and setting.pp * setting.v > 1:
        yield "Not included: the reduction of the tied embedding's gradients between the first and the last stage."


def _of_experts(setting: Setting) -> Iterator[str]:
    experts = setting.model.experts
    assert experts is not None
    yield f"Each token goes to {experts.chosen} of {experts.routed} experts. All experts get the same number of tokens; none is dropped."
    if setting.ep > 1:
        limit = f", at most {experts.nodes} of them" if experts.nodes else ""
        yield (
            f"Experts are divided over {setting.ep} GPUs, {min(setting.ep, setting.neighbors)} of them in an NVLink domain. A token is "
            f"sent once to each GPU that has its experts, and once over the network to each domain{limit}. Inputs are sent in "
            f"{setting.precision}, sums in half precision, without overlap."
        )
    if setting.expert_sharers > 1:
        yield (
            f"{setting.expert_sharers} GPUs have the same experts. They reduce their gradients"
            f"{' and shard their optimizer state' if setting.shard_optimizer else ''} among themselves."
        )
    yield "Separate kernels permute tokens to expert order and back. The products of all experts of a GPU are one kernel."


def _of_memory(setting: Setting) -> Iterator[str]:
    yield _of_parameters(setting)
    yield f"Inputs of linear layers are stored in {setting.precision}, other activations in half precision."
    if setting.shard_gradients:
        yield "Kernels of their own add gradients to sums over microbatches. The whole gradients of one stage at a time are not included."
    yield _of_runtime()
    yield "The optimizer step begins when the last pass of the slowest rank has ended, and clips gradients. Data loading takes no time."
    yield _of_error(setting)
