"""Lets the ranks of a pipeline read the same batches: those of their replica, as if each replica were one process."""

from __future__ import annotations

from typing import Any

import zerobubble as zb
from zerobubble.integrations.batches import digest_of, refuse_different_digests


def args_of_replica(args: Any, num_replicas: int, replica: int) -> Any:
    """Returns the arguments of Trainer with one process for each replica. All other attributes are those of `args`.

    Transformers seeds the workers of data loaders, and samples batches of similar lengths, by the number of the process.
    """
    kind = type(args)
    own = {"world_size": property(lambda _: num_replicas), "process_index": property(lambda _: replica)}
    of_replica: Any = object.__new__(type(kind.__name__, (kind,), own))
    of_replica.__dict__ = vars(args)
    return of_replica


def refuse_different_batches(pipe: zb.Pipeline, batch: Any) -> None:
    """Raises `InputError` on all ranks of a pipeline if they have read different batches."""
    refuse_different_digests(
        pipe._steps.gather(digest_of(batch), "comparing the batches of the ranks"),
        "read the same batches",
        "draw and count alike on all ranks: from torch's, Python's or NumPy's default generator, or from one of your own with the same "
        "seed, and not by the number of the rank",
    )
