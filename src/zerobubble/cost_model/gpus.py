"""Data sheets of GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from zerobubble.arguments import NUMBER, SIZE, Wanted, each, number, optional, takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError, near
from zerobubble.units import show_bytes

MIB = 2**20
BANDWIDTHS = "memory_bandwidth", "link_bandwidth", "network_bandwidth"
FORM = "zerobubble gpu 1"
ATTENTION_TOKENS = 8192
"""Length of the sequences for which `GPU.attention` states FLOP/s."""
ATTENTION_OVERHEAD = 1000, 1500
"""The overhead of an attention kernel (start, masked halves of blocks, end), as a number of tokens that take as long, in F and in B.

From the FLOP/s over 2,048 and 8,192 tokens of cuDNN on an H200: 484 and 644 TFLOP/s in F, 370 and 541 in B. They predict its FLOP/s over
4,096 and 16,384 tokens, and those of a GB200 over 2,048 and 4,096, within 8 %.
"""


_RATE = number("a finite number above 0", lambda value: NUMBER.accepts(value) and 0 < value < inf)
_BY_PRECISION = each(
    Wanted(
        "pairs of a precision and its FLOP/s, a finite number above 0",
        lambda value: isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and _RATE.accepts(value[1]),
    )
)


@takes(
    name=str,
    **dict.fromkeys(("flops", "sustained"), _BY_PRECISION),
    **dict.fromkeys(("processors", "memory_bytes", "domain_size"), SIZE),
    **dict.fromkeys(BANDWIDTHS, _RATE),
    attention=optional(Wanted("two FLOP/s above 0, in F and in B", lambda value: each(_RATE).accepts(value) and len(value) == 2)),
    effective=bool,
)
@dataclass(frozen=True, slots=True, repr=False)
class GPU(Displayed):
    """A GPU in a cluster, by its data sheet: dense FLOP/s, bytes per second, bytes.

    `name` is the name of the product. `flops` has the FLOP/s of matrix products by precision. `memory_bytes` is the size of its memory,
    including what CUDA and NCCL take, and `memory_bandwidth` the rate at which it is read or written. `link_bandwidth` is the send
    bandwidth to the other GPUs of its NVLink domain, which has `domain_size` GPUs, and `network_bandwidth` the send bandwidth beyond.
    `processors` is the number of streaming multiprocessors (SMs), over which a matrix product is divided in waves.

    Data sheets leave out the effect of power limits and clocks, so two fields are measured. `sustained` has the steady-state FLOP/s of long
    products by precision, and `attention` those of fused causal attention over 8,192 tokens, in F and in B. By default, an A100's
    fractions of `flops` apply. If `effective`, bandwidths were measured, too, and operations reach all of them: `Efficiency.memory` and
    `Efficiency.links` do not apply.
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
    effective: bool = False

    def _summary(self) -> str:
        computed = ", ".join(f"{flops / 1e12:,.0f} TFLOP/s in {precision}" for precision, flops in self.flops)
        return f"{self.name}: {computed}, {show_bytes(self.memory_bytes)} at {show_bytes(round(self.memory_bandwidth))}/s"

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `from_dict` reads it."""
        return {"format": FORM, **asdict(self), "flops": dict(self.flops), "sustained": dict(self.sustained)}

    @classmethod
    def from_dict(cls, data: Any) -> GPU:
        """Reads `data`, as `to_dict` returns it; raises `InputError` for anything else."""
        if not isinstance(data, dict) or data.get("format") != FORM:
            raise InputError("it is not a GPU as `zerobubble doctor --measure` writes it, with the format {expected!r}", expected=FORM)
        figures = {name: value for name, value in data.items() if name != "format"}
        names = {column.name for column in fields(cls)}
        if unknown := sorted(figures.keys() - names):
            raise InputError("a GPU has no {got}", got=" and no ".join(unknown), remedy=f"it has {', '.join(sorted(names))}")
        try:
            figures |= {name: tuple(figures[name].items()) for name in ("flops", "sustained") if name in figures}
            figures |= {"attention": tuple(figures["attention"])} if figures.get("attention") is not None else {}
            return cls(**figures)
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError("its figures cannot be read: {reason}", reason=str(error)) from error

    def flops_of(self, precision: str) -> float:
        """Returns the FLOP/s of matrix products in `precision`; raises `InputError` if the GPU does not support it."""
        by_precision = dict(self.flops)
        if precision not in by_precision:
            raise InputError(self.unsupported(precision))
        return by_precision[precision]

    def sustained_of(self, precision: str) -> float:
        """Returns the sustained FLOP/s of long matrix products in `precision`; raises `InputError` if the GPU does not support it."""
        return dict(self.sustained).get(precision, PRODUCTS_OF_A100 * self.flops_of(precision))

    def attention_flops(self, tokens: int = ATTENTION_TOKENS) -> tuple[float, float]:
        """Returns the FLOP/s of fused causal attention in half precision over sequences of `tokens`, in F and in B."""
        long = self.attention or tuple(share * self.flops_of("bf16") for share in ATTENTION_OF_A100)
        forward, backward = (
            flops * (1 + overhead / ATTENTION_TOKENS) / (1 + overhead / tokens)
            for flops, overhead in zip(long, ATTENTION_OVERHEAD, strict=True)
        )
        return forward, backward

    def unsupported(self, precision: str) -> str:
        """Returns the message that the GPU does not support `precision`, with the supported ones."""
        return f"the {self.name} does not support {precision!r}: take {' or '.join(repr(supported) for supported, _ in self.flops)}"


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

# Memory: data sheets count it in GiB, of which CUDA has nearly all. A100 and H100 as reported by nvidia-smi (thundergolfer.com, Why does an
# NVIDIA H100 80GB card offer 85.52 GB?), B200 as reported by CUDA (pytorch/ao, pull request 4002). GB200 is given the same 0.99 of 186 GiB
# as B200 has of 180 GiB. GB300, of 288 GB, is taken in decimal units, as nothing was published.
# Sustained products: cuBLASLt with random 8,192 x 8,192 matrices after 10,000 other products, from Microsoft, Azure AI benchmarking guide,
# Azure_Results (A100 in FP16, H100 and GB200 in FP8). For H100 and GB200 in BF16, the FLOP/s of a short run are scaled by the ratio of
# sustained to short runs in FP8. Short runs: Bekman, Machine Learning Engineering Open Book, "Maximum achievable matmul FLOPS".
# Attention: NVIDIA, cudnn-frontend, benchmark/sdpa_benchmark_training/results, for Llama 3.1 with a causal mask over 8,192 tokens.

SUSTAINED_BY_GB200 = ("bf16", 1822e12 * 2876.6 / 3615.6), ("fp8", 2876.6e12)
"""FLOP/s that long products sustain on a GB200. Those of B200 and GB300 are scaled from these by their power limits."""

A100 = _known(GPU("A100", (("bf16", 312e12),), 108, 81920 * MIB, 2.039e12, 300e9, 8, 25e9))
"""NVIDIA A100 80 GB SXM in a DGX A100 with a 200 Gbit/s link per GPU.

