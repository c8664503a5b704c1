"""Skips reads of safetensors files for parameters that this rank does not keep, while a model is created.

The user's function may call `from_pretrained` of Transformers, `load_file` of safetensors, or open files itself. All of these call
`safe_open`, which is replaced by a reader that returns shapes without reading values.
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
"""If set, Transformers reads each tensor when needed, instead of prefetching all of them in other threads."""


class _File:
    """An open safetensors file."""

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
        """Returns the tensor of this name."""
        tensor: Tensor = self.get_slice(name)[...]
        return tensor

    def get_slice(self, name: str) -> _Slice:
        """Returns a lazy tensor of this name."""
        return _Slice(self, name)

    def read(self, name: str, index: Any) -> Tensor:
        """Returns the part of a tensor at `index`, on the meta device if no kept parameter needs it."""
        about = self._opened.get_slice(name)
        dtype = _TYPES.get(about.get_dtype())
        origin, is_needed = self._making.begin("read")
        if dtype is None or is_needed:
            # Opened separately, so that its memory map is freed with this tensor, not when the whole file is closed.
            fresh = self._opener(*self._args, **self._kwargs)
            part: Tensor = fresh.get_slice(name)[index]
            return part
        whole = torch.empty(about.get_shape(), dtype=dtype, device="meta")
        self._making.come_from(whole, frozenset({origin}))
        return whole[index]


class _Slice:
    """A lazy tensor in a file, which supports partial reads."""

    def __init__(self, file: _File, name: str) -> None:
        self._file = file
        self._name = name

    def __getitem__(self, index: Any) -> Tensor:
        return self._file.read(self._name, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file._opened.get_slice(self._name), name)


@contextmanager
def reading(making: Making) -> Iterator[None]:
    """Redirects all modules that have imported `safe_open` to reads through `making`."""
    opener = getattr(sys.modules.get("safetensors"), "safe_open", None)

    def safe_open(*args: Any, **kwargs: Any) -> Any:
        assert opener is not None
        return _File(making, opener, *args, **kwargs) if making.is_here() else opener(*args, **kwargs)

    before = os.environ.get(_READS_AHEAD)
    os.environ[_READS_AHEAD] = "1"
    try:
        if opener is not None:
            _replace_in_modules(safe_open, opener)
        yield
    finally:
        # Also restores modules that were imported in the meantime.
        _replace_in_modules(opener, safe_open)
        if before is None:
            del os.environ[_READS_AHEAD]
        else:
            os.environ[_READS_AHEAD] = before


def _replace_in_modules(safe_open: Any, before: Any) -> None:
    """Replaces `before` by `safe_open` in every module that has it under that name."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get("safe_open") is before:
            vars(module)["safe_open"] = safe_open
