"""A traced graph read as two values: all its integers, in order, and all else, by which graphs that differ in sizes alone are known."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

_LARGEST_CONSTANT = 4096
"""Entries of a constant up to which graphs are compared by its numbers; another one with more counts as another graph."""


@dataclass(frozen=True)
class SizedGraph:
    """A graph as its `kind`, equal for graphs that differ in integers alone, and its integers `sizes`, in an order that the kind gives."""

    kind: Hashable
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, graph: fx.GraphModule, examples: Sequence[Any]) -> SizedGraph:
        """That of a graph for inputs like the `examples`."""
        reader = _Reader(graph)
        for example in examples:
            reader.read_example(example)
        for node in graph.graph.nodes:
            reader.read_node(node)
        return cls(tuple(reader.kind), tuple(reader.sizes))


class _Reader:
    """Notes what it is given in `kind`, and integers in `sizes`."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.kind: list[Hashable] = []
        self.sizes: list[int] = []
        self._module = module
        self._numbers: dict[fx.Node, int] = {}
        self._counts_from_memory = any("as_strided" in str(node.target) for node in module.graph.nodes)
        """Whether it matters where in its memory an input begins: received tensors lie behind one another."""

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
        """Note an argument of a node."""
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
    """What tells a constant of a graph from others: for a small tensor its numbers, for all else which object it is."""
    if isinstance(value, Tensor) and type(value) is Tensor and value.numel() <= _LARGEST_CONSTANT:
        return value.dtype, value.device, value.shape, repr(value.tolist())
    return _comparable(value)


def _comparable(value: Any) -> Hashable:
    if isinstance(value, (str, bool, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))):
        return repr(value)
    return _Only(value)


class _Only:
    """Equal to another one of the same object, which it keeps alive."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __hash__(self) -> int:
        return id(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Only) and self._of is other._of
