"""A sender that waits for a slot leaves the wake-up to the receiver."""

from __future__ import annotations

import os
import select
import socket
from itertools import count

from zerobubble.runtime.transport.wake_up import Connection


def test_a_sender_that_waits_leaves_its_wake_up_to_the_receiver() -> None:
    ours, theirs = socket.socketpair()
    wake_up = os.eventfd(0)
    sender, receiver = Connection(ours, wake_up, 60.0, wakes=False), Connection(theirs, os.dup(wake_up), 60.0, wakes=True)
    sender.wake()
    looks = count()
    sender.sleep_until(lambda: next(looks) == 3, longest_ms=1)
    assert select.select([wake_up], [], [], 0)[0], "the wake-up is still there"
    looks = count()
    receiver.sleep_until(lambda: next(looks) == 1)
    assert not select.select([wake_up], [], [], 0)[0], "and the receiver has taken it"
    sender.close()
    receiver.close()
