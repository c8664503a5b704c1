"""Ranks of the tests bear longer with each other than those of users do, for they run by the dozen on the processors of a few.

Whoever does not answer for 2.5 s counts as frozen, and whoever stood still for a second may be blamed for what came late. A machine that is
busy keeps a healthy rank from running for as long, and it is then named in the place of the one that a test has struck. So here a rank that
answers is waited for, and one that was struck for good is found just as well, a few seconds later. In `tests/pure/test_watch.py` and
`tests/pure/test_blame.py` ranks judge standstills of any length, without other processes beside.
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
    """Let the ranks of this process wait for as long as is said here, in all pipelines that it makes from now on."""
    choice.Group = partial(Group, timing=TIMING)  # type: ignore[attr-defined,misc,assignment]
    blame.STALL_S = blame.LONG_STALL_S = rendezvous._STALL_S = STANDSTILL_S
    rendezvous._STAY_S = TIMING.answer_s
    sockets._FLUSH_S = STANDSTILL_S
