"""The buffers that modules hold themselves, read and put back. Those of a TorchScript module lie in no dict, but in what looks like one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

Buffers = dict[str, Tensor | None]


def buffers_of(part: nn.Module) -> Buffers:
    """The buffers of `part` itself, by name."""
    return {name: part._buffers[name] for name in part._buffers.keys()}  # noqa: SIM118 - TorchScript's have no iterator


def put_buffers(part: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    """Let `part` hold these buffers under their names."""
    for name, buffer in buffers.items():
        part._buffers[name] = buffer
