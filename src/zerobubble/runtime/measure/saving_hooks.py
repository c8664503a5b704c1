"""Hooks for what autograd saves, in stages that may be compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def saving_through(keep: Callable[[Tensor], T], read: Callable[[T], Tensor]) -> AbstractContextManager[object]:
    """Inside, autograd saves what `keep` makes of each tensor, and `read` gives the tensor back.

    A module that torch.compile compiles would have its hooks compiled, too, with the numbers of the first tensor in them, such as its
    version: they run as they are written.
    """
    if "torch._dynamo" in sys.modules:  # importing it takes seconds, and code that compiles has done so
        keep, read = torch.compiler.disable(keep), torch.compiler.disable(read)  # type: ignore[no-untyped-call]
    return torch.autograd.graph.saved_tensors_hooks(keep, read)
