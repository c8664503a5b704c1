"""Checks of code for accelerators that need none: a device on the CPU that proves the order of streams. Needs torch."""

from __future__ import annotations

from zerobubble.listing import listing
from zerobubble.testing.checked_device import CheckedDevice, checked_device
from zerobubble.testing.order import CheckedEvent, CheckedStream, OrderError

__all__ = ["CheckedDevice", "CheckedEvent", "CheckedStream", "OrderError", "checked_device"]

__dir__ = listing(__all__)
