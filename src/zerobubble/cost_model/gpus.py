"""Data sheets of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from zerobubble.arguments import takes
from zerobubble.cost_model.checks import require_amounts
from zerobubble.display import Displayed
from zerobubble.errors import InputError, near
from zerobubble.units import show_bytes

BANDWIDTHS = "memory_bandwidth", "link_bandwidth", "network_bandwidth"


@takes()
@dataclass(frozen=True, slots=True, repr=False)
class GPU(Displayed):
    """A GPU in a cluster, by its data sheet: dense FLOP/s, bytes per second, bytes.

    `flops` has the FLOP/s of matrix products by precision. `memory_bytes` is the size of its memory. `link_bandwidth` is the send bandwidth
    to the other GPUs of its NVLink domain, which has `domain_size` GPUs, and `network_bandwidth` the send bandwidth beyond. `processors` is
    the number of streaming multiprocessors (SMs), over which a matrix product is divided in waves.

    Data sheets leave out the effect of power limits and clocks, so two fields are measured. `sustained` has the steady-state FLOP/s of long
    products by precision, and `attention` those of fused causal attention in F and in B. By default, an A100's fractions of `flops` apply.
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    processors: int
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    domain_size: int
    network_bandwidth: float
    sustained: tuple[tuple[str, float], ...] = ()
    attention: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        amounts = {name: getattr(self, name) for name in ("processors", "memory_bytes", "domain_size", *BANDWIDTHS)}
        amounts |= {f"{precision} flops": value for precision, value in self.flops}
        amounts |= {f"sustained {precision} flops": value for precision, value in self.sustained}
        amounts |= dict(zip(("attention flops in F", "attention flops in B"), self.attention or (), strict=False))
        require_amounts(f"GPU {self.name!r}", amounts)

    def _summary(self) -> str:
        computed = ", ".join(f"{flops / 1e12:,.0f} TFLOP/s in {precision}" for precision, flops in self.flops)
        return f"{self.name}: {computed}, {show_bytes(self.memory_bytes)} at {show_bytes(round(self.memory_bandwidth))}/s"

    def flops_of(self, precision: str) -> float:
        """Returns the FLOP/s of matrix products in `precision`; raises `InputError` if the GPU does not support it."""
        known = dict(self.flops)
        if precision not in known:
            raise InputError(self.unsupported(precision))
        return known[precision]

    def sustained_of(self, precision: str) -> float:
        """Returns the sustained FLOP/s of long matrix products in `precision`; raises `InputError` if the GPU does not support it."""
        return dict(self.sustained).get(precision, PRODUCTS_OF_A100 * self.flops_of(precision))

    @property
    def attention_flops(self) -> tuple[float, float]:
        """Returns the FLOP/s of fused causal attention in half precision, in F and in B."""
        if self.attention is not None:
            return self.attention
        forward, backward = ATTENTION_OF_A100
        return forward * self.flops_of("bf16"), backward * self.flops_of("bf16")

    def unsupported(self, precision: str) -> str:
        """Returns the message that the GPU does not support `precision`, with the supported ones."""
        return f"the {self.name} does not support {precision!r}: take {' or '.join(repr(known) for known, _ in self.flops)}"


GPUS: dict[str, GPU] = {}
"""The GPUs known by name, each added where it is defined below. `GPU` describes others."""


def _known(gpu: GPU) -> GPU:
    """Adds `gpu` to `GPUS` and returns it."""
    GPUS[gpu.name] = gpu
    return gpu


PRODUCTS_OF_A100 = 253.7 / 312
"""Fraction of its data sheet FLOP/s that an A100 sustains in matrix products."""
ATTENTION_OF_A100 = 0.73, 0.63
"""Fractions of the data sheet FLOP/s that FlashAttention-2 reaches on an A100 in F and in B (Dao, arXiv 2307.08691, section 4.1)."""

# Sustained products: cuBLASLt with random 8,192 x 8,192 matrices after 10,000 other products, from Microsoft, Azure AI benchmarking guide,
# Azure_Results (A100 in FP16, H100 and GB200 in FP8). For H100 and GB200 in BF16, the FLOP/s of a short run are scaled by the ratio of
# sustained to short runs in FP8. Short runs: Bekman, Machine Learning Engineering Open Book, "Maximum achievable matmul FLOPS".
# Attention: NVIDIA, cudnn-frontend, benchmark/sdpa_benchmark_training/results, for Llama 3.1 with a causal mask over 8,192 tokens.

SUSTAINED_BY_GB200 = ("bf16", 1822e12 * 2876.6 / 3615.6), ("fp8", 2876.6e12)
"""FLOP/s that long products sustain on a GB200. Those of B200 and GB300 are scaled from these by their power limits."""

