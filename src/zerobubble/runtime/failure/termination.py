"""A rank that is told to end, by SIGTERM, tells the others before it does.

Python's own handlers run in the main thread, between two of its steps, and never while that thread waits for a message. So a thread waits
for the number of the signal, which Python writes to a pipe at once, tells what is to be told, and ends the process as SIGTERM would have.
Whoever handles SIGTERM himself is left alone.
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
"""No signal has this number."""
_LONGEST_STOP_S = 3.0


class ToldToEnd(Protocol):
    """What is to be told when this process is told to end."""

    def tell_of_own_end(self) -> None:
        """Tell the other ranks; called in a thread of its own."""

    def tell_of_end_of_agent(self) -> None:
        """As `tell_of_own_end`, because the agent of torchrun that started this process has ended."""


class _Handler:
    """Takes SIGTERM in the place of its default. Made in the main thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._installed = self._handle  # every use of a method makes a new object, and this one is compared
        self._thread = threading.Thread(target=self._wait, name="zerobubble-termination", daemon=True)
        try:
            self._thread.start()  # first, for it may be refused
        except RuntimeError:
            os.close(self._read)
            os.close(self._write)
            raise
        signal.signal(signal.SIGTERM, self._installed)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # somebody else's: the signal is heard when the main thread comes to run handlers
            signal.set_wakeup_fd(before)

    def restore(self) -> None:
        """Put the default back and end the thread; in the main thread."""
        self._reset()
        os.write(self._write, bytes([_STOP]))
        self._thread.join(_LONGEST_STOP_S)

    def abandon(self) -> None:
        """Put the default back in a forked child."""
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
        """Whether SIGTERM still comes here: another handler may have been installed since."""
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
                    owner.tell_of_own_end()
                _end_by_default()
        os.close(self._read)
        os.close(self._write)


_owners: weakref.WeakValueDictionary[int, ToldToEnd] = weakref.WeakValueDictionary()
"""By their ids, and not a `WeakSet`, which cannot be iterated over while another thread adds to it."""
_handler: _Handler | None = None


def tell_before_the_end(owner: ToldToEnd) -> None:
    """Call `owner.tell_of_own_end()` when SIGTERM comes, until `forget`; only where it would end this process at once."""
    global _handler
    _owners[id(owner)] = owner
    weakref.finalize(owner, _restore_if_unused)
    is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if _handler is None and os.name == "posix" and is_default and threading.current_thread() is threading.main_thread():
        _handler = _Handler()


def forget(owner: ToldToEnd) -> None:
    """Call nothing for `owner` any more."""
    _owners.pop(id(owner), None)
    _restore_if_unused()


def _restore_if_unused() -> None:
    """Put the default back, which the main thread alone can do; until then the handler does what the default would."""
    global _handler
    if threading.current_thread() is threading.main_thread() and not open_pipelines():
        handler, _handler = _handler, None  # what is collected meanwhile comes here, too, and finds none
        if handler is not None:
            handler.restore()


def open_pipelines() -> list[ToldToEnd]:
    """All that are told when this process ends."""
    return [owner for owner in (reference() for reference in _owners.valuerefs()) if owner is not None]


def end_this_process() -> None:
    """End it as SIGTERM would, once everybody has been told; whoever handles SIGTERM himself gets it."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler == signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), _Handler):
        _end_by_default()
    os.kill(os.getpid(), signal.SIGTERM)


def _end_by_default() -> None:
    """End this process as SIGTERM does. Python lets the main thread alone put the default back, and that one may be waiting."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


_masks = threading.local()


def _hold_back() -> None:
    """Before a fork: a signal that the child got before it has put the default back would be heard in the parent, through the pipe."""
    _masks.before = None if _handler is None else signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    if _masks.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _leave_to_parent() -> None:
    global _handler
    if _handler is not None:
        _handler.abandon()
        _handler = None
    _owners.clear()
    _let_through()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_leave_to_parent)
