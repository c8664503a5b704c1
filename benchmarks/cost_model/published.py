"""Published figures, each table with its source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from zerobubble.cost_model import GPU, GPUS, MODELS, Model

GIB = 2**30


class Run(NamedTuple):
    """A model on so many ranks and stages per rank, in microbatches; `full`, `present`: seconds of a step, and GiB of activations."""

    model: str
    pp: int
    v: int
    microbatches: int
    microbatch: int
    full_s: float
    present_s: float
    none_gib: float
    present_gib: float

    @property
    def schedule(self) -> str:
        return "interleaved-1f1b" if self.v > 1 else "1f1b"


A100 = (
    Run("megatron-22b", 1, 1, 1, 4, 1.42, 1.10, 59.25, 9.5625),
    Run("megatron-175b", 8, 3, 64, 1, 18.13, 13.75, 66.84375, 12.3515625),
    Run("megatron-530b", 35, 3, 280, 1, 49.05, 37.83, 114.0234375, 23.076171875),
    Run("megatron-1t", 64, 1, 512, 1, 94.42, 71.49, 131.25, 26.5625),
)
"""Korthikanti et al., arXiv 2205.05198: shapes of table 3, seconds of table 5, on A100 with tensor parallelism over 8.

`full` computes whole layers again, without sequence parallelism; `present` has sequence parallelism and computes the attention again. The
GiB are those of figure 1, activations of the first rank, as calculon-ai/calculon has them (calculon/llm/validation.py).
"""


class Throughput(NamedTuple):
    """A published throughput, in tokens per second and, if published, TFLOP/s per GPU, with the arguments of the estimate.

    `gpu` is a name or, for other attention kernels than those of `GPUS`, a GPU. The schedule is "1f1b", or "interleaved-1f1b" for several
    stages per rank, if not given.
    """

    model: str | Model
    gpu: str | GPU
    precision: str
    microbatches: int
    tokens_per_s: float | None
    tflops: int | None
    source: str
    setting: dict[str, Any]
    schedule: str | None = None


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int) -> Model:
    """Returns the shape of a Llama 2 (Touvron et al., arXiv 2307.09288, and the configurations of NeMo Framework)."""
    return replace(
        MODELS["llama3-70b"],
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, inner=inner, vocabulary=32000, sequence=4096,
    )  # fmt: skip


def _nemotron(name: str, layers: int, hidden: int, heads: int, inner: int, **other: Any) -> Model:
    """Returns the shape of a Nemotron-4: squared ReLU and a vocabulary of 256,000 (arXiv 2402.16819, 2406.11704)."""
    shape = {"kv_heads": 8, "vocabulary": 256000, "sequence": 4096, "gated": False}
    return replace(MODELS["llama3-70b"], name=name, layers=layers, hidden=hidden, heads=heads, inner=inner, **shape | other)


LLAMA3_8B = replace(MODELS["llama3-70b"], name="llama3-8b", layers=32, hidden=4096, heads=32, inner=14336)
NEMOTRON_340B = _nemotron("nemotron-340b", 96, 18432, 96, 73728)
NEMOTRON_15B = _nemotron("nemotron-15b", 32, 6144, 48, 24576)
GPT3 = replace(MODELS["gpt3-175b"], fused_attention=True)
LLAMA3_LONG = replace(MODELS["llama3-405b"], name="llama3-405b-131k", sequence=131072)

FLASH_ATTENTION_2 = replace(GPUS["H100"], attention=(333e12, 318e12))
"""An H100 with FlashAttention-2: Shah et al., arXiv 2407.08608, figures 5 and 6, over 8,192 tokens with heads of 128."""

_BRIDGE = "Megatron-Bridge, docs/performance-summary-archive.md, "
_NEMO = "NeMo Framework user guide, performance summary, "
_HALF = {"gradients": "bf16"}
_HIDDEN = {"overlap_tp": True} | _HALF
_SHORT_END = [8] * 7 + [5]
THROUGHPUTS = (
    Throughput("llama3-70b", "H100", "fp8", 64, 1602, 719, _BRIDGE + "25.11", {"tp": 4, "pp": 8, "v": 5, "dp": 2} | _HIDDEN),
    Throughput(
        "llama3-405b", "H100", "fp8", 64, 292, 737, _BRIDGE + "25.11", {"tp": 8, "cp": 2, "pp": 8, "v": 8, "dp": 8} | _HIDDEN
    ),
    Throughput(
        "llama3-405b", "B200", "fp8", 32, 661, 1667, _BRIDGE + "25.11", {"tp": 4, "cp": 2, "pp": 8, "v": 8, "dp": 2} | _HIDDEN
    ),
    Throughput("llama3-405b", "GB200", "fp8", 384, 813, 2053, _BRIDGE + "25.11", {"tp": 4, "pp": 16, "v": 4, "dp": 4} | _HIDDEN),
    Throughput(
        "llama3-405b", "GB300", "fp8", 192, 999, 2522, _BRIDGE + "25.11", {"tp": 2, "cp": 2, "pp": 8, "v": 4, "dp": 8} | _HIDDEN
    ),
    Throughput(
        "deepseek-v3", "GB300", "bf16", 32, 3848, 961, _BRIDGE + "25.11",
        {"ep": 32, "pp": 2, "v": 4, "dp": 128, "layers": _SHORT_END, "recompute": "selective"} | _HALF,
    ),
    Throughput(
        "deepseek-v3", "GB200", "bf16", 64, 3139, 782, _BRIDGE + "25.11",
        {"ep": 64, "pp": 4, "v": 4, "dp": 64, "layers": [4] * 15 + [1], "recompute": "latent"} | _HALF,
    ),
    Throughput(GPT3, "H100", "fp8", 64, 866, None, _NEMO + "25.02", {"tp": 4, "pp": 8, "v": 6, "dp": 16, "microbatch": 2} | _HIDDEN),
)  # fmt: skip
"""Training of Llama 3 and GPT-3 in FP8 with one scale for each tensor, and of DeepSeek-V3 in BF16 without its second prediction.

