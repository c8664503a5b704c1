"""Published figures, each table with its source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from zerobubble.cost_model import MODELS, Model

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

    `aimed` means that the estimate should be within a tenth of it; the others are for comparison.
    """

    model: str | Model
    gpu: str
    precision: str
    microbatches: int
    tokens_per_s: float
    tflops: int | None
    aimed: bool
    source: str
    setting: dict[str, Any]


_BRIDGE = "Megatron-Bridge, docs/performance-summary-archive.md, 25.11"
_NEMO = "NeMo Framework user guide, performance summary, 25.02"
_HALF = {"gradients": "bf16"}
_HIDDEN = {"overlap_tp": True} | _HALF
_SHORT_END = [8] * 7 + [5]
THROUGHPUTS = (
    Throughput("llama3-70b", "H100", "fp8", 64, 1602, 719, True, _BRIDGE, {"tp": 4, "pp": 8, "v": 5, "dp": 2} | _HIDDEN),
    Throughput("llama3-405b", "H100", "fp8", 64, 292, 737, True, _BRIDGE, {"tp": 8, "cp": 2, "pp": 8, "v": 8, "dp": 8} | _HIDDEN),
    Throughput("llama3-405b", "B200", "fp8", 32, 661, 1667, True, _BRIDGE, {"tp": 4, "cp": 2, "pp": 8, "v": 8, "dp": 2} | _HIDDEN),
    Throughput("llama3-405b", "GB200", "fp8", 384, 813, 2053, False, _BRIDGE, {"tp": 4, "pp": 16, "v": 4, "dp": 4} | _HIDDEN),
    Throughput("llama3-405b", "GB300", "fp8", 192, 999, 2522, False, _BRIDGE, {"tp": 2, "cp": 2, "pp": 8, "v": 4, "dp": 8} | _HIDDEN),
    Throughput(
        "deepseek-v3", "GB300", "bf16", 32, 3848, 961, True, _BRIDGE,
        {"ep": 32, "pp": 2, "v": 4, "dp": 128, "layers": _SHORT_END, "recompute": "selective"} | _HALF,
    ),
    Throughput(
        "deepseek-v3", "GB200", "bf16", 64, 3139, 782, False, _BRIDGE,
        {"ep": 64, "pp": 4, "v": 4, "dp": 64, "layers": [4] * 15 + [1], "recompute": "selective"} | _HALF,
    ),
    Throughput(
        replace(MODELS["gpt3-175b"], fused_attention=True), "H100", "fp8", 64, 866, None, False, _NEMO,
        {"tp": 4, "pp": 8, "v": 6, "dp": 16, "microbatch": 2} | _HIDDEN,
    ),
)  # fmt: skip
"""Training of Llama 3 and GPT-3 in FP8 with one scale for each tensor, and of DeepSeek-V3 in BF16 without its second prediction.

What the tables leave open is that of the recipes of the same release (scripts/performance/configs of Megatron-Bridge v0.2.0 to v0.3.0):
exchanges of tensor parallelism hidden in F, too, gradients kept and summed in BF16 (grad_reduce_in_fp32 is off), no layer of Llama in
BF16, nothing computed again but, for DeepSeek-V3, the activation of routed experts; its layers are 8 or 4 a stage, the last with 5 or 1.
There is a recipe of DeepSeek-V3 for GB300 with other ranks alone: that its run computed the activation again, and had this layout, is
taken from it.
"""

LLAMA3 = {"tp": 8, "pp": 16, "dp": 128}
LLAMA3_MICROBATCHES, LLAMA3_TFLOPS, LLAMA3_V = 16, 400, (4, 8)
"""The training of Llama 3 405B on 16,384 H100 in BF16: Llama Team, arXiv 2407.21783, table 4. Interleaving unknown."""

SUSTAINED_BY_GB200, LEAST_OF_GB200 = 2876.6, 2624.5
"""TFLOP/s of FP8 products in two versions of one page: Microsoft, Azure AI benchmarking guide, Azure_Results/ND_GB200_v6_results.md.

A third has 2,848.0, and Microsoft's article on it 2,744. The estimates take the first.
"""
