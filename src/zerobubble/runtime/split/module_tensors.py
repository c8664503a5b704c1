"""The parameters and buffers of a module that is traced, and how the tensors of a trace take their places."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from zerobubble.runtime.split.traceable import kind_of


class NumOwned(NamedTuple):
    """How many parameters and buffers of the module a trace takes before the module's inputs, and how many of them are parameters."""

    tensors: int
    parameters: int

    def names(self) -> set[str]:
        """How AOTAutograd names these tensors in a graph."""
        return {f"primals_{i + 1}" for i in range(self.tensors)}


class TensorsOfModule:
    """The parameters of a module and then its buffers, each once, as `tensors`; `num` says how many there are.

    `kinds` is equal for two of these that a trace cannot tell apart: their names, shapes, strides, types and which of them train.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        named = {**parameters, **buffers}
        self.tensors = tuple(named.values())
        self.num = NumOwned(len(named), len(parameters))
        self.kinds: Hashable = tuple([(name, kind_of(tensor)) for name, tensor in named.items()])


@contextmanager
def replacing_tensors(module: nn.Module, replacements: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Inside, every place of `module` that holds one of its parameters and buffers holds the replacement of it.

    A tensor or a submodule may have several places. Recurrent layers list their weights again in attributes, which are put back too.
    """
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    tables += [vars(part) for part in module.modules() if isinstance(part, nn.RNNBase)]
    before = [dict(table) for table in tables]
    for table in tables:
        for name, tensor in list(table.items()):
            if isinstance(tensor, Tensor) and tensor in replacements:
                table[name] = replacements[tensor]
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