What the tables leave open is that of the recipes of the same release (scripts/performance/configs of Megatron-Bridge v0.2.0 to v0.3.0):
communication of tensor parallelism overlaps in F, too, gradients are kept and summed in BF16 (grad_reduce_in_fp32 is off), no layer of
Llama is in BF16, nothing is recomputed but, for DeepSeek-V3, the activation of routed experts on GB300 (moe_act) and the up-projections of
latent attention on GB200 (mla_up_proj). The layers of DeepSeek-V3 are 8 or 4 a stage, the last with 5 or 1.
"""

_OLD = _NEMO + "24.07"
LLAMA3 = {"tp": 8, "pp": 16, "v": 8, "layers": [0] + [1] * 126 + [0], "shard_gradients": True}
"""How Llama 3 405B was trained: Llama Team, arXiv 2407.21783, section 3.3.2 and table 4.

Interleaved stages; the first "has only the embedding", the last "only output projection and loss", so that the 128 stages of 16 ranks have
one of the 126 layers each. Gradients and the optimizer are sharded, gradients are summed in float32, and nothing is recomputed. Context
parallelism gathers keys and values before attention.
"""
NOT_CHOSEN_FOR = (
    Throughput(_llama("llama2-7b", 32, 4096, 32, 32, 11008), FLASH_ATTENTION_2, "fp8", 16, 16847, None, _OLD, {"dp": 8} | _HALF),
    Throughput(
        _llama("llama2-13b", 40, 5120, 40, 40, 13824), FLASH_ATTENTION_2, "fp8", 32, 8646, None, _OLD,
        {"pp": 4, "v": 10, "dp": 4} | _HALF,
    ),
    Throughput(
        _llama("llama2-70b", 80, 8192, 64, 8, 28672), FLASH_ATTENTION_2, "fp8", 32, 1707, None, _OLD,
        {"tp": 4, "pp": 4, "v": 20, "dp": 4} | _HIDDEN,
    ),
    Throughput(GPT3, "H100", "fp8", 64, 726, None, _OLD, {"tp": 4, "pp": 8, "v": 6, "dp": 4} | _HALF),
    Throughput(LLAMA3_8B, FLASH_ATTENTION_2, "fp8", 32, 12036, None, _OLD, {"cp": 2, "dp": 4} | _HALF),
    Throughput(
        "llama3-70b", FLASH_ATTENTION_2, "fp8", 64, 1533, None, _OLD, {"tp": 4, "pp": 4, "cp": 2, "v": 5, "dp": 2} | _HIDDEN
    ),
    Throughput(NEMOTRON_340B, FLASH_ATTENTION_2, "fp8", 16, 322, None, _OLD, {"tp": 8, "pp": 8, "v": 12, "dp": 2} | _HALF),
    Throughput(
        "llama3-405b", "H100", "bf16", 32, None, 430, "arXiv 2407.21783, table 4", {"dp": 64} | LLAMA3
    ),
    Throughput(
        LLAMA3_LONG, "H100", "bf16", 16, None, 380, "arXiv 2407.21783, table 4", {"cp": 16, "dp": 8, "gather_keys": True} | LLAMA3
    ),
    Throughput(
        "deepseek-v3", "H800", "fp8", 120, 1e12 / 180e3 / 3600, None, "arXiv 2412.19437, section 2",
        {"ep": 64, "pp": 16, "v": 2, "dp": 128, "layers": [2] * 30 + [1, 0], "recompute": "latent"}, "dualpipe-v",
    ),
)  # fmt: skip
"""Runs whose figures were not known when the features of the cost model were chosen; those of this version were chosen with them known.

