"""The compiled part of the planner: simulator, list scheduler, annealing, and the search over them. Needs llvmlite."""

from __future__ import annotations

from types import ModuleType

from zerobubble.errors import InputError
from zerobubble.installing import install


def load_kernels() -> ModuleType:
    """Imports and returns the entry points of the kernels; raises `InputError` with what to install if llvmlite is missing."""
    try:
        from zerobubble.planning.kernels import entry_points
    except ModuleNotFoundError as error:
        if error.name not in ("llvmlite", "numpy"):
            raise
        raise InputError("the planner's search needs llvmlite", remedy=install("plan")) from error
    return entry_points
