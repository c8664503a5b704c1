"""Times of GPU operations: matrix products, memory-bound operations, and communication."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb
from statistics import NormalDist
from typing import NamedTuple

from zerobubble.arguments import require_positive, takes
from zerobubble.cost_model.gpus import GPU
from zerobubble.cost_model.models import Experts

TILES = ((256, 128), (128, 256))
"""Tiles (rows x columns) of a product, of which one SM computes one at a time: the largest of CUTLASS and cuBLAS for half precision."""
HALF = 2
"""Bytes of a half-precision number, used for all but the optimizer state and, by default, weight gradients."""


@takes()
@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the data sheet figures that operations reach: one set for all models, shapes and GPUs.

    `wave` was chosen on a coarse grid for table 5 of arXiv 2205.05198, on A100 (benchmarks/cost_model). The others come from published
    measurements. Nothing was fitted to figures of other GPUs.

    Arguments:
        products: fraction of the sustained FLOP/s (`GPU.sustained`) that products with long sums reach in training; 1 means as many
                  as in a benchmark of matrix products alone.
        wave: overhead to begin and end a wave of tiles, in equivalent terms of the sums.
        memory: fraction of the memory bandwidth that memory-bound operations reach; STREAM reaches 0.85 to 0.9 on an A100.
        links: fraction of a link's bandwidth that communication reaches; 235 GB/s, measured by nccl-tests on 8 A100, are 0.78.
        contention: fraction of an overlapped collective that still costs time, because sending processors compute nothing; 0.15 is
                    from Isaev et al., Calculon, SC 2023.
        latency: seconds before a collective or message moves its first byte.
        spread: standard deviation of the speed of equal GPUs, relative to its mean: manufacturing and power limits differ. A step waits for
                the slowest. Over five clusters, the whiskers of box plots (1.5 interquartile ranges) span 0.08 of the mean (Sinha et al.,
                Not All GPUs Are Created Equal, SC 2022); for a normal distribution they span 5.4 standard deviations.
    """

    products: float = 1.0
    wave: int = 256
    memory: float = 0.85
    links: float = 0.78
    contention: float = 0.15
    latency: float = 10e-6
    spread: float = 0.08 / 5.4

    def __post_init__(self) -> None:
        shares = ("products", "memory", "links")
        require_positive("an Efficiency", {name: getattr(self, name) for name in shares})
        others = ("wave", "contention", "latency", "spread")
        require_positive("an Efficiency", {name: getattr(self, name) for name in others}, or_zero=True)

    def memory_of(self, gpu: GPU) -> float:
        """Returns the fraction of the memory bandwidth of `gpu` that memory-bound operations reach."""
        return 1.0 if gpu.effective else self.memory

    def links_of(self, gpu: GPU) -> float:
        """Returns the fraction of the bandwidth of a link of `gpu` that communication reaches."""
        return 1.0 if gpu.effective else self.links

    def slowest_of(self, gpus: int) -> float:
        """Returns the expected time of the slowest of `gpus` GPUs, relative to the mean.

        Source: Blom, Statistical Estimates and Transformed Beta-Variables, 1958, for the expected largest of normal values.
        """
        return 1 + self.spread * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))


class Product(NamedTuple):
    """A batch of matrix products, `rows` x `terms` by `terms` x `columns`."""

    rows: int
    columns: int
    terms: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Kernels:
    """Computes the seconds of operations on one GPU."""

    gpu: GPU
    efficiency: Efficiency

    def product(self, product: Product, precision: str = "bf16", gradient_bytes: int = 0) -> float:
        """Returns the seconds of a matrix product: the maximum of compute, in waves of tiles, and memory traffic.

        With `gradient_bytes`, the result is added to gradients with this many bytes per element.
        """
        flops = min(self._flops_per_processor(product, *tile) for tile in TILES)
        computing = flops / (self.gpu.sustained_of(precision) / self.gpu.processors * self.efficiency.products)
        operand = 1 if precision == "fp8" else HALF
        operands = operand * product.terms * (product.rows + product.columns)
        moved = product.batch * (operands + (2 * gradient_bytes or HALF) * product.rows * product.columns)
        return max(computing, self.memory_traffic(moved))

    def _flops_per_processor(self, product: Product, height: int, width: int) -> float:
        """Returns the FLOPs that one SM computes in turn, including idle time in the last wave."""
        tiles = product.batch * ceil(product.rows / height) * ceil(product.columns / width)
        return ceil(tiles / self.gpu.processors) * 2 * height * width * (product.terms + self.efficiency.wave)

    def overlapped(self, exchange: float, product: float) -> float:
        """Returns the extra seconds of a collective overlapped with a matrix product: contention, plus the part that takes longer."""
        return max(self.efficiency.contention * exchange, exchange - product)

    def memory_traffic(self, moved: float) -> float:
        """Returns the seconds to read and write this many bytes of the GPU's memory."""
        return moved / (self.gpu.memory_bandwidth * self.efficiency.memory_of(self.gpu))

    def send(self, size: float, within_domain: bool) -> float:
        """Returns the seconds of a message of `size` bytes to another GPU."""
        return self._moved(size, self.gpu.link_bandwidth if within_domain else self.gpu.network_bandwidth)

    def gather(self, size: float, members: int, neighbors: int | None = None) -> float:
        """Returns the seconds of an all-gather or reduce-scatter of `size` total bytes among `members`; an all-reduce is both.

        There are `neighbors` members per domain; all are in one domain if it is None. Beyond the domain, each neighbor sends its part
        over its own network link.
        """
        if members == 1:
            return 0.0
        near = members if neighbors is None else min(members, neighbors)
        bandwidth = self.gpu.link_bandwidth if members <= near else min(self.gpu.link_bandwidth, near * self.gpu.network_bandwidth)
        return self._moved((members - 1) / members * size, bandwidth)

    def to_experts(self, size: float, experts: Experts, members: int, neighbors: int) -> float:
        """Returns the seconds of an all-to-all in which each of `members` sends tokens of `size` bytes to their experts, or back.

        A token is sent once to each GPU with its experts, and once over the network to each domain of `neighbors`, which forwards it.
        """
        if members == 1:
            return 0.0
        near = min(members, neighbors)
        domains = ceil(members / near)
        reached = min(_reached(experts, domains), experts.nodes or domains)
        beyond = size * reached * (domains - 1) / domains
        inside = size * _reached(experts, members) * (near - 1) / near
        return max(self._moved(beyond, self.gpu.network_bandwidth), self._moved(inside, self.gpu.link_bandwidth))

    def _moved(self, size: float, bandwidth: float) -> float:
        return size / (bandwidth * self.efficiency.links_of(self.gpu)) + self.efficiency.latency


def _reached(experts: Experts, groups: int) -> float:
    """Returns the expected number of groups with at least one expert of a token, for a uniform choice."""
    others = experts.routed - experts.routed // groups
    return groups * (1 - comb(others, experts.chosen) / comb(experts.routed, experts.chosen))
