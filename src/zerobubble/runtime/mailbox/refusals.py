"""Messages in words, and why one cannot be sent: what differs from an earlier step, and what would help."""

from __future__ import annotations

from zerobubble.kinds import TRAVELS
from zerobubble.rules import Value
from zerobubble.runtime.values.payload import Structure, changes
from zerobubble.runtime.values.shapes import Shapes


def describe(value: Value) -> str:
    """A message in words."""
    return f"the {TRAVELS[value.value_kind][0]} of stage {value.stage}, microbatch {value.microbatch}"


def changed_shapes(value: Value, before: Shapes, now: Shapes) -> str:
    """Why an activation of other shapes cannot be sent."""
    was, got = ", ".join(map(str, before)), ", ".join(map(str, now))
    return (
        f"{describe(value)} is {got}, but was {was} in an earlier step with the same input shapes; "
        "pad it to one shape, or let it follow from the shape of the inputs"
    )


def unfrozen(value: Value) -> str:
    """Why an activation that needs a gradient only now cannot be sent."""
    return (
        f"{describe(value)} needs a gradient now, but needed none in an earlier step with the same inputs, and the next stage is told "
        "once; make a new Pipeline after stages are unfrozen, or unfreeze them before the first step"
    )


def changed_structure(value: Value, before: Structure, now: Structure) -> str:
    """Why an activation with other constants, or put together otherwise, cannot be sent."""
    if before is None or now is None:
        what = f"is {'a tuple of tensors' if now is None else now}, but was {'a tuple of tensors' if before is None else before}"
    else:
        what = f"has changed: {'; '.join(changes(before, now))}"
    return (
        f"{describe(value)} {what} in an earlier step with the same inputs; what is no tensor is told to the next stage once: "
        "pass what changes as a tensor, or let it follow from the inputs"
    )


def lacking_gradient(value: Value, place: int) -> str:
    """Why a message cannot be sent in which the gradient number `place` is missing."""
    return (
        f"stage {value.stage} has no gradient for tensor {place} of what it is given in microbatch {value.microbatch}, but used its "
        "inputs in every microbatch of an earlier step with the same input shapes; use it in all microbatches, as in y + 0 * x.sum()"
    )
