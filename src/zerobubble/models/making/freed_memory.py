"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Give pages that were freed back to the system, where the C library can.

    glibc keeps blocks of up to 32 MiB between those in use, and takes new ones from untouched memory where alignment does not fit.
    """
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    found: Callable[[int], object] = getattr(library, "malloc_trim", bool)
    return found
