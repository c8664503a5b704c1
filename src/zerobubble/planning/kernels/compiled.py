"""How the kernels are compiled: kept on disk, without the interpreter's lock, and without counting references to arrays, which would take
most of their time.

So they get every array from outside and make none; numba says so when one tries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}

compiled: Callable[[Kernel], Kernel] = njit(**OPTIONS)
inlined: Callable[[Kernel], Kernel] = njit(**OPTIONS, forceinline=True)
