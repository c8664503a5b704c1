"""The tensors of a module that is traced: parameters, buffers and those in other attributes; how those of a trace take their places."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.python_state.state import Place
from zerobubble.runtime.split.tracing.traceable import is_traceable, kind_of, shared_memory


class NumOwned(NamedTuple):
    """How many tensors of the module a trace takes before the module's inputs, and how many of them are parameters."""

    tensors: int
    parameters: int

    def names(self) -> set[str]:
        """How AOTAutograd names these tensors in a graph."""
        return {f"primals_{i + 1}" for i in range(self.tensors)}


class TensorsOfModule:
    """The parameters of a module and then its buffers and the tensors in other `places` of it, each once, as `tensors`.

    `num` says how many there are. `kinds` is equal for two of these that a trace cannot tell apart: their names, shapes, strides, types,
    which of them train, and which of those that are no parameters share memory.
    """

    def __init__(self, module: nn.Module, places: Sequence[Place] = ()) -> None:
        parameters = dict(module.named_parameters())
        named = {**parameters, **dict(module.named_buffers())}
        known = set(named.values())
        for place in places:
            if place.tensor not in known and _is_input(place.tensor):
                known.add(place.tensor)
                named[f"attribute {place.path}"] = place.tensor
        self.places = places
        self.tensors = tuple(named.values())
        self.num = NumOwned(len(named), len(parameters))
        others = self.tensors[len(parameters) :]
        self.kinds: Hashable = tuple([(name, kind_of(tensor)) for name, tensor in named.items()]), shared_memory(others)


def _is_input(tensor: Tensor) -> bool:
    """Whether a graph may take a tensor as an input. One with a history would be gone back from anew for each microbatch."""
    return is_traceable(tensor) and tensor.device.type != "meta" and (tensor.is_leaf or not tensor.requires_grad)


@contextmanager
def replacing_tensors(module: nn.Module, places: Iterable[Place], replacements: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Inside, every place of `module` that holds one of its tensors holds the replacement of it.

    A tensor or a submodule may have several places: names in several modules, entries in lists. Recurrent layers list their weights anew in
    attributes, which are put back, too.

    Raises `InputError` where the module has put another tensor in a place by the end: the replacement would stay there.
    """
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    tables += [vars(part) for part in module.modules() if isinstance(part, nn.RNNBase)]
    before = [dict(table) for table in tables]
    replaced = [place for place in places if place.tensor in replacements]
    for table in tables:
        for name, tensor in list(table.items()):
            if isinstance(tensor, Tensor) and tensor in replacements:
                table[name] = replacements[tensor]
    for place in replaced:
        place.table[place.key] = replacements[place.tensor]
    try:
        yield
        for place in replaced:
            if not place.holds(replacements[place.tensor]):
                raise InputError(f"its forward puts a new tensor in {place.path} (change it in place)")
    finally:
        for place in replaced:
            if place.holds(replacements[place.tensor]):
                place.table[place.key] = place.tensor
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
