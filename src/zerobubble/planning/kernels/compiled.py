"""How the kernels are compiled: for the types of their arguments, once on a machine, without the interpreter's lock.

They get every array from outside and make none. They are written in the part of Python that `native` translates, which says so at the line
that uses more. `function.python` is the kernel as Python runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from zerobubble.planning.kernels.native.calls import Kernel

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Let a function be compiled when it is called."""
    return cast(Function, Kernel(function))


def inlined(function: Function) -> Function:
    """The same, as part of every kernel that calls it."""
    return cast(Function, Kernel(function, is_inlined=True))