Source: NVIDIA, A100 Tensor Core GPU data sheet (312 TFLOP/s in BF16, 2,039 GB/s, NVLink 600 GB/s in both directions together) and A100
architecture whitepaper (108 SMs); NVIDIA, DGX A100 data sheet (8 GPUs, 8 ConnectX of 200 Gbit/s for the compute network).
"""

A100_40GB = _known(replace(A100, name="A100-40GB", memory_bytes=40960 * MIB, memory_bandwidth=1.555e12))
"""NVIDIA A100 40 GB SXM. Source: NVIDIA, A100 Tensor Core GPU data sheet (1,555 GB/s; the rest as with 80 GB)."""

H100 = _known(
    GPU(
        name="H100",
        flops=(("bf16", 989.4e12), ("fp8", 1978.9e12)),
        processors=132,
        memory_bytes=81559 * MIB,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        domain_size=8,
        network_bandwidth=50e9,
        sustained=(("bf16", 794.5e12 * 1290.1 / 1402.6), ("fp8", 1290.1e12)),
        attention=(529e12, 518e12),
    )
)
"""NVIDIA H100 80 GB SXM in a DGX H100 with a 400 Gbit/s link per GPU.

Source: NVIDIA, H100 Tensor Core GPU data sheet (989 TFLOP/s in BF16 and 1,979 in FP8 without sparsity, 3.35 TB/s, NVLink 900 GB/s in both
directions together) and H100 architecture whitepaper (132 SMs); NVIDIA, DGX H100 data sheet (8 GPUs, 8 ConnectX-7 of 400 Gbit/s).
Attention is that of cuDNN 9 in July 2024: Shah et al., FlashAttention-3, arXiv 2407.08608, figures 5 and 6, over 8,192 tokens with heads of
128. In F with a causal mask; in B without one, as there are no figures with one. On an H200, cuDNN 9.19 of 2026 reaches 644 and 541.
"""

H800 = _known(replace(H100, name="H800", link_bandwidth=200e9))
"""NVIDIA H800 80 GB SXM, an H100 with less NVLink bandwidth: 400 GB/s in both directions together.