Of NeMo 24.07, what the table leaves open is that of NVIDIA/NeMo-Framework-Launcher at tag 24.07. There, launcher_scripts/conf/config.yaml
disables cuDNN's attention (NVTE_FUSED_ATTN: 0), so that FlashAttention-2 runs, except in examples/training/gpt/h100/175b_fp8_16node.sh.
Communication of tensor parallelism overlaps (ub_tp_comm_overlap) for Llama 2 and 3 70B only, and gradients are summed in BF16.

DeepSeek-V3
took 180,000 GPU hours for 10^12 tokens, with DualPipe, 16 ranks, and experts over 64 GPUs. Norms, up-projections and activations were
recomputed.
"""

_PAIR = {"tp": 4, "pp": 16, "v": 4, "dp": 4} | _HIDDEN
HELD_OUT = (
    Throughput("llama3-70b", "H100", "fp8", 128, 1633, 734, _BRIDGE + "26.04", {"tp": 4, "pp": 8, "v": 5, "dp": 2} | _HIDDEN),
    Throughput(
        "llama3-405b", "H100", "fp8", 192, 328, 827, _BRIDGE + "26.04.01", {"tp": 8, "cp": 2, "pp": 8, "v": 8, "dp": 8} | _HIDDEN
    ),
    Throughput("llama3-70b", "B200", "fp8", 32, 3062, 1474, _NEMO + "25.02", {"tp": 2, "pp": 4, "cp": 2, "v": 5, "dp": 4} | _HIDDEN),
    Throughput(LLAMA3_8B, "B200", "fp8", 8, 26006, 1506, _NEMO + "25.02", {"dp": 8, "microbatch": 2} | _HALF),
    Throughput(LLAMA3_8B, "B200", "fp8", 8, 30624, 1576, _BRIDGE + "25.11", {"dp": 8, "microbatch": 2} | _HALF),
    Throughput(LLAMA3_8B, "GB200", "fp8", 8, 31508, 1622, _BRIDGE + "25.11", {"dp": 8, "microbatch": 2} | _HALF),
    Throughput(LLAMA3_8B, "GB300", "fp8", 8, 37556, 1933, _BRIDGE + "25.11", {"dp": 8, "microbatch": 2} | _HALF),
    Throughput(
        GPT3, "B200", "fp8", 32, 1600, 1722, _NEMO + "25.02", {"tp": 4, "pp": 4, "v": 6, "dp": 32, "microbatch": 2} | _HIDDEN
    ),
    Throughput(
        GPT3, "GB200", "fp8", 16, 1804, 1942, _NEMO + "25.04", {"tp": 4, "pp": 4, "v": 12, "dp": 8, "microbatch": 2} | _HIDDEN
    ),
    Throughput(NEMOTRON_15B, "B200", "fp8", 2, 14760, 1387, _NEMO + "25.02", {"dp": 64, "microbatch": 2} | _HALF),
    Throughput(NEMOTRON_15B, "GB200", "fp8", 2, 17809, 1674, _NEMO + "25.04", {"dp": 64, "microbatch": 2} | _HALF),
    Throughput(NEMOTRON_340B, "B200", "fp8", 8, 602, 1268, _NEMO + "25.02", {"tp": 8, "pp": 4, "v": 12, "dp": 4} | _HIDDEN),
    Throughput(NEMOTRON_340B, "GB200", "fp8", 8, 737, 1551, _NEMO + "25.04", {"tp": 8, "pp": 4, "v": 12, "dp": 4} | _HIDDEN),
    Throughput("llama3-405b", "GB200", "fp8", 384, 842, 2126, _BRIDGE + "26.04", _PAIR),
    Throughput("llama3-405b", "GB300", "fp8", 192, 1036, 2615, _BRIDGE + "26.04", {"tp": 4, "pp": 8, "v": 4, "dp": 8} | _HIDDEN),
)  # fmt: skip
"""Runs that were estimated once, after all features and constants had been chosen: no figure of theirs was used."""

LLAMA3_MICROBATCHES, LLAMA3_TFLOPS = 16, 400
"""Of Llama 3 405B on 16,384 H100 in BF16: Llama Team, arXiv 2407.21783, table 4."""

SUSTAINED_BY_GB200, LEAST_OF_GB200 = 2876.6, 2624.5
"""TFLOP/s of FP8 products in two versions of one page: Microsoft, Azure AI benchmarking guide, Azure_Results/ND_GB200_v6_results.md.

A third has 2,848.0, and Microsoft's article on it 2,744. The estimates take the first.
"""
