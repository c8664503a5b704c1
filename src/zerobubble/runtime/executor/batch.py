"""What one step works on, as the executor takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from zerobubble.runtime.values.payload import Cotangents, Tensors
from zerobubble.runtime.values.shapes import KnownMessages


class LossOfParts(Protocol):
    """What becomes of a microbatch's output between the last stage's forward and its backward where the head is divided."""

    def given(self, microbatch: int, outputs: Tensors) -> Tensors:
        """What every part of the head is given for these outputs of the last stage."""

    def gradient(self, microbatch: int, parts: Sequence[Tensors]) -> Cotangents:
        """What the last stage goes back from, by what the parts gave, in their order."""


class Batch(NamedTuple):
    """What one step works on.

    `inputs[j]` are the microbatches, on a first stage's rank. `finish(j, output)` takes the model's output, on a last stage's
    rank: in training it returns the scalar that backward starts from, with the gradient `seed(j)`, which may change until the rollback
    point.
    `known` are the shapes of messages, learnt into it where messages with the ranks `announced` tell them.
    `named_arguments[stage][j]` are those that a stage's own rank was given.
    `parted` is there where the head is divided, and then takes the place of `finish` and `seed`.
    `order` has the microbatch that takes each place of the program: passes and messages have the numbers of places.
    `seed_pass(stage, j, goes_back)` begins the random numbers of a forward or a backward of microbatch j.
    """

    inputs: list[Tensors]
    finish: Callable[[int, Any], Tensor]
    seed: Callable[[int], Tensor]
    known: KnownMessages
    announced: frozenset[int]
    named_arguments: dict[int, list[dict[str, Any]]]
    order: Sequence[int]
    seed_pass: Callable[[int, int, bool], None]
    parted: LossOfParts | None = None
