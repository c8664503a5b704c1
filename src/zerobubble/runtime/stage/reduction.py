"""The reduction of gradients that FSDP2 manages together, started and waited for later.

FSDP2 reduces the gradients of a parameter group in `post_backward`: it copies them into one message, reduces that over the ranks, and puts
what comes out into the `.grad` of the shards. On a GPU all this is enqueued, on streams of its own. On the CPU it is waited for, so there
it runs in a thread, from which the caller takes over again as soon as the message is on its way. So the messages of all threads of a rank
set out in the order in which the rank asks for them, and other ranks that ask in the same order get the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

import torch


class Reduction(Protocol):
    """A reduction that has been started.

    `times` are when it began and ended, in `perf_counter_ns`, None where a device does it by itself. They are known once it `is_over`.
    """

    times: tuple[int, int] | None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> None:
        """Wait until it is over; raises what it raised."""


def start_reduction(group: Any, before: Reduction | None) -> Reduction:
    """Start to reduce the gradients of `group`, a parameter group of FSDP2; it ends after `before`, which was started before it."""
    if group.device.type != "cpu":
        return _Enqueued(group)
    if not hasattr(group, "_reduce_scatter_comm"):
        # This torch cannot be told to go on when the message is on its way, so that here it is waited for.
        return _WaitedFor(group)
    return _InThread(group, before)


class _Enqueued:
    """A reduction that a device does beside the passes, for which it waits when FSDP2 ends the backward pass."""

    times: tuple[int, int] | None = None

    def __init__(self, group: Any) -> None:
        group.post_backward()
        self._event: torch.Event | None = group._post_reduce_event

    @property
    def is_over(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """There is nothing to wait for on the CPU."""


class _WaitedFor:
    """A reduction that is over when it has been started."""

    is_over = True

    def __init__(self, group: Any) -> None:
        began = perf_counter_ns()
        group.post_backward()
        self.times: tuple[int, int] | None = (began, perf_counter_ns())

    def wait(self) -> None:
        """It is over."""


class _InThread:
    """A reduction in a thread of its own, which is made when its message is on its way."""

    times: tuple[int, int] | None = None

    def __init__(self, group: Any, before: Reduction | None) -> None:
        self._on_its_way = threading.Event()
        self._over = threading.Event()
        self._before = before
        self._failed: BaseException | None = None
        # A daemon, because what it waits for may never come when another rank has failed.
        threading.Thread(target=self._run, args=(group,), name="zerobubble-reduction", daemon=True).start()
        self._on_its_way.wait()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._failed is not None:
            raise self._failed

    def _run(self, group: Any) -> None:
        began = perf_counter_ns()
        send = group._reduce_scatter_comm
        group._reduce_scatter_comm = _Sending(send, self._on_its_way.set, self._wait_for_turn)
        try:
            group.post_backward()
            self._wait_for_turn()
        except BaseException as error:  # noqa: BLE001 - it is raised where the reduction is waited for
            self._failed = error
        finally:
            group._reduce_scatter_comm = send
            self.times = (began, perf_counter_ns())
            self._over.set()
            self._on_its_way.set()

    def _wait_for_turn(self) -> None:
        """Gradients are put in place one after another, as FSDP2 expects, and what follows a message is sent in that order."""
        if self._before is not None:
            self._before.wait()
            self._before = None


class _Sending:
    """What FSDP2 reduces and scatters with: `send` as it is, but that it tells when its message is `on_its_way`."""

    def __init__(self, send: Any, on_its_way: Callable[[], None], wait_for_turn: Callable[[], None]) -> None:
        self.allocate = send.allocate
        self._send = send
        self._on_its_way = on_its_way
        self._wait_for_turn = wait_for_turn

    def __call__(self, **arguments: Any) -> None:
        work = self._send(**arguments | {"async_op": True})
        self._on_its_way()
        if work is not None:
            work.wait()
        self._wait_for_turn()
