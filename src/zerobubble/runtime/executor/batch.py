"""The inputs of one step, as the executor takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.values.payload import Cotangents, Tensors
from zerobubble.runtime.values.shapes import KnownMessages


class HeadLoss(Protocol):
    """Computes the loss of a microbatch, and its gradient, if ranks divide the head."""

    def head_inputs(self, microbatch: int, outputs: Tensors) -> Tensors:
        """Returns the inputs of every part of the head for these outputs of the last stage."""

    def output_gradient(self, microbatch: int, parts: Sequence[Tensors]) -> Cotangents:
        """Returns the gradient of the last stage's output, from what the parts computed, in their order."""


class Batch(NamedTuple):
    """The inputs of one step.

    Attributes:
        inputs: The inputs of each microbatch, on the rank of a first stage.
        finish: Takes a microbatch and the output of the model, on the rank of a last stage. In training, returns the scalar at which
            backward starts.
        seed: Returns the gradient with which it starts. It may change until the rollback point.
        known: Shapes of messages; those of messages with the ranks `announced` are added while the step runs.
        announced: Ranks whose messages begin with their shapes.
        named_arguments: By stage of this rank, the named arguments of each microbatch.
        order: The microbatch at each place of the program. Passes and messages have the numbers of places.
        seed_pass: Takes (stage, microbatch, is_backward) and seeds the random numbers of that pass.
        divided_loss: Replaces `finish` and `seed` if ranks divide the head.
        sizes: The number of samples of each microbatch, empty if this rank does not know it.
        arrive: Takes the last stage and its inputs before each forward that `finish` ends in training.
    """

    inputs: list[Tensors]
    finish: Callable[[int, Any], Tensor]
    seed: Callable[[int], Tensor]
    known: KnownMessages
    announced: frozenset[int]
    named_arguments: dict[int, list[dict[str, Any]]]
    order: Sequence[int]
    seed_pass: Callable[[int, int, bool], None]
    divided_loss: HeadLoss | None
    sizes: Sequence[int]
    arrive: Callable[[Stage, Tensors], object]
