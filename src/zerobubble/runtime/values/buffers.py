"""Reads and restores the buffers of modules. TorchScript modules keep them in an object that only resembles a dict."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

Buffers = dict[str, Tensor | None]


def buffers_of(part: nn.Module) -> Buffers:
    """Returns the buffers of `part` itself, by name."""
    return {name: part._buffers[name] for name in part._buffers.keys()}  # noqa: SIM118 - TorchScript's have no iterator


def put_buffers(part: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    """Sets these buffers of `part` under their names."""
    for name, buffer in buffers.items():
        part._buffers[name] = buffer
