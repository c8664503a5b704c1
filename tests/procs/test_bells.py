"""Who waits for a slot leaves the bell to the receiver."""

from __future__ import annotations

import os
import select
import socket
from itertools import count

from zerobubble.runtime.transport.shared_memory import Connection


def test_a_sender_that_waits_leaves_its_ring_to_the_receiver() -> None:
    ours, theirs = socket.socketpair()
    bell = os.eventfd(0)
    sender, receiver = Connection(ours, bell, 5.0, hears=False), Connection(theirs, os.dup(bell), 5.0, hears=True)
    sender.ring()
    looks = count()
    sender.sleep_until(lambda: next(looks) == 3, longest_ms=1)
    assert select.select([bell], [], [], 0)[0], "the ring is still there"
    looks = count()
    receiver.sleep_until(lambda: next(looks) == 1)
    assert not select.select([bell], [], [], 0)[0], "and the receiver has taken it"
    sender.close()
    receiver.close()
