"""Reports to the other ranks that this process got SIGTERM, and then ends it.

Python's signal handlers run in the main thread between two bytecodes, so never while that thread is blocked on a message. But Python's C
handler writes the number of the signal to the wakeup descriptor at once. So a thread reads that pipe, reports for every open pipeline, and
ends the process as the default action would. A process with its own handler for SIGTERM keeps it, and nothing is installed.

Order matters twice. The thread starts before the handler is installed, or a signal between the two would be lost. And a fork blocks
SIGTERM until the child has reset the handler: the child shares the pipe, so its signal would end the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import weakref
from contextlib import suppress
from types import FrameType
from typing import Protocol

_STOP = 0
"""Ends the thread; no signal has this number."""
_LONGEST_STOP_S = 3.0


class ReportsTermination(Protocol):
    """An open pipeline, which reports to its ranks that this process ends. Both methods are called in other threads."""

    def report_termination(self) -> None:
        """Reports that this process got SIGTERM."""

    def report_agent_end(self) -> None:
        """Reports that the torchrun agent that started this process has ended."""


class _Handler:
    """Handles SIGTERM instead of the default action. Must be created in the main thread, as `signal.signal` requires."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._installed = self._handle  # each access of a method creates a new object, and `_is_installed` compares this one
        self._thread = threading.Thread(target=self._wait, name="zerobubble-termination", daemon=True)
        try:
            self._thread.start()  # before the handler: it may fail, and must be reading when the first signal arrives
        except RuntimeError:
            os.close(self._read)
            os.close(self._write)
            raise
        signal.signal(signal.SIGTERM, self._installed)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # another library's: keep it, and `_handle` writes the signal once the main thread runs handlers
            signal.set_wakeup_fd(before)

    def restore(self) -> None:
        """Restores the default action and ends the thread. Must run in the main thread."""
        self._reset()
        os.write(self._write, bytes([_STOP]))
        self._thread.join(_LONGEST_STOP_S)

    def detach(self) -> None:
        """Restores the default action in a forked child, which has no thread to end."""
        self._reset()
        os.close(self._read)
        os.close(self._write)

    def _reset(self) -> None:
        if self._is_installed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current != self._write:
            signal.set_wakeup_fd(current)

    def _is_installed(self) -> bool:
        """Whether this handler still gets SIGTERM: another one may have replaced it."""
        return signal.getsignal(signal.SIGTERM) is self._installed

    def _handle(self, number: int, frame: FrameType | None) -> None:
        with suppress(BlockingIOError):
            os.write(self._write, bytes([number]))

    def _wait(self) -> None:
        numbers = b""
        while _STOP not in numbers:
            numbers = os.read(self._read, 64)
            if signal.SIGTERM in numbers and self._is_installed():
                for owner in open_pipelines():
                    owner.report_termination()
                _end_by_default()
        os.close(self._read)
        os.close(self._write)


_owners: weakref.WeakValueDictionary[int, ReportsTermination] = weakref.WeakValueDictionary()
"""The open pipelines by id. Not a `WeakSet`, which cannot be iterated over while another thread adds to it."""
_handler: _Handler | None = None


def report_on_sigterm(owner: ReportsTermination) -> None:
    """Calls `owner.report_termination()` on SIGTERM, until `forget(owner)`. Only if SIGTERM has its default action."""
    global _handler
    _owners[id(owner)] = owner
    weakref.finalize(owner, _restore_if_unused)
    is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if _handler is None and os.name == "posix" and is_default and threading.current_thread() is threading.main_thread():
        _handler = _Handler()


def forget(owner: ReportsTermination) -> None:
    """Stops calling `owner`."""
    _owners.pop(id(owner), None)
    _restore_if_unused()


def _restore_if_unused() -> None:
    """Restores the default action, which only the main thread can do. Until then the handler ends the process just as well."""
    global _handler
    if threading.current_thread() is threading.main_thread() and not open_pipelines():
        handler, _handler = _handler, None  # first: garbage collection may call this function recursively
        if handler is not None:
            handler.restore()


def open_pipelines() -> list[ReportsTermination]:
    """Returns the open pipelines of this process."""
    return [owner for owner in (reference() for reference in _owners.valuerefs()) if owner is not None]


def end_this_process() -> None:
    """Ends this process by SIGTERM, once all ranks know. If the user has a handler for SIGTERM, it runs."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler == signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), _Handler):
        _end_by_default()
    os.kill(os.getpid(), signal.SIGTERM)


def _end_by_default() -> None:
    """Ends this process by the default action of SIGTERM."""
    # Through C: `signal.signal` works only in the main thread, which may be blocked.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


_masks = threading.local()


def _block_signal() -> None:
    """Blocks SIGTERM during a fork: until the child has reset the handler, its signal would go to the parent through the shared pipe."""
    _masks.before = None if _handler is None else signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_signal() -> None:
    if _masks.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _detach_child() -> None:
    global _handler
    if _handler is not None:
        _handler.detach()
        _handler = None
    _owners.clear()
    _unblock_signal()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_block_signal, after_in_parent=_unblock_signal, after_in_child=_detach_child)
