"""Memory of a rank in bytes: what CUDA and NCCL leave for parameters and activations."""

from __future__ import annotations

from dataclasses import dataclass

from zerobubble.cost_model.gpus import GPU
from zerobubble.cost_model.held import RUNTIME_BYTES
from zerobubble.errors import InputError
from zerobubble.units import show_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes of each rank. If a GPU is named, CUDA and NCCL take `RUNTIME_BYTES` of them."""

    total: int
    gpu: GPU | None = None

    @property
    def reserved(self) -> int:
        """The bytes that CUDA and NCCL take of `total`."""
        return 0 if self.gpu is None else RUNTIME_BYTES

    @property
    def usable(self) -> int:
        """The bytes for parameters and activations. Raises `InputError` if there are none."""
        if self.total <= self.reserved:
            raise InputError(
                "{argument} {got} does not exceed the {needed} that CUDA and NCCL take of a GPU",
                argument="--memory",
                got=show_bytes(self.total),
                needed=show_bytes(self.reserved),
                remedy="give the whole memory of a GPU, or leave the option out",
            )
        return self.total - self.reserved

    def __str__(self) -> str:
        if self.gpu is not None:
            return f"Memory: {show_bytes(self.total)} of each {self.gpu.name}, {show_bytes(self.reserved)} of them for CUDA and NCCL."
        return f"Memory: {show_bytes(self.total)} of each rank. CUDA and NCCL, about {show_bytes(RUNTIME_BYTES)} of a GPU, are not in it."

    def to_dict(self) -> dict[str, object]:
        """Returns the JSON form."""
        return {"memory_bytes": self.total, "reserved_bytes": self.reserved}
