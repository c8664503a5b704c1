"""Clears torch's caches of weights after the library has written to them, since a context of the user may keep such caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.utils import parametrize


@contextmanager
def changing_weights() -> Iterator[None]:
    """Wraps whatever writes into parameters or buffers, so that torch computes with the new numbers afterwards.

    `torch.autocast` caches its casts of parameters, and `parametrize.cached` the weights it computes, until the context ends: both by the
    object, so a write goes unnoticed. Users may have such a context open around any call of this library.
    """
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        parametrize._cache.clear()
