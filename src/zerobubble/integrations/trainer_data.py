"""Lets the ranks of a pipeline read the same batches: those of their replica, as if each replica were one process."""

from __future__ import annotations

from typing import Any

import zerobubble as zb
from zerobubble.integrations.batches import digest_of, refuse_different_digests


def args_with(args: Any, **properties: Any) -> Any:
    """Returns the arguments of Trainer with other properties, such as one process for each replica, and all other attributes of `args`.

    By the number of the process, Transformers seeds the workers of data loaders, and samples batches of similar lengths.
    """
    kind = type(args)

    def constant(value: Any) -> property:
        return property(lambda _: value)

    changed: Any = object.__new__(type(kind.__name__, (kind,), {name: constant(value) for name, value in properties.items()}))
    changed.__dict__ = vars(args)
    return changed


def refuse_different_batches(pipe: zb.Pipeline, batch: Any) -> None:
    """Raises `InputError` on all ranks of a pipeline if they have read different batches."""
    refuse_different_digests(
        pipe._steps.gather(digest_of(batch), "comparing the batches of the ranks"),
        "read the same batches",
        "draw and count alike on all ranks: from torch's, Python's or NumPy's default generator, or from one of your own with the same "
        "seed, and not by the number of the rank",
    )
