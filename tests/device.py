"""The device on which the process tests build their models: the CPU, or the one that ZEROBUBBLE_TEST_DEVICE names, such as cuda."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DEVICE = torch.device(os.environ.get("ZEROBUBBLE_TEST_DEVICE", "cpu"))


class _OnDevice(TorchFunctionMode):
    """Puts what tests create on `DEVICE`; what the package creates goes where the package says.

    Generators of tests are the CPU's, so numbers drawn with one are drawn there and copied.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _device_constructors() or kwargs.get("device") is not None or _is_package(sys._getframe(1)):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs).to(DEVICE)
        return func(*args, **kwargs | {"device": DEVICE})


def _is_package(frame: Any) -> bool:
    """Whether the package, and not a test, is the nearest caller that is neither torch nor this file.

    A mode of the package that hands on a test's call is no caller.
    """
    asks = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
            asks = False
        elif name.startswith("zerobubble"):
            asks = True
        elif not name.startswith("torch") and name != __name__:
            return asks
        frame = frame.f_back
    return asks


def use_device() -> None:
    """Has this thread create its tensors on `DEVICE`, whose messages are staged where a test asks for a transport of CPUs."""
    if "ZEROBUBBLE_TEST_DEVICE" not in os.environ:
        return
    _OnDevice().__enter__()
    if DEVICE.type != "cpu":
        from zerobubble.runtime.transport import choice

        choice.MAKERS["gloo"] = choice.MAKERS["shared-memory"] = choice.MAKERS["staged"]
