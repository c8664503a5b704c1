"""Streams of the accelerator, of any type, for work that another thread enqueues."""

from __future__ import annotations

from typing import Any

import torch


def accelerator() -> torch.device | None:
    """Returns the kind of accelerator that can be used, None without one."""
    # Without an accelerator, torch 2.6 raises instead of returning None.
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def current_stream() -> Any:
    """Returns the calling thread's current stream of the accelerator, None if this process has not used one."""
    device = accelerator()
    if device is None:
        return None
    # A process that has not used its device must not get a context on it here. Some modules do not report that: MPS always has one.

    is_in_use = getattr(torch.get_device_module(device), "is_initialized", lambda: True)()
    return torch.accelerator.current_stream() if is_in_use else None


def set_stream(stream: Any) -> None:
    """Makes a stream current in the calling thread; does nothing for None."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


def wait_for(stream: Any) -> None:
    """Waits until the device has done all work enqueued on the stream so far; does nothing for None."""
    if stream is not None:
        stream.synchronize()
