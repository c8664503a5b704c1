"""What ranks tell each other beside tensors, as bytes: values that are data and nothing else.

The bytes are Python's pickle format, which can call any function by its name while it is read. Here it cannot: reading knows the classes of
plain values, named tuples, enumerations and what torch has as constants, and refuses every other name. So whoever can reach a connection of
this process may spoil a training run, but nothing that he sends is run in it.
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
    """The bytes of a plain value, a tensor on the CPU; `read_plain` reads it back."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def read_plain(data: Tensor) -> Any:
    """The value that `write_plain` wrote. Raises `InputError` where it is, or holds, something else than a plain value."""
    data = data.contiguous().cpu()
    return _PlainUnpickler(io.BytesIO(ctypes.string_at(data.data_ptr(), data.numel()))).load()


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values, and calls nothing but what makes them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "type"):
            return _type_of
        found = super().find_class(module, name)
        if isinstance(found, torch.dtype) or (isinstance(found, type) and _is_plain(found)):
            return found
        raise InputError(
            f"{module}.{name} is none of the values that ranks tell each other, which are numbers, text, None, torch's dtypes and devices, "
            "enumerations, and tuples, lists, sets and dicts of these; tensor.tolist() gives the numbers of a tensor"
        )


def _is_plain(kind: type) -> bool:
    return kind in _CLASSES or (issubclass(kind, tuple) and hasattr(kind, "_make")) or issubclass(kind, Enum)


def _type_of(value: Any) -> type:
    """In the place of `type`, by which pickle names the class of None: it makes no new classes."""
    return type(value)
