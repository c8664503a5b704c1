"""A process that a rank forks has no part in the rank's pipelines: it closes its copies of their descriptors, and may end as it likes.

Such a child, a worker of a DataLoader or a logger, has inherited every connection, which would stay open when the rank ends, but not the
threads behind them: to free a backend there would be to wait for ever for its threads. So the child keeps what it inherited, to its end.

The same holds for torch's own process groups. Freeing one in a child joins threads that do not exist there: the child hangs or crashes at
its end. Which object frees them depends on what was imported: torch.distributed.nn, which torch.distributed.checkpoint imports, holds the
default group in the defaults of its functions, and the interpreter frees these.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol

import torch.distributed as dist


class LeftToParent(Protocol):
    """What a forked child leaves to its parent."""

    def abandon(self) -> None:
        """Close this process's descriptors, and forget what there was to do at the end."""


_open: weakref.WeakSet[LeftToParent] = weakref.WeakSet()


def leave_in_children(owner: LeftToParent) -> None:
    """Call `owner.abandon()` in every process that is forked while it lives, and never free it there."""
    _open.add(owner)


def _leave_all() -> None:
    for owner in list(_open):
        owner.abandon()
        _never_free(owner)
    _open.clear()
    if dist.is_available():
        for group in dist.distributed_c10d._world.pg_map:
            _never_free(group)


def _never_free(kept: object) -> None:
    """Take a reference that nobody gives back, not even the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)
