"""How long the operations of a GPU take: matrix products, operations bound by memory, and exchanges with other GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb
from typing import NamedTuple

from zerobubble.cost_model.checks import require_amounts
from zerobubble.cost_model.gpus import GPU
from zerobubble.cost_model.models import Experts

TILES = ((256, 128), (128, 256))
"""Rows and columns of a product that one processor computes at a time, the largest tile of CUTLASS and cuBLAS for half precision."""
HALF = 2
"""Bytes of a number in half precision, in which all but the optimizer, and by default weights' gradients, is kept."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What operations reach of the figures in data sheets: one set for all models, shapes and GPUs.

    The first two were chosen on a coarse grid for table 5 of arXiv 2205.05198, on A100 (benchmarks/cost_model). The others were taken from
    what others measured, and nothing was fitted to figures of another GPU.

    Arguments:
        products: share of the FLOP/s that a GPU sustains in products (`GPU.sustained`) that those of long sums reach in training.
        wave: what it takes to begin and end a wave of tiles, as terms of the sums that could be computed meanwhile.
        memory: share of the memory's bandwidth that operations bound by it reach; STREAM reaches 0.85 to 0.9 on an A100.
        links: share of a link's bandwidth that collectives and messages reach; 235 GB/s, which nccl-tests report among 8 A100, are 0.78.
        contention: the part of a collective hidden beside matrix products that is paid all the same, as processors that send compute
            nothing; 0.15 is that of Isaev et al., Calculon, SC 2023.
        latency: seconds before a collective or message moves its first byte.
    """

    products: float = 0.98
    wave: int = 256
    memory: float = 0.85
    links: float = 0.78
    contention: float = 0.15
    latency: float = 10e-6

    def __post_init__(self) -> None:
        shares = ("products", "memory", "links")
        require_amounts("an Efficiency", {name: getattr(self, name) for name in shares})
        require_amounts("an Efficiency", {name: getattr(self, name) for name in ("wave", "contention", "latency")}, inclusive=True)


class Product(NamedTuple):
    """A matrix product of `rows` x `terms` by `terms` x `columns`, so often in a batch."""

    rows: int
    columns: int
    terms: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Kernels:
    """One GPU at work: seconds of its operations."""

    gpu: GPU
    efficiency: Efficiency

    def product(self, product: Product, precision: str = "bf16", gradient_bytes: int = 0) -> float:
        """Seconds of a matrix product, by waves of tiles or by the bytes moved, whichever takes longer.

        With `gradient_bytes` the result is added to gradients of so many bytes each.
        """
        waves = min(self._wave_terms(product, *tile) for tile in TILES)
        computing = waves / (self.gpu.sustained_of(precision) / self.gpu.processors * self.efficiency.products)
        operand = 1 if precision == "fp8" else HALF
        given = operand * product.terms * (product.rows + product.columns)
        moved = product.batch * (given + (2 * gradient_bytes or HALF) * product.rows * product.columns)
        return max(computing, self.stream(moved))

    def _wave_terms(self, product: Product, height: int, width: int) -> float:
        """FLOPs that each processor computes one after another, idle ones of the last wave included."""
        tiles = product.batch * ceil(product.rows / height) * ceil(product.columns / width)
        return ceil(tiles / self.gpu.processors) * 2 * height * width * (product.terms + self.efficiency.wave)

    def beside(self, exchange: float, product: float) -> float:
        """Seconds that a collective costs beside a matrix product: a part of what is hidden is paid, and all that takes longer."""
        return max(self.efficiency.contention * exchange, exchange - product)

    def stream(self, moved: float) -> float:
        """Seconds to read and write so many bytes of the GPU's memory."""
        return moved / (self.gpu.memory * self.efficiency.memory)

    def gather(self, size: float, members: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes in all among `members` of a domain; an all-reduce is both."""
        if members == 1:
            return 0.0
        return (members - 1) / members * size / (self.gpu.link * self.efficiency.links) + self.efficiency.latency

    def send(self, size: float, within_domain: bool) -> float:
        """Seconds of a message of `size` bytes to another GPU."""
        return self._moved(size, self.gpu.link if within_domain else self.gpu.network)

    def share(self, size: float, members: int, neighbours: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes among `members`, of which `neighbours` are in a domain.

        Where it leaves the domain, each of the neighbours sends its part over its own link of the network.
        """
        if members == 1:
            return 0.0
        near = min(members, neighbours)
        bandwidth = self.gpu.link if members <= near else min(self.gpu.link, near * self.gpu.network)
        return self._moved((members - 1) / members * size, bandwidth)

    def to_experts(self, size: float, experts: Experts, members: int, neighbours: int) -> float:
        """Seconds of an all-to-all in which each of `members` sends tokens of `size` bytes to their experts, or gets them back.

        A token goes once to each GPU that has experts of it, and once over the network to each domain of `neighbours`, which hands it on.
        """
        if members == 1:
            return 0.0
        near = min(members, neighbours)
        domains = ceil(members / near)
        reached = min(_reached(experts, domains), experts.nodes or domains)
        beyond = size * reached * (domains - 1) / domains
        inside = size * _reached(experts, members) * (near - 1) / near
        return max(self._moved(beyond, self.gpu.network), self._moved(inside, self.gpu.link))

    def _moved(self, size: float, bandwidth: float) -> float:
        return size / (bandwidth * self.efficiency.links) + self.efficiency.latency


def _reached(experts: Experts, groups: int) -> float:
    """Of so many groups of experts the number that has some of a token, on average, where it chooses any of them alike."""
    others = experts.routed - experts.routed // groups
    return groups * (1 - comb(others, experts.chosen) / comb(experts.routed, experts.chosen))
