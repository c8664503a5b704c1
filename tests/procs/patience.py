"""Longer failure-detection timeouts for tests, where dozens of ranks share a few processors.

By default, a rank that does not answer for 2.5 s counts as frozen, and one that stood still for a second may be blamed for a late message.
A busy machine can suspend a healthy rank for that long, and the error then names it instead of the rank that the test stopped. With these
timeouts, ranks wait for a slow answer, and still find a stopped rank a few seconds later. `tests/pure/test_watch.py` and
`tests/pure/test_blame.py` cover standstills of any length, without other processes.
"""

from __future__ import annotations

from functools import partial

from zerobubble.runtime.failure import blame
from zerobubble.runtime.transport import choice, rendezvous, sockets
from zerobubble.runtime.transport.endpoint import Group, StoreTiming

TIMING = StoreTiming(answer_s=6.0, silence_s=7.0, stay_s=30.0)
STANDSTILL_S = 4.0
"""Less than any timeout here, after which a stopped rank goes on: that one is to be blamed."""
SHORT_S = 6.0
"""The timeout of pipelines that one rank keeps waiting for as long: each test waits for it, and a healthy rank must not exceed it."""


def bear_with_others() -> None:
    """Use these timeouts in all pipelines that this process makes from now on."""
    choice.Group = partial(Group, timing=TIMING)  # type: ignore[attr-defined,misc,assignment]
    blame.STALL_S = blame.LONG_STALL_S = rendezvous._STALL_S = STANDSTILL_S
    rendezvous._STAY_S = TIMING.answer_s
    sockets._FLUSH_S = STANDSTILL_S
