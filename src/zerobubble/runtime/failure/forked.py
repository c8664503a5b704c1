"""Detaches a forked child from the pipelines of the rank that forked it.

A child, such as a worker of a DataLoader, inherits every connection. They would stay open when the rank ends, so the child closes its
copies of the descriptors. It does not inherit the threads behind them: freeing a backend there would wait for ever for its threads. So the
child never frees what it inherited.

The same holds for torch's own process groups. Freeing one in a child joins threads that do not exist there: the child hangs or crashes at
exit. Which object frees them depends on what was imported: torch.distributed.nn, which torch.distributed.checkpoint imports, keeps the
default group in the defaults of its functions, and the interpreter frees these.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol

import torch.distributed as dist


class Detachable(Protocol):
    """Something that a forked child leaves to its parent."""

    def detach(self) -> None:
        """Closes this process's descriptors, and drops what was registered to run at exit."""


_open: weakref.WeakSet[Detachable] = weakref.WeakSet()


def detach_in_children(owner: Detachable) -> None:
    """Calls `owner.detach()` in every process that is forked while `owner` lives, and never frees it there."""
    _open.add(owner)


def _detach_all() -> None:
    for owner in list(_open):
        owner.detach()
        _never_free(owner)
    _open.clear()
    if dist.is_available():
        for group in dist.distributed_c10d._world.pg_map:
            _never_free(group)


def _never_free(kept: object) -> None:
    """Takes a reference that nothing releases, not even the interpreter at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)
