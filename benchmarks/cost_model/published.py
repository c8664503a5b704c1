"""Published figures: what was run, and what it took. Each table with its source."""

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
    """A published throughput on H100 in FP8, in tokens per second and GPU, and the arguments of the estimate."""

    model: str | Model
    microbatches: int
    tokens_per_s_per_gpu: float
    source: str
    setting: dict[str, Any]


_BRIDGE = "Megatron-Bridge, docs/performance-summary.md, 25.11, DGX-H100, FP8-CS"
_NEMO = "NeMo Framework user guide, performance summary, 25.02, DGX-H100, FP8"
H100 = (
    Throughput("llama3-70b", 64, 1602, _BRIDGE, {"tp": 4, "pp": 8, "v": 5, "dp": 2}),
    Throughput("llama3-405b", 64, 292, _BRIDGE, {"tp": 8, "cp": 2, "pp": 8, "v": 8, "dp": 8}),
    Throughput(replace(MODELS["gpt3-175b"], fused_attention=True), 64, 866, _NEMO, {"tp": 4, "pp": 8, "v": 6, "dp": 16, "microbatch": 2}),
)
"""Whether these runs hid tensor parallelism's exchanges, and what they computed again, the tables do not say."""
