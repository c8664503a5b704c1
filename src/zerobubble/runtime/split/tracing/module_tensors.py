"""The tensors of a traced module (parameters, buffers, other attributes), and their replacement by the tensors of a trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.python_state.state import TensorPlace
from zerobubble.runtime.split.tracing.traceable import is_traceable, kind_of, shared_memory
from zerobubble.runtime.values.stored import copy_of, fill, items_of, put


class TensorCounts(NamedTuple):
    """The number of module tensors that a trace takes before the module's inputs, and how many of them are parameters."""

    tensors: int
    parameters: int

    def names(self) -> set[str]:
        """Returns AOTAutograd's names for these tensors in a graph."""
        return {f"primals_{i + 1}" for i in range(self.tensors)}


class TensorsOfModule:
    """Lists the parameters of a module, then its buffers and the tensors in other `places` of it, each once, in `tensors`.

    `counts` has their numbers. `kinds` has all that a trace depends on: names, shapes, strides, dtypes, `requires_grad`, and which tensors
    other than parameters share memory.
    """

    def __init__(self, module: nn.Module, places: Sequence[TensorPlace] = ()) -> None:
        parameters = dict(module.named_parameters())
        named = {**parameters, **dict(module.named_buffers())}
        tensors = set(named.values())
        for place in places:
            if place.tensor not in tensors and _is_input(place.tensor):
                tensors.add(place.tensor)
                named[f"attribute {place.path}"] = place.tensor
        self.places = places
        self.tensors = tuple(named.values())
        self.counts = TensorCounts(len(named), len(parameters))
        others = self.tensors[len(parameters) :]
        self.kinds: Hashable = tuple([(name, kind_of(tensor)) for name, tensor in named.items()]), shared_memory(others)


def _is_input(tensor: Tensor) -> bool:
    """Returns whether a graph may take a tensor as input. Not one with a history: each microbatch would backpropagate into it."""
    return is_traceable(tensor) and not tensor.is_meta and (tensor.is_leaf or not tensor.requires_grad)


@contextmanager
def replacing_tensors(module: nn.Module, places: Iterable[TensorPlace], replacements: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Replaces the tensors of `module` in every place that holds one.

    A tensor or a submodule may have several places: names in several modules, entries in lists. Recurrent layers also list their weights in
    attributes, which are restored too.

    Raises `InputError` if the module has assigned another tensor to a place: the traced tensor would leak.
    """
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    tables += [vars(part) for part in module.modules() if isinstance(part, nn.RNNBase)]
    before = [copy_of(table) for table in tables]
    replaced = [place for place in places if place.tensor in replacements]
    _replace_entries(tables, replacements)
    for place in replaced:
        place.put(replacements[place.tensor])
    try:
        yield
        for place in replaced:
            if not place.holds(replacements[place.tensor]):
                raise InputError("its forward puts a new tensor in {place} (change it in place)", place=place.path)
    finally:
        for place in replaced:
            if place.holds(replacements[place.tensor]):
                place.put(place.tensor)
        for table, content in zip(tables, before, strict=True):
            fill(table, content)


def _replace_entries(tables: Iterable[dict[str, Any]], replacements: Mapping[Tensor, Tensor]) -> None:
    for table in tables:
        for name, tensor in list(items_of(table)):
            if isinstance(tensor, Tensor) and tensor in replacements:
                put(table, name, replacements[tensor])
