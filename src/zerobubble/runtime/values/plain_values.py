"""Serializes the values that ranks exchange in addition to tensors, as bytes that are data and never code.

The bytes are in Python's pickle format, which can call any function by name while it is read. This reader accepts only the classes of plain
values, named tuples, enumerations and torch's constants, and rejects every other name. So a process that reaches a connection of this one
may corrupt a training run, but cannot execute code in it.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections import OrderedDict
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError

_CLASSES = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        tuple,
        list,
        dict,
        set,
        frozenset,
        OrderedDict,
        torch.Size,
        torch.dtype,
        torch.device,
    }
)


def write_plain(value: Any) -> Tensor:
    """Returns the bytes of a plain value, as a tensor on the CPU, for `read_plain`."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def read_plain(data: Tensor) -> Any:
    """Returns the value that `write_plain` wrote. Raises `InputError` if any part of it is not a plain value."""
    data = data.contiguous().cpu()
    return _PlainUnpickler(io.BytesIO(ctypes.string_at(data.data_ptr(), data.numel()))).load()


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values, and calls only their constructors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "type"):
            return _type_of
        found = super().find_class(module, name)
        if isinstance(found, torch.dtype) or (isinstance(found, type) and _is_plain(found)):
            return found
        raise InputError(
            f"{module}.{name} is none of the values that ranks exchange, which are numbers, text, None, torch's dtypes and devices, "
            "enumerations, and tuples, lists, sets and dicts of these; tensor.tolist() gives the numbers of a tensor"
        )


def _is_plain(kind: type) -> bool:
    return kind in _CLASSES or (issubclass(kind, tuple) and hasattr(kind, "_make")) or issubclass(kind, Enum)


def _type_of(value: Any) -> type:
    """Replaces `type`, which pickle calls for the class of None, but which could also create classes."""
    return type(value)
