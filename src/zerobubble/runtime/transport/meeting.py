"""How the ranks of a group meet before there is any connection between them: in the store of torch.distributed, round by round.

Every rank writes into the round that is open that it has come, with what is wrong with its arguments, the versions it runs and which
process it is. The first rank of the group waits until all have come, and decides the round: the ranks go on under a name, or a fault is
told to all. A rank that has waited for long enough decides it, too: those that did not come are named. The first decision counts and is
read by all; the rank that comes next opens a new round. So ranks meet again after a failure, also when one of them has made more attempts
than another.

What is written is JSON, and the versions are compared first, so that two revisions of this package can still tell that they differ. The
store may be gone or frozen with the process that hosts it, so nobody bears its silence for longer than a few seconds.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from zerobubble.errors import InputError, PipelineError
from zerobubble.runtime.transport.background import in_background
from zerobubble.runtime.transport.contact import host_is_silent, stalled
from zerobubble.runtime.transport.endpoint import Group
from zerobubble.runtime.transport.measured_store import MeasuredStore
from zerobubble.runtime.transport.rank_process import RankProcess, has_ended
from zerobubble.runtime.transport.terms import Terms, faults_of

_SHORTEST_S, _LONGEST_S = 0.001, 0.1
"""Between two looks into the store."""
_STAY_S = 1.0
"""How long a process that was told to end stays to tell the others, and one that holds the store until they have read the decision."""
_STANDSTILL_S = 2.0
"""For so long a process does not stand still on a busy machine."""
_ROUND = "round"
"""The key of the round that was opened last."""
_ONE_AT_A_TIME = threading.Lock()
"""Two threads of a process that came to one round would be taken for one rank."""


class Arrival(NamedTuple):
    """What a rank says when it comes: what is wrong with its arguments, what all ranks must have alike, and which process it is."""

    fault: str
    terms: Terms
    process: RankProcess


class Decision(NamedTuple):
    """How a round ended: the ranks, which are these `processes`, go on under the name `session`, or all raise an error: one of input, or
    the failure of `rank`."""

    session: str = ""
    processes: tuple[RankProcess, ...] = ()
    input_error: str = ""
    failure: str = ""
    rank: int = -1


def meet(group: Group, arrival: Arrival, timeout: float) -> Decision:
    """Meet the other ranks of `group` in its store, a part of it that belongs to the group of processes: how they go on together.

    Raises `InputError` on every rank when something is wrong on one of them or differs, and `PipelineError` on every rank when one does
    not come within `timeout` seconds, or the store does not answer.
    """
    with _ONE_AT_A_TIME:
        decision = _Attendance(group, arrival, timeout).decision()
    if decision.input_error:
        raise InputError(decision.input_error)
    if decision.failure:
        raise PipelineError(decision.failure, rank=decision.rank if decision.rank >= 0 else None)
    return decision


class _Attendance:
    """One rank's part in a round. The store is asked in a thread of its own, which this rank leaves behind when the store is silent."""

    newest: ClassVar[_Attendance | None] = None
    """The attempt that this process made last. One before it that still waits for the store has no part in rounds any more."""

    def __init__(self, group: Group, arrival: Arrival, timeout: float) -> None:
        _Attendance.newest = self
        self._group = group
        self._store = MeasuredStore(group.store)
        self._arrival = arrival
        self._timeout = timeout
        self._missed = Decision()
        self._looked = time.monotonic()
        self._stood_still_s, self._went_on = 0.0, -math.inf
        self._waited_s = 0.0
        self._over = threading.Event()
        self._left = threading.Event()
        self._reason = Decision()

    def decision(self) -> Decision:
        """How the round ended."""
        try:
            return in_background(self._attend, self._count)
        except (_SilentError, RuntimeError):
            return self._leave(self._own_standstill() or _without_store(self._group))
        except BaseException as error:  # this process was told to end, as by KeyboardInterrupt
            rank = self._group.rank
            self._leave(Decision(failure=f"rank {rank} failed while meeting the other ranks: {type(error).__name__}", rank=rank))
            self._left.wait(_STAY_S)
            raise

    def _count(self, seconds: float) -> None:
        """Count the time in which nothing happened."""
        self._look_at_clock()
        self._waited_s += seconds
        self._store.count(seconds)
        if self._waited_s >= self._timeout:
            self._over.set()
        if self._store.silence_s >= min(self._group.timing.silence_s, self._timeout):
            raise _SilentError

    def _look_at_clock(self) -> None:
        """Notice when this process has stood still since it looked last."""
        now = time.monotonic()
        if now - self._looked > _STANDSTILL_S:
            self._stood_still_s, self._went_on = now - self._looked, now
        self._looked = now

    def _own_standstill(self) -> Decision | None:
        """That this process has just stood still, if it has: the others may have given it up and ended, and the store with them."""
        self._look_at_clock()
        if time.monotonic() - self._went_on > self._group.timing.answer_s:
            return None
        rank = self._group.rank
        found = "then the torch.distributed store did not answer"
        return Decision(failure=f"{stalled(rank, self._stood_still_s)}; {found}", rank=rank)

    def _leave(self, reason: Decision) -> Decision:
        """Give up for this reason, which the others hear once the store answers."""
        self._reason = reason
        self._over.set()
        return reason

    def _attend(self) -> Decision:
        current = self._open_round()
        if _Attendance.newest is not self:
            return self._reason  # the store answers again, and in this round the ranks meet after this attempt
        decision = self._decision_of(current)
        self._left.set()
        if not decision.session:
            self._stay_until_read(current)
        return decision

    def _decision_of(self, current: str) -> Decision:
        everybody = [f"{current}/{rank}" for rank in range(self._group.size)]
        self._store.set(everybody[self._group.rank], json.dumps(self._arrival))
        pause_s = _SHORTEST_S
        while not self._store.check([_decision_key(current)]):
            if self._group.rank == 0 and self._store.check(everybody):
                return self._decide(current, self._judge(everybody))
            if (ended := self._ended()) is not None:
                return self._decide(current, ended)
            if self._over.wait(pause_s):
                return self._decide(current, self._give_up(everybody))
            pause_s = min(1.5 * pause_s, _LONGEST_S)
        return self._read(current)

    def _ended(self) -> Decision | None:
        """That the process of a rank has ended, if one has of those that are known: nobody need wait for it."""
        for rank, process in enumerate(self._group.processes):
            if has_ended(process):
                return Decision(failure=f"rank {rank} is gone: its process ended before the ranks had met; see the log there", rank=rank)
        return None

    def _stay_until_read(self, current: str) -> None:
        """The error that follows may end this process: if the store ends with it, those who came must have read the decision before."""
        self._store.set(_read_key(current, self._group.rank), "")
        end = time.monotonic() + _STAY_S
        while self._group.rank == self._group.store_host and time.monotonic() < end and self._is_unread(current):
            time.sleep(_LONGEST_S)

    def _is_unread(self, current: str) -> bool:
        ranks = range(self._group.size)
        return any(self._store.check([f"{current}/{rank}"]) and not self._store.check([_read_key(current, rank)]) for rank in ranks)

    def _open_round(self) -> str:
        """The round that is not decided yet; a new one where there is none."""
        current = self._store.compare_set(_ROUND, "", uuid.uuid4().hex).decode()
        while self._store.check([_decision_key(current)]):
            if not self._store.check([f"{current}/{self._group.rank}"]):
                self._missed = self._read(current)
            current = self._store.compare_set(_ROUND, current, uuid.uuid4().hex).decode()
        return str(current)

    def _decide(self, current: str, decision: Decision) -> Decision:
        """Decide the round, unless another rank has done so: then its decision counts."""
        return _as_decision(self._store.compare_set(_decision_key(current), "", json.dumps(decision._asdict())))

    def _read(self, current: str) -> Decision:
        return _as_decision(self._store.get(_decision_key(current)))

    def _judge(self, everybody: Sequence[str]) -> Decision:
        """All have come: whether they can go on together."""
        told = [json.loads(self._store.get(key)) for key in everybody]
        faults = faults_of([(fault, terms) for fault, terms, *_ in told])
        if faults:
            return Decision(input_error=faults)
        return Decision(session=uuid.uuid4().hex, processes=tuple(RankProcess(*process) for _, _, process in told))

    def _give_up(self, everybody: Sequence[str]) -> Decision:
        """Who is to blame that this rank has waited for so long."""
        if self._reason.failure:
            return self._reason
        missing = [rank for rank, key in enumerate(everybody) if not self._store.check([key])]
        if self._missed.failure and len(missing) == self._group.size - 1:
            return self._missed  # the others had given up when this rank came, and did not come again
        if not missing:
            silent = "rank 0 does not answer: it came to make a Pipeline and then said nothing"
            return Decision(failure=f"{silent} within {self._timeout:g} s; see the log there", rank=0)
        named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing[:-1]))} and {missing[-1]}"
        late = f"{named} did not come to make a Pipeline within {self._timeout:g} s"
        remedy = "see the log there, or raise `timeout` if it may take that long"
        return Decision(failure=f"{late}; {remedy}", rank=missing[0] if len(missing) == 1 else -1)


class _SilentError(Exception):
    """The store has been silent for too long."""


def _decision_key(current: str) -> str:
    return f"{current}/decision"


def _read_key(current: str, rank: int) -> str:
    """The key by which a rank says that it has read the decision."""
    return f"{current}/{rank}/read"


def _as_decision(text: bytes) -> Decision:
    """What is written there, perhaps by another revision with more to say."""
    written = json.loads(text)
    decision = Decision(**{name: written[name] for name in Decision._fields if name in written})
    return decision._replace(processes=tuple(RankProcess(*process) for process in decision.processes))


def _without_store(group: Group) -> Decision:
    host = group.store_host
    if host is None:
        return Decision(failure="the torch.distributed store does not answer: see the log of the process that hosts it")
    return Decision(failure=host_is_silent(host), rank=host)
