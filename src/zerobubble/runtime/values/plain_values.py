"""Serializes the values that ranks exchange in addition to tensors, as bytes that are data and never code.

The bytes are in Python's pickle format, which can call any function by name while it is read. This reader accepts only the classes of plain
values, named tuples, enumerations and torch's constants, and rejects every other name. A dataclass is looked up by name among those that
this process has imported, and never called. So a process that reaches a connection of this one may corrupt a training run, but cannot
execute code in it.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from collections import OrderedDict
from dataclasses import is_dataclass
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


class DataclassReference:
    """Stands for a dataclass in a plain value: pickled as its module and name, and looked up by them."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.__name__ = kind.__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataclassReference) and other.kind is self.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return dataclass_named, (self.kind.__module__, self.kind.__qualname__)


def dataclass_named(module: str, name: str) -> DataclassReference:
    """Returns a dataclass that this process has imported. Raises `InputError` for any other name."""
    member: Any = sys.modules.get(module)
    for part in name.split("."):
        member = getattr(member, "__dict__", {}).get(part)
    if not isinstance(member, type) or not is_dataclass(member):
        raise InputError(
            "{name} is no dataclass that this rank has imported",
            name=f"{module}.{name}",
            remedy="define it at the top of a module",
        )
    return DataclassReference(member)


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
        if (module, name) == (__name__, dataclass_named.__name__):
            return dataclass_named
        kind = super().find_class(module, name)
        if isinstance(kind, torch.dtype) or (isinstance(kind, type) and _is_plain(kind)):
            return kind
        raise InputError(
            (
                "{module}.{name} is none of the values that ranks exchange, which are numbers, text, None, torch's "
                "dtypes and devices, enumerations, and tuples, lists, sets and dicts of these; tensor.tolist() gives the "
                "numbers of a tensor"
            ),
            module=module,
            name=name,
        )


def _is_plain(kind: type) -> bool:
    return kind in _CLASSES or (issubclass(kind, tuple) and hasattr(kind, "_make")) or issubclass(kind, Enum)


def _type_of(value: Any) -> type:
    """Replaces `type`, which pickle calls for the class of None, but which could also create classes."""
    return type(value)
