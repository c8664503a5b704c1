"""The decorators of kernels, which are compiled for the types of their arguments, once per machine, and run without the GIL.

Kernels get all arrays as arguments and create none. They use the subset of Python that `native` compiles; anything else is an error with
its line. `function.python` is the kernel as a Python function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from zerobubble.planning.kernels.native.calls import Kernel

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiles a function when it is called."""
    return cast(Function, Kernel(function))


def inlined(function: Function) -> Function:
    """Compiles a function into each kernel that calls it."""
    return cast(Function, Kernel(function, is_inlined=True))
