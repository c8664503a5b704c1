"""The first words of a step: the rank with the first stage tells all others whether the shapes of the inputs are known.

The word travels along the stages of the first route: each rank hears it from the rank before its first stage there and passes it on.
"""

from __future__ import annotations

from typing import Any

from zerobubble.ir import Placement
from zerobubble.rules import Value
from zerobubble.runtime.messages.transport import Transport, wait
from zerobubble.runtime.messages.wire import Shapes, shapes_of
from zerobubble.runtime.stage import Tensors

_TOPIC = 2


class Opening:
    """Keeps the message shapes learnt for each shape of inputs, under a number that all ranks share."""

    def __init__(self, placement: Placement, transport: Transport) -> None:
        route = placement.routes[0]
        parents = {rank: route[0] for rank in range(placement.num_ranks) if rank != route[0]}
        parents |= {rank: route[route.index(rank) - 1] for rank in set(route) if route.index(rank) > 0}
        self._transport = transport
        self._parent = parents.get(transport.rank)
        self._children = [rank for rank, parent in parents.items() if parent == transport.rank]
        self._keys: dict[Any, int] = {}
        self._known: dict[int, dict[Value, Shapes]] = {}
        self._telling: list[Any] = []

    def open(self, inputs: list[Tensors]) -> tuple[dict[Value, Shapes], bool]:
        """The message shapes for this step and whether they are still to be learnt."""
        if self._parent is None:
            signature = tuple(shapes_of(microbatch) for microbatch in inputs)
            key = self._keys.setdefault(signature, len(self._keys))
        else:
            work, message = self._transport.listen(1, self._parent, _TOPIC)
            wait(work, self._parent, "waiting for the step to begin")
            key = int(message.item())
        self._telling = [self._transport.tell([float(key)], rank, _TOPIC) for rank in self._children]
        announcing = key not in self._known
        return self._known.setdefault(key, {}), announcing
