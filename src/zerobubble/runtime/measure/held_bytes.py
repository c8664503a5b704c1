"""What an autograd graph keeps alive, counted from the graph itself: for the moment when memory has run out and nothing was metered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zerobubble.errors import InputError
from zerobubble.runtime.measure.storages import addresses_of, storages_of


class _NothingRuns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation that computes: reading what a checkpoint saved would otherwise compute it again.

    What somebody keeps for autograd is given to us detached.
    """

    def __torch_dispatch__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return function(*given, **(named or {}))
        raise RuntimeError("reading a graph computes nothing")


def held_bytes(tensors: Iterable[Tensor], nodes: Iterable[Any], excluded: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of `tensors` and of what the graphs behind `nodes` saved, those of `excluded` left out."""
    left_out = addresses_of(excluded)
    storages: dict[int, int] = {}
    with _NothingRuns():  # type: ignore[no-untyped-call]
        for tensor in (*tensors, *_saved(nodes)):
            storages |= {storage.data_ptr(): storage.nbytes() for storage in storages_of(tensor)}
    return sum(size for pointer, size in storages.items() if pointer not in left_out)


def _saved(nodes: Iterable[Any]) -> Iterator[Tensor]:
    todo, seen = list(nodes), set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name == "saved_tensors" or name.startswith("_saved_"):
                yield from _read(node, name)


def _read(node: Any, name: str) -> list[Tensor]:
    """The tensors of one attribute; none where they are freed, changed in place or to be computed again."""
    try:
        value = getattr(node, name)
    except (RuntimeError, InputError):
        return []
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return [part for part in parts if isinstance(part, Tensor)]
