"""The device on which the process tests build their models: the CPU, or the one that ZEROBUBBLE_TEST_DEVICE names, such as cuda.

The device "separate", of tests/separate, needs no hardware.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._device import _device_constructors

_NAME = os.environ.get("ZEROBUBBLE_TEST_DEVICE", "cpu")


def _backend() -> str:
    if _NAME == "separate":
        from tests import separate  # registers the device

        return separate.BACKEND
    return "gloo"


BACKEND = _backend()
"""The backend of the ranks' process group."""
DEVICE = torch.device(_NAME)
_here = threading.local()


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Skips a test on an accelerator: it tests what only a CPU has, as `reason` says."""
    return pytest.mark.skipif(DEVICE.type != "cpu", reason=reason)


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

    A mode of the package that hands on a test's call is no caller. Torch's checkpoints count as the package: they repeat what they create
    in a thread of the engine, where no mode is active.
    """
    asks = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
            asks = False
        elif name == checkpoint.__name__:
            return True
        elif name.startswith("zerobubble"):
            asks = True
        elif not name.startswith("torch") and name != __name__:
            return asks
        frame = frame.f_back
    return asks


def use_device() -> None:
    """Has this thread create its tensors on `DEVICE`, whose messages are staged where a test asks for a transport of CPUs.

    Every thread of a test that creates tensors calls it.
    """
    if "ZEROBUBBLE_TEST_DEVICE" not in os.environ or hasattr(_here, "is_ready"):
        return
    _here.is_ready = True
    _OnDevice().__enter__()
    if DEVICE.type != "cpu":
        from zerobubble.runtime.transport import choice

        choice.MAKERS["gloo"] = choice.MAKERS["shared-memory"] = choice.MAKERS["staged"]
        _gather_over_gloo(DEVICE.type.upper())


def _gather_over_gloo(key: str) -> None:
    """Has DTensors gather over gloo by a collective that accepts tensors of an accelerator.

    Ranks that share a GPU need gloo. Torch gathers DTensors by a coalesced collective, and gloo's reads device memory from the host:
    https://github.com/pytorch/pytorch/issues/152645
    """
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("_c10d_functional", "IMPL")

    def gather(part: Tensor, size: int, group: Any) -> Tensor:
        whole = part.new_empty((size, *part.shape))
        found = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        dist.all_gather(list(whole.unbind()), part.contiguous(), group=found)
        return whole.flatten(0, 1)

    _library.impl("all_gather_into_tensor", gather, key)


_library: torch.library.Library | None = None
