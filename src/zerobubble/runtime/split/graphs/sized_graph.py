"""Reads a traced graph as two values, its integers and everything else, to detect graphs that differ only in sizes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from zerobubble.runtime.split.python_state.identity import Identity

_LARGEST_CONSTANT = 4096
"""Maximum number of elements of a constant that is compared by value; larger constants are compared by identity."""


@dataclass(frozen=True)
class SizedGraph:
    """A graph as its `kind`, equal for graphs that differ only in integers, and its integers `sizes`, in a fixed order."""

    kind: Hashable
    sizes: tuple[int, ...]

    @classmethod
    def from_graph(cls, graph: fx.GraphModule, examples: Sequence[Any]) -> SizedGraph:
        """Reads a graph for inputs like `examples`."""
        reader = _Reader(graph)
        for example in examples:
            reader.read_example(example)
        for node in graph.graph.nodes:
            reader.read_node(node)
        return cls(tuple(reader.kind), tuple(reader.sizes))


class _Reader:
    """Appends integers to `sizes` and all else to `kind`."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.kind: list[Hashable] = []
        self.sizes: list[int] = []
        self._module = module
        self._numbers: dict[fx.Node, int] = {}
        self._counts_from_memory = any("as_strided" in str(node.target) for node in module.graph.nodes)
        """Whether storage offsets of inputs matter: received tensors share a buffer, at different offsets."""

    def read_example(self, example: Any) -> None:
        if not isinstance(example, Tensor):
            self.read(example)
            return
        self.kind += ["tensor", example.dtype, example.device, example.dim()]
        if self._counts_from_memory:
            self.kind.append(example.storage_offset())
        self.sizes += [*example.shape, *example.stride()]

    def read_node(self, node: fx.Node) -> None:
        self._numbers[node] = len(self._numbers)
        if node.op == "get_attr":
            self.kind += [node.op, _constant(getattr(self._module, str(node.target), None))]
        elif node.op == "placeholder":
            self.kind.append(node.op)
        else:
            self.kind += [node.op, node.target]
            self.read((node.args, node.kwargs))

    def read(self, argument: Any) -> None:
        """Reads an argument of a node."""
        if isinstance(argument, fx.Node):
            self.kind += ["node", self._numbers[argument]]
        elif type(argument) is int:
            self.kind.append("size")
            self.sizes.append(argument)
        elif isinstance(argument, (tuple, list)):
            self.kind += [type(argument) is list, len(argument)]
            for part in argument:
                self.read(part)
        elif isinstance(argument, dict):
            self.kind += ["dict", len(argument)]
            for name, part in argument.items():
                self.kind.append(name)
                self.read(part)
        else:
            self.kind.append((type(argument), argument.hex() if isinstance(argument, float) else _comparable(argument)))


def _constant(value: Any) -> Hashable:
    """Returns a key for a constant of a graph: its values for a small tensor, its identity for all else."""
    if isinstance(value, Tensor) and type(value) is Tensor and value.numel() <= _LARGEST_CONSTANT:
        with _disable_current_modes():  # else a copy from an accelerator has no values: modes of the trace are active
            return value.dtype, value.device, value.shape, repr(value.tolist())
    return _comparable(value)


def _comparable(value: Any) -> Hashable:
    if isinstance(value, (str, bool, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))):
        return repr(value)
    return Identity(value)
