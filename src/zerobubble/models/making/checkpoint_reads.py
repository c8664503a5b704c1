"""Reads of safetensors files while a model is made: what no kept parameter needs is not read.

The function that makes the model may call `from_pretrained` of Transformers, `load_file` of safetensors, or open files itself; all of them
call `safe_open`, for which a reader stands in that knows the shape of each tensor without reading it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zerobubble.models.making.runs import Making

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_READS_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""Where this is set, Transformers reads a tensor when it comes to it, and not all of them ahead in other threads."""


class _File:
    """An open file of safetensors."""

    def __init__(self, making: Making, opener: Any, *args: Any, **kwargs: Any) -> None:
        self._making = making
        self._opener, self._args, self._kwargs = opener, args, kwargs
        self._opened = opener(*args, **kwargs)

    def __enter__(self) -> _File:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> Tensor:
        """The tensor of this name."""
        found: Tensor = self.get_slice(name)[...]
        return found

    def get_slice(self, name: str) -> _Slice:
        """The tensor of this name, of which nothing is read yet."""
        return _Slice(self, name)

    def read(self, name: str, index: Any) -> Tensor:
        """What lies at `index` of a tensor, without numbers where no kept parameter needs them."""
        about = self._opened.get_slice(name)
        dtype = _TYPES.get(about.get_dtype())
        origin, is_needed = self._making.begin("read")
        if dtype is None or is_needed:
            # Opened anew, so that what is read of the file leaves memory with the tensor, and not with all others when the file is closed.
            fresh = self._opener(*self._args, **self._kwargs)
            found: Tensor = fresh.get_slice(name)[index]
            return found
        whole = torch.empty(about.get_shape(), dtype=dtype, device="meta")
        self._making.come_from(whole, frozenset({origin}))
        return whole[index]


class _Slice:
    """A tensor in a file of which parts can be read."""

    def __init__(self, file: _File, name: str) -> None:
        self._file = file
        self._name = name

    def __getitem__(self, index: Any) -> Tensor:
        return self._file.read(self._name, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file._opened.get_slice(self._name), name)


@contextmanager
def reading(making: Making) -> Iterator[None]:
    """Inside, whoever has imported `safe_open` reads by way of `making`."""
    opener = getattr(sys.modules.get("safetensors"), "safe_open", None)

    def safe_open(*args: Any, **kwargs: Any) -> Any:
        assert opener is not None
        return _File(making, opener, *args, **kwargs) if making.is_here() else opener(*args, **kwargs)

    before = os.environ.get(_READS_AHEAD)
    os.environ[_READS_AHEAD] = "1"
    try:
        if opener is not None:
            _let_modules_use(safe_open, opener)
        yield
    finally:
        # Those that were imported meanwhile have it, too.
        _let_modules_use(opener, safe_open)
        if before is None:
            del os.environ[_READS_AHEAD]
        else:
            os.environ[_READS_AHEAD] = before


def _let_modules_use(safe_open: Any, before: Any) -> None:
    """Whichever module has `before` under the name `safe_open` gets `safe_open` instead."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get("safe_open") is before:
            vars(module)["safe_open"] = safe_open
