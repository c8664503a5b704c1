"""The first words of a step: the rank with the first stage tells all others what is to be played and whether its messages are known.

The word travels along the stages of the first route: each rank hears it from the rank before its first stage there and passes it on.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.runtime.stage.stage import Tensors
from zerobubble.runtime.transport.transport import Transport, wait
from zerobubble.runtime.values.payload import Layout, Payload
from zerobubble.runtime.values.shapes import Known, Shapes, shapes_of

MOST_KEPT = 64
"""Kinds of inputs whose messages are remembered; the one not met for longest is forgotten, and announced again when it comes back."""
_TOPIC = 2


class _Word(NamedTuple):
    key: float
    announcing: float
    batch_size: float
    num_microbatches: float
    evaluating: float
    digest: float

    def __str__(self) -> str:
        return f"{'an evaluation' if self.evaluating else 'a training step'} of {self.num_microbatches:g} microbatches"


class StepHandshake:
    """Keeps what was learnt of the messages of `schedule` for each kind of inputs, under a number that all ranks share."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        placement, route = schedule.placement, schedule.placement.routes[0]
        parents = {rank: route[0] for rank in range(placement.num_ranks) if rank != route[0]}
        parents |= {rank: route[route.index(rank) - 1] for rank in set(route) if route.index(rank) > 0}
        self._transport = transport
        self._parent = parents.get(transport.rank)
        self._children = [rank for rank, parent in parents.items() if parent == transport.rank]
        digest = hashlib.sha256(schedule.to_text().encode()).digest()
        self._played = (float(schedule.num_microbatches), float(schedule.is_forward_only), float(int.from_bytes(digest[:6], "big")))
        self._keys: dict[tuple[tuple[Shapes, Layout], ...], int] = {}
        self._known: dict[int, Known] = {}
        self._telling: list[Any] = []

    def open(self, inputs: list[Tensors], batch_size: int) -> tuple[Known, bool, int]:
        """What is known of this step's messages, whether it is still to be learnt, and the batch size that the first rank was given.

        Raises `InputError` when this rank is to play something else than the one that tells it.
        """
        word = self._first_word(inputs, batch_size) if self._parent is None else self._hear(self._parent)
        self._telling = [self._transport.tell(word, rank, _TOPIC) for rank in self._children]
        key = int(word.key)
        if word.announcing:
            self._known[key] = Known()
        return self._known[key], bool(word.announcing), int(word.batch_size)

    def _first_word(self, inputs: list[Tensors], batch_size: int) -> _Word:
        signature = tuple((shapes_of(part), part.layout if isinstance(part, Payload) else None) for part in inputs)
        key = self._keys.pop(signature, None)
        announcing = key is None
        if key is None:
            key = len(self._keys) if len(self._keys) < MOST_KEPT else self._keys.pop(next(iter(self._keys)))
        self._keys[signature] = key
        return _Word(float(key), float(announcing), float(batch_size), *self._played)

    def _hear(self, parent: int) -> _Word:
        word = self._listen(parent)
        if word[3:] != self._played:
            mine = _Word(*word[:3], *self._played)
            raise InputError(
                f"rank {parent} begins {word}, rank {self._transport.rank} {mine}{'' if word[3:5] != mine[3:5] else ' in another order'}; "
                "every rank must call the same method with the same num_microbatches, and have the same schedule for it"
            )
        return word

    def _listen(self, parent: int) -> _Word:
        """In a frame of its own: the message would keep its connection open while an exception of the caller is told."""
        work, message = self._transport.listen(len(_Word._fields), parent, _TOPIC)
        wait(work, parent, "waiting for the step to begin")
        return _Word(*message.tolist())
