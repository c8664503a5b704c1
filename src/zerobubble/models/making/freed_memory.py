"""Returns freed memory to the operating system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def trim_memory() -> None:
    """Returns freed pages to the operating system, if the C library supports it.

    glibc keeps free blocks of up to 32 MiB between used ones, and allocates from fresh memory if their alignment does not fit.
    """
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    found: Callable[[int], object] = getattr(library, "malloc_trim", bool)
    return found