Source: Zhao et al., Insights into DeepSeek-V3, arXiv 2505.09343, section 3.1.
"""

B200 = _known(
    GPU(
        name="B200",
        flops=(("bf16", 2250e12), ("fp8", 4500e12)),
        processors=148,
        memory_bytes=182630 * MIB,
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
        memory_bytes=188560 * MIB,
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


def _card(name: str, bf16: float, fp8: float | None, processors: int, mib: int, bandwidth: float, link: float) -> GPU:
    """Returns a GPU without NVLink, in machines of up to eight with a network of 100 Gbit/s: the link is PCI Express."""
    flops = (("bf16", bf16), *([] if fp8 is None else [("fp8", fp8)]))
    return _known(GPU(name, flops, processors, mib * MIB, bandwidth, link, 8, 12.5e9))


PCIE_4, PCIE_5 = 32e9, 64e9
"""Bytes per second of 16 lanes in one direction."""

RTX3090 = _card("RTX3090", 71e12, None, 82, 24576, 936e9, PCIE_4)
"""NVIDIA GeForce RTX 3090, 24 GB, without an NVLink bridge.

Source: NVIDIA, Ampere GA102 GPU architecture whitepaper, table 2 (71 TFLOP/s in BF16 with FP32 accumulation, dense; 82 SMs; 936 GB/s).
"""

RTX4090 = _card("RTX4090", 165.2e12, 330.3e12, 128, 24564, 1.008e12, PCIE_4)
"""NVIDIA GeForce RTX 4090, 24 GB.

Source: NVIDIA, Ada GPU architecture whitepaper, table 2 (165.2 TFLOP/s in BF16 and 330.3 in FP8 with FP32 accumulation, dense; 128 SMs;
1,008 GB/s).
"""

RTX5090 = _card("RTX5090", 209.5e12, 419e12, 170, 32607, 1.792e12, PCIE_5)
"""NVIDIA GeForce RTX 5090, 32 GB.

Source: NVIDIA, RTX Blackwell GPU architecture whitepaper, table 3 (209.5 TFLOP/s in BF16 and 419 in FP8 with FP32 accumulation, dense; 170
SMs; 1,792 GB/s).
"""

A10 = _card("A10", 125e12, None, 72, 23028, 600e9, PCIE_4)
"""NVIDIA A10, 24 GB. Source: NVIDIA, A10 data sheet (125 TFLOP/s in BF16, dense; 600 GB/s; PCIe 4.0 x16); 72 SMs as reported by CUDA."""

L4 = _card("L4", 121e12, 242e12, 58, 23034, 300e9, PCIE_4)
"""NVIDIA L4, 24 GB.

Source: NVIDIA, L4 data sheet (242 TFLOP/s in BF16 and 485 in FP8 with sparsity; 300 GB/s); 58 SMs as reported by CUDA.
"""

L40S = _card("L40S", 362e12, 733e12, 142, 46068, 864e9, PCIE_4)
"""NVIDIA L40S, 48 GB. Source: NVIDIA, L40S data sheet (362 TFLOP/s in BF16 and 733 in FP8, dense; 864 GB/s); 142 SMs as in its table."""


def known_gpu(gpu: str | GPU) -> GPU:
    """Returns `gpu` itself, or the one with that name or in that .json file; raises `InputError`, listing the known names."""
    if isinstance(gpu, GPU):
        return gpu
    return _read(gpu) if gpu.endswith(".json") else gpu_named(gpu)


def gpu_named(name: str) -> GPU:
    """Returns the GPU with that name; raises `InputError`, listing the known names."""
    if name not in GPUS:
        message = "there is no GPU {gpu!r}: {hint}available are {known}; {remedy}"
        remedy = "for others, give a file of `zerobubble doctor --measure`, or a cost_model.GPU in Python"
        raise InputError(message, gpu=name, hint=_hint(name), known=", ".join(GPUS), remedy=remedy)
    return GPUS[name]


def _hint(name: str) -> str:
    """Suggests a GPU whose name is in `name`, or the reverse, whatever its case and spaces, or one that is spelled alike."""
    word = _letters(name)
    inside = [gpu for gpu in GPUS if _letters(gpu) in word]
    alike = inside or [gpu for gpu in GPUS if any(map(str.isdigit, word)) and word in _letters(gpu)]
    return f"did you mean {max(alike, key=len)!r}? " if alike else near(name, GPUS, same_numbers=True)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).upper()


def _read(file: str) -> GPU:
    try:
        return GPU.from_dict(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        remedy = f"write one with `zerobubble doctor --measure {Path(file).name}`"
        raise InputError("cannot read a GPU from {file}: {reason}; {remedy}", file=file, reason=str(reason), remedy=remedy) from error
