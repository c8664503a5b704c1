"""Compares the loss that follows from microbatches with the loss of one call for the whole batch in some steps."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.integrations.lightning.logs import Parts
from zerobubble.integrations.loss_rules import are_near

TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-5}
"""The relative differences that rounding explains, by the dtype of the outputs; 1e-2 for others."""
MOST_SIZES = 16
"""The number of sizes of batches that are compared, such as those of buckets, and of the last batch of an epoch."""
LOSS = "the loss"
DIVISORS = {
    "loss_fn": "the targets of a microbatch that returns what its loss divides by, such as lambda targets: class_weights[targets].sum()",
    "": "a microbatch that returns what its loss divides by, such as lambda batch: class_weights[batch[1]].sum()",
}
"""What `loss_weight` is, by the name of the function that computes the loss; the last is for `training_step`."""


FaultKind = Literal[
    "number", "state", "buffer", "inputs", "draws", "returned", "metric", "skipped", "raised", "failed", "part", "microbatch"
]
"""What `Fault.what` is: "number" for a loss or a logged value."""


class Fault(NamedTuple):
    """A difference between a batch and its microbatches.

    Attributes:
        what: What differs: "the loss", a logged value, the network, the random numbers, the state that changes, what is skipped, or an
            error.
        parts: A number that follows from microbatches.
        whole: The number for the whole batch.
        is_sum: Whether the number is the sum over microbatches.
        kind: What `what` is, other than a number.
        draws: Whether the code draws random numbers.
    """

    what: str
    parts: float = 0.0
    whole: float = 0.0
    is_sum: bool = False
    kind: FaultKind = "number"
    draws: bool = False

    def error(self, name: str) -> InputError:
        """Returns the error, where `name` is the user's function."""
        if self.kind == "number":
            return self._number_error(name)
        if self.kind == "raised":
            return InputError("{what}", what=self.what)
        message, remedy = {
            "state": (
                "{name} changes {what}, and a pipeline runs it several times for each batch",
                "return what it needs along with 'loss', and change it in on_train_batch_end, whose outputs has both for the batch; assign "
                "metrics of torchmetrics to attributes of the module",
            ),
            "buffer": (
                "{name} changes the buffer {what}, and a pipeline runs it several times for each batch",
                "put the layer that changes it, such as a batch norm, into the network, or change it in on_train_batch_end",
            ),
            "inputs": (
                "{name} calls {what} with other inputs for the whole batch than for its microbatches",
                f"compute them from each sample alone, or for the whole batch in {self._place(name)}",
            ),
            "failed": (
                "{name} fails for a whole batch, with the outputs of its microbatches joined: {what}",
                "compute the loss of any number of samples, and what needs their number in on_after_batch_transfer",
            ),
            "part": (
                "{name} fails for a microbatch, and not for the whole batch: {what}",
                "give what all samples share, such as weights of features, with a first dimension of 1, as tensor[None]: a tensor whose "
                "first dimension has the size of the batch is cut, unless the batch is a dict and batch_dims names it",
            ),
            "microbatch": (
                "{name} fails for a microbatch of {got} of the {expected} samples: {what}",
                "give larger batches or a smaller num_microbatches; a Metric whose value needs several samples is updated by "
                "metric.update(...), and logged with on_step=False, on_epoch=True",
            ),
            "returned": (
                "{name} returns a dict whose {what} does not follow from those of microbatches",
                "return one value for each sample, a mean or a sum, and compute the rest in on_train_batch_end",
            ),
            "metric": (
                "{name} updates the Metric {what} with a number of the batch that is no mean and no sum of those of microbatches",
                "update it with values of samples, with a number without dimensions (loss, not loss[None]), or in on_train_batch_end, "
                "from what training_step returns along with 'loss'",
            ),
            "skipped": (
                "{name} returns None for {what} and a loss for others of the same batch",
                "let on_after_batch_transfer, which gets the whole batch, add to it whether to skip it; return the 0 * output.sum() of a "
                "microbatch without targets; or call optimizer.zero_grad() in on_before_optimizer_step, where "
                "self.trainer.callback_metrics has what training_step has logged",
            ),
            "draws": ("{name} draws {what}, which are no parts of these", f"draw them in {self._place(name)}"),
        }[self.kind]
        return InputError(message, name=name, what=self.what, got=int(self.parts), expected=int(self.whole), remedy=remedy)

    def _place(self, name: str) -> str:
        return "your loop, as targets" if name == "loss_fn" else "on_after_batch_transfer, which gets the whole batch"

    def _number_error(self, name: str) -> InputError:
        if self.what != LOSS:
            remedy = "log it in validation_step or on_train_batch_end, or log a torchmetrics Metric with on_step=False, on_epoch=True"
        elif self.is_sum:
            remedy = 'give PipelineStrategy(loss_weight="sum")'
        else:
            remedy = (
                f"give PipelineStrategy(loss_weight=...) a function of {DIVISORS.get(name, DIVISORS[''])}; a loss that compares samples "
                "needs num_microbatches=1"
            )
            remedy = f"draw random numbers in {self._place(name)}, or {remedy}" if self.draws else remedy
        return InputError(
            "{what} in {name} is {expected} for the whole batch and {got} over its microbatches: it is not the mean over samples",
            what=self.what,
            name=name,
            expected=f"{self.whole:.6g}",
            got=f"{self.parts:.6g}",
            remedy=remedy,
        )


class ComparedSteps:
    """Which steps are compared: 1, 2, 4, 8 and so on, and the first of each number of samples, at most `MOST_SIZES` of these."""

    def __init__(self) -> None:
        self._count = 0
        self._sizes: set[int] = set()

    @property
    def is_next_anyway(self) -> bool:
        """Whether to compare the next step, of a batch of any size."""
        return self._count & (self._count + 1) == 0

    def is_next(self, samples: int) -> bool:
        """Returns whether to compare the next step, of a batch with so many samples."""
        return self.is_next_anyway or (samples not in self._sizes and len(self._sizes) < MOST_SIZES)

    def count(self, samples: int) -> bool:
        """Counts a step, and returns whether to compare it."""
        is_due = self.is_next(samples)
        self._count += 1
        if is_due:
            self._sizes.add(samples)
        return is_due


def loss_fault(whole: float, parts: Parts, tolerance: float, *, draws: bool) -> Fault | None:
    """Returns the fault if the loss of the whole batch does not follow from its microbatches."""
    terms = [weight * loss for weight, loss in zip(parts.weights, parts.losses, strict=True) if weight]
    total = sum(terms) / (1 if parts.is_sum else sum(parts.weights) or 1)
    if are_near(total, whole, tolerance, parts.losses):
        return None
    return Fault(LOSS, total, whole, is_sum=are_near(sum(parts.losses), whole, tolerance, parts.losses), draws=draws)


def tolerance_of(output: Any) -> float:
    """Returns the largest relative difference that rounding explains in numbers computed from `output`."""
    dtypes = [leaf.dtype for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return min((TOLERANCES.get(dtype, 1e-2) for dtype in dtypes), default=2e-5)


def are_near_inputs(joined: Any, whole: Any) -> bool:
    """Returns whether tensors of equal shapes in two nested structures differ by rounding at most. Other shapes are those of padding."""
    (parts, form), (others, other_form) = (pytree.tree_flatten(inputs) for inputs in (joined, whole))
    if form != other_form:
        return True
    pairs = [(a, b) for a, b in zip(parts, others, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape]
    return all(_are_equal(a, b) for a, b in pairs)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    largest = float(other.detach().abs().max())
    return torch.allclose(one, other, rtol=0, atol=tolerance_of(other) * largest, equal_nan=True)
