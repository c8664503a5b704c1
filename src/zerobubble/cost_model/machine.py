"""Times the layers of any model by their FLOPs: on an assumed machine, which only compares layers, or on a GPU of a data sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zerobubble.arguments import require_positive
from zerobubble.cost_model.gpus import GPU
from zerobubble.cost_model.kernels import Efficiency, Kernels
from zerobubble.errors import ParseError
from zerobubble.partition import Layer
from zerobubble.units import MOST, NS_PER_S, show_bytes

MACHINE = "machine"
"""The key of a file of layers for the machine of their times."""


@dataclass(frozen=True)
class Machine:
    """Assumed FLOP/s of passes and bytes per second of messages. The default is a GPU at half of its peak, in a fast network."""

    flops_per_second: float = 4e14
    bytes_per_second: float = 5e10

    def __post_init__(self) -> None:
        require_positive("a machine", asdict(self))

    def __str__(self) -> str:
        return f"{self.flops_per_second / 1e12:,.6g} TFLOP/s and {show_bytes(round(self.bytes_per_second))}/s between ranks"

    def time(self, flops: int) -> int:
        """Returns the time of this many FLOPs, in ns."""
        return min(MOST, round(NS_PER_S * flops / self.flops_per_second))

    def message_time(self, count: int) -> int:
        """Returns the time of a message of this many bytes, in ns."""
        return min(MOST, round(NS_PER_S * count / self.bytes_per_second))

    def to_dict(self) -> dict[str, float]:
        """Returns the JSON form; `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Machine:
        """Reads the JSON form. Raises `ParseError` for anything else."""
        if not isinstance(data, dict) or data.keys() != asdict(cls()).keys():
            raise ParseError("machine needs {expected}, got {data!r:.60}", expected=" and ".join(asdict(cls())), data=data)
        return cls(**data)


COUNTING = Machine(1e9, 1e9)
"""A machine with one FLOP per ns."""


def timed_on(layers: Sequence[Layer], machine: Machine, gpu: GPU, ranks: int) -> tuple[Layer, ...]:
    """Returns the layers, whose times are those of `machine`, with times of a pipeline of `ranks` on `gpu`.

    Products reach the GPU's sustained FLOP/s in bf16. F writes what it saves and reads it again for the next operation, B reads it and
    writes as many bytes of gradients, and W reads its inputs and output gradients, all at the bandwidth of the GPU's memory.
    """
    kernels, per_ns = Kernels(gpu, Efficiency()), machine.flops_per_second / gpu.sustained_of("bf16")

    def at(time: int, saved: int) -> int:
        return min(MOST, round(time * per_ns + NS_PER_S * kernels.memory_traffic(2 * saved)))

    def message(time: int) -> int:
        size = time * machine.bytes_per_second / NS_PER_S
        return min(MOST, round(NS_PER_S * kernels.send(size, within_domain=ranks <= gpu.domain_size)))

    return tuple(
        replace(
            layer,
            forward=at(layer.forward, layer.held_after_f),
            backward=at(layer.backward, layer.held_after_f),
            weight=at(layer.weight, layer.held_after_b),
            output_comm=message(layer.output_comm),
        )
        for layer in layers
    )
