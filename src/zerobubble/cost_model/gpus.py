"""What data sheets say of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from zerobubble.cost_model.checks import require_amounts
from zerobubble.display import Displayed
from zerobubble.errors import InputError, near
from zerobubble.units import show_bytes


@dataclass(frozen=True, slots=True, repr=False)
class GPU(Displayed):
    """A GPU among others of its kind, by its data sheet: dense FLOP/s, bytes per second, bytes.

    `flops` are those of matrix products by precision. `link` is the bytes per second that it sends to others of its `domain`, which NVLink
    joins, and `network` those that it sends beyond. `processors` are its streaming multiprocessors, over which a matrix product is divided
    in waves.
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    processors: int
    memory_bytes: int
    memory: float
    link: float
    domain: int
    network: float

    def __post_init__(self) -> None:
        amounts = {name: getattr(self, name) for name in ("processors", "memory_bytes", "memory", "link", "domain", "network")}
        require_amounts(f"GPU {self.name!r}", amounts | {f"{precision} flops": value for precision, value in self.flops})

    def _summary(self) -> str:
        computed = ", ".join(f"{flops / 1e12:,.0f} TFLOP/s in {precision}" for precision, flops in self.flops)
        return f"{self.name}: {computed}, {show_bytes(self.memory_bytes)} at {show_bytes(round(self.memory))}/s"

    def flops_of(self, precision: str) -> float:
        """FLOP/s of matrix products in `precision`; raises `InputError` for one that the GPU does not have."""
        known = dict(self.flops)
        if precision not in known:
            raise InputError(self.lacks(precision))
        return known[precision]

    def lacks(self, precision: str) -> str:
        """The sentence that says that the GPU has no products in `precision`, and in which it has."""
        return f"the {self.name} has no matrix products in {precision!r}: take {' or '.join(repr(known) for known, _ in self.flops)}"


A100 = GPU("A100", (("bf16", 312e12),), 108, 80 * 10**9, 2.039e12, 300e9, 8, 25e9)
"""NVIDIA A100 80 GB SXM in a DGX A100 with a 200 Gbit/s link per GPU.

Source: NVIDIA, A100 Tensor Core GPU data sheet (312 TFLOP/s in BF16, 2,039 GB/s, NVLink 600 GB/s in both directions together) and A100
architecture whitepaper (108 SMs); NVIDIA, DGX A100 data sheet (8 GPUs, 8 ConnectX of 200 Gbit/s for computing).
"""

H100 = GPU("H100", (("bf16", 989.4e12), ("fp8", 1978.9e12)), 132, 80 * 10**9, 3.35e12, 450e9, 8, 50e9)
"""NVIDIA H100 80 GB SXM in a DGX H100 with a 400 Gbit/s link per GPU.

Source: NVIDIA, H100 Tensor Core GPU data sheet (989 TFLOP/s in BF16 and 1,979 in FP8 without sparsity, 3.35 TB/s, NVLink 900 GB/s in both
directions together) and H100 architecture whitepaper (132 SMs); NVIDIA, DGX H100 data sheet (8 GPUs, 8 ConnectX-7 of 400 Gbit/s).
"""

GPUS = {gpu.name: gpu for gpu in (A100, H100)}
"""The GPUs that are known by name; `GPU` describes others."""


def known_gpu(gpu: str | GPU) -> GPU:
    """`gpu` itself, or the one of that name; raises `InputError` with those that are known."""
    if isinstance(gpu, GPU):
        return gpu
    if gpu not in GPUS:
        raise InputError(f"there is no GPU {gpu!r}: {near(gpu, GPUS)}known are {', '.join(GPUS)}; cost_model.GPU describes others")
    return GPUS[gpu]