A100 = _known(GPU("A100", (("bf16", 312e12),), 108, 80 * 10**9, 2.039e12, 300e9, 8, 25e9))
"""NVIDIA A100 80 GB SXM in a DGX A100 with a 200 Gbit/s link per GPU.

Source: NVIDIA, A100 Tensor Core GPU data sheet (312 TFLOP/s in BF16, 2,039 GB/s, NVLink 600 GB/s in both directions together) and A100
architecture whitepaper (108 SMs); NVIDIA, DGX A100 data sheet (8 GPUs, 8 ConnectX of 200 Gbit/s for the compute network).
"""

H100 = _known(
    GPU(
        name="H100",
        flops=(("bf16", 989.4e12), ("fp8", 1978.9e12)),
        processors=132,
        memory_bytes=80 * 10**9,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        domain_size=8,
        network_bandwidth=50e9,
        sustained=(("bf16", 794.5e12 * 1290.1 / 1402.6), ("fp8", 1290.1e12)),
        attention=(644e12, 541e12),
    )
)
"""NVIDIA H100 80 GB SXM in a DGX H100 with a 400 Gbit/s link per GPU.

Source: NVIDIA, H100 Tensor Core GPU data sheet (989 TFLOP/s in BF16 and 1,979 in FP8 without sparsity, 3.35 TB/s, NVLink 900 GB/s in both
directions together) and H100 architecture whitepaper (132 SMs); NVIDIA, DGX H100 data sheet (8 GPUs, 8 ConnectX-7 of 400 Gbit/s).
Attention is that of an H200, which has the same SMs.
"""

B200 = _known(
    GPU(
        name="B200",
        flops=(("bf16", 2250e12), ("fp8", 4500e12)),
        processors=148,
        memory_bytes=180 * 10**9,
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
        domain_size=8,
        network_bandwidth=50e9,
        sustained=tuple((precision, flops * 1000 / 1200) for precision, flops in SUSTAINED_BY_GB200),
        attention=(0.9 * 1574e12, 0.9 * 1332e12),
    )
)
"""NVIDIA B200 of 1,000 W in a DGX B200 with a 400 Gbit/s link per GPU.

Source: NVIDIA, DGX B200 data sheet (8 GPUs with 72 PFLOP/s in FP8 with sparsity, 1,440 GB at 64 TB/s, NVLink 1.8 TB/s in both directions
together, ConnectX-7 of 400 Gbit/s); 148 SMs as reported by CUDA. Sustained figures are not published: products are scaled with the power
limit of a GB200, attention with its data sheet.
"""

GB200 = _known(
    GPU(
        name="GB200",
        flops=(("bf16", 2500e12), ("fp8", 5000e12)),
        processors=152,
        memory_bytes=186 * 10**9,
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
        domain_size=72,
        network_bandwidth=50e9,
        sustained=SUSTAINED_BY_GB200,
        attention=(1574e12, 1332e12),
    )
)
"""NVIDIA GB200 of 1,200 W in an NVL72 with a 400 Gbit/s link per GPU.

Source: NVIDIA, GB200 NVL72 data sheet (72 GPUs with 360 PFLOP/s in BF16 with sparsity, 13.4 TB at 576 TB/s, NVLink 130 TB/s in both
directions together); 152 SMs as reported by CUDA.
"""

GB300 = _known(
    GPU(
        name="GB300",
        flops=(("bf16", 2500e12), ("fp8", 5000e12)),
        processors=152,
        memory_bytes=288 * 10**9,
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
        domain_size=72,
        network_bandwidth=100e9,
        sustained=tuple((precision, flops * 1400 / 1200) for precision, flops in SUSTAINED_BY_GB200),
        attention=(1856e12, 1435e12),
    )
)
"""NVIDIA GB300 of 1,400 W in an NVL72 with an 800 Gbit/s link per GPU.

Source: NVIDIA, GB300 NVL72 data sheet (72 GPUs with 360 PFLOP/s in BF16 with sparsity, 288 GB at 8 TB/s each, NVLink 130 TB/s in both
directions together, ConnectX-8 of 800 Gbit/s); 152 SMs as reported by CUDA. Sustained figures are not published: products are scaled with
the power limit of a GB200, by 1.17. Attention in B, a long computation, supports that: over 16,384 and 32,768 tokens, it is 1.13 and 1.22
times as fast as on a GB200.
"""


def known_gpu(gpu: str | GPU) -> GPU:
    """Returns `gpu` itself, or the one with that name; raises `InputError`, listing the known names."""
    if isinstance(gpu, GPU):
        return gpu
    if gpu not in GPUS:
        raise InputError(f"there is no GPU {gpu!r}: {near(gpu, GPUS)}available are {', '.join(GPUS)}; use cost_model.GPU for others")
    return GPUS[gpu]
