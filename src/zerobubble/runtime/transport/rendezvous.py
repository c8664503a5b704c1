"""Brings the ranks of a group together in the torch.distributed store, in rounds, before any connection exists.

1. Each rank writes its record into the open round: the fault in its arguments, its terms such as versions, and its process.
2. The first rank waits for all records and decides the round: the ranks continue under a session name, or all raise one fault. A rank that
   times out, or finds that a process has ended, decides it as well.
3. The first decision wins (`compare_set`), and all ranks read it from the store. Never may two ranks act on different decisions.
4. The rank that arrives next opens a new round. So ranks meet again after a failure, even if one has made more attempts than another.

Records are JSON, and versions are compared first, so that two revisions of this package still detect that they differ. The store may be
gone or frozen with the process that hosts it, so a rank stops waiting after a few seconds of silence.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from zerobubble.errors import InputError, PipelineError
from zerobubble.runtime.transport.background import in_background
from zerobubble.runtime.transport.contact import host_is_silent, stalled
from zerobubble.runtime.transport.endpoint import Group
from zerobubble.runtime.transport.measured_store import MeasuredStore
from zerobubble.runtime.transport.rank_process import RankProcess, has_ended
from zerobubble.runtime.transport.stalls import StallMonitor
from zerobubble.runtime.transport.terms import Terms, faults_of
from zerobubble.units import named

_SHORTEST_S, _LONGEST_S = 0.001, 0.1
"""The pause between two polls of the store."""
_STAY_S = 1.0
"""How long a process stays to publish that it was interrupted, and the store's host for the others to read the decision."""
_STALL_S = 2.0
"""A process that does not run for longer than this has stalled; a busy machine alone does not explain it."""
_ROUND = "round"
"""The key of the round that was opened last."""
_ONE_AT_A_TIME = threading.Lock()
"""Two threads of a process in one round would count as one rank."""


class RendezvousRecord(NamedTuple):
    """A rank's record at the rendezvous: the fault in its arguments, the terms that all ranks must share, and its process."""

    fault: str
    terms: Terms
    process: RankProcess


class Outcome(NamedTuple):
    """The outcome of a round: the ranks, with these `processes`, continue as `session`, or all raise an input error or the failure of
    `rank`."""

    session: str = ""
    processes: tuple[RankProcess, ...] = ()
    input_error: str = ""
    failure: str = ""
    rank: int = -1


def rendezvous(group: Group, record: RendezvousRecord, timeout: float) -> Outcome:
    """Meets the other ranks of `group` in its store, and returns how they continue together.

    The store must be a prefix that belongs to this group. Raises `InputError` on every rank if a record has a fault or terms differ, and
    `PipelineError` on every rank if one does not arrive within `timeout` seconds or the store does not answer.
    """
    with _ONE_AT_A_TIME:
        outcome = _Participant(group, record, timeout).outcome()
    if outcome.input_error:
        raise InputError(outcome.input_error)
    if outcome.failure:
        raise PipelineError(outcome.failure, rank=outcome.rank if outcome.rank >= 0 else None)
    return outcome


class _Participant:
    """One rank's part in a round. A thread of its own calls the store; this rank leaves it behind if the store is silent."""

    newest: ClassVar[_Participant | None] = None
    """The latest attempt of this process. An earlier one whose thread is still blocked on the store must not join a round any more."""

    def __init__(self, group: Group, record: RendezvousRecord, timeout: float) -> None:
        _Participant.newest = self
        self._group = group
        self._store = MeasuredStore(group.store)
        self._record = record
        self._timeout = timeout
        self._longest_silence_s = min(group.timing.silence_s, timeout)
        self._missed = Outcome()
        self._stalls = group.stalls or StallMonitor()
        self._waited_s = 0.0
        self._over = threading.Event()
        self._left = threading.Event()
        self._reason = Outcome()

    def outcome(self) -> Outcome:
        """Joins a round and returns its outcome."""
        try:
            outcome = in_background(self._attend, self._count, stalls=self._stalls)
        except (_SilentError, RuntimeError):
            return self._leave(self._own_stall("the torch.distributed store did not answer") or _without_store(self._group))
        except BaseException as error:  # this process is to end, as by KeyboardInterrupt
            rank = self._group.rank
            self._leave(Outcome(failure=f"rank {rank} failed while meeting the other ranks: {type(error).__name__}", rank=rank))
            self._left.wait(_STAY_S)
            raise
        self._stalls.keep(self._group.timing.answer_s)  # until the ranks have connected: the others may have given up on this one
        return outcome

    def _count(self, seconds: float) -> None:
        """Counts the time waited. Raises `_SilentError` if the store has been silent for too long."""
        self._waited_s += seconds
        self._store.count(seconds)
        if self._waited_s >= self._timeout:
            self._over.set()
        if self._store.silence_s >= self._longest_silence_s:
            raise _SilentError

    def _own_stall(self, event: str, recent_s: float | None = None) -> Outcome | None:
        """Returns that this process has stalled, and the `event` after it: the others may have given up on it and ended.

        Returns None if no stall ended within the last `recent_s`, by default the seconds that ranks wait for an answer.
        """
        seconds = self._stalls.longest(self._group.timing.answer_s if recent_s is None else recent_s)
        if seconds < _STALL_S:
            return None
        rank = self._group.rank
        return Outcome(failure=f"{stalled(rank, seconds)}; then {event}", rank=rank)

    def _was_given_up(self, everybody: Mapping[int, str], missing: Sequence[int]) -> bool:
        """Returns whether the others, some of whose records are `missing`, may have come and found the store of this process silent.

        If one that has arrived is still here, this process did not stall long enough to be given up.
        """
        if self._group.rank != self._group.store_host or self._stalls.longest(math.inf) < self._longest_silence_s:
            return False
        arrived = [rank for rank in everybody if rank not in (*missing, self._group.rank)]
        return all(has_ended(RankProcess(*json.loads(self._store.get(everybody[rank]))[2])) for rank in arrived)

    def _leave(self, reason: Outcome) -> Outcome:
        """Gives up for this reason. The thread publishes it to the others if the store answers again."""
        self._reason = reason
        self._over.set()
        return reason

    def _attend(self) -> Outcome:
        current = self._open_round()
        if _Participant.newest is not self:
            return self._reason  # the store answers again, but this process has begun a later attempt, to which this round belongs
        outcome = self._outcome_of(current)
        self._left.set()
        if not outcome.session:
            self._stay_until_read(current)
        return outcome

    def _outcome_of(self, current: str) -> Outcome:
        everybody = {rank: f"{current}/{rank}" for rank in self._group.ranks}
        self._store.set(everybody[self._group.rank], json.dumps(self._record))
        # Look for a decision first: once one exists, nothing that this rank finds matters any more.
        pause_s = _SHORTEST_S
        while not self._store.check([_decision_key(current)]):
            if self._group.is_first and self._store.check(list(everybody.values())):
                return self._decide(current, self._judge(everybody))
            if (ended := self._ended()) is not None:
                return self._decide(current, ended)
            if self._over.wait(pause_s):
                return self._decide(current, self._give_up(everybody))
            pause_s = min(1.5 * pause_s, _LONGEST_S)
        return self._read(current)

    def _ended(self) -> Outcome | None:
        """Returns the failure of a rank whose process has ended, among the processes that are known; None if all are alive."""
        for rank, process in zip(self._group.ranks, self._group.processes, strict=False):  # none if they are not known
            if has_ended(process):
                gone = f"rank {rank} is gone: its process ended before the ranks had met; see the log there"
                return self._own_stall(gone) or Outcome(failure=gone, rank=rank)
        return None

    def _stay_until_read(self, current: str) -> None:
        """If this process hosts the store, waits until the ranks that arrived have read the decision: the error may end this process."""
        self._store.set(_read_key(current, self._group.rank), "")
        end = time.monotonic() + _STAY_S
        while self._group.rank == self._group.store_host and time.monotonic() < end and self._is_unread(current):
            time.sleep(_LONGEST_S)

    def _is_unread(self, current: str) -> bool:
        ranks = self._group.ranks
        return any(self._store.check([f"{current}/{rank}"]) and not self._store.check([_read_key(current, rank)]) for rank in ranks)

    def _open_round(self) -> str:
        """Returns the undecided round; opens a new one if there is none."""
        current = self._store.compare_set(_ROUND, "", uuid.uuid4().hex).decode()
        while self._store.check([_decision_key(current)]):
            if not self._store.check([f"{current}/{self._group.rank}"]):
                self._missed = self._read(current)
            current = self._store.compare_set(_ROUND, current, uuid.uuid4().hex).decode()
        return str(current)

    def _decide(self, current: str, outcome: Outcome) -> Outcome:
        """Decides the round and returns the decision, which is another rank's if that came first."""
        return _as_outcome(self._store.compare_set(_decision_key(current), "", json.dumps(outcome._asdict())))

    def _read(self, current: str) -> Outcome:
        return _as_outcome(self._store.get(_decision_key(current)))

    def _judge(self, everybody: Mapping[int, str]) -> Outcome:
        """Returns whether all ranks, which have arrived, can continue together."""
        records = {rank: json.loads(self._store.get(key)) for rank, key in everybody.items()}
        faults = faults_of({rank: (fault, terms) for rank, (fault, terms, *_) in records.items()})
        if faults:
            return Outcome(input_error=faults)
        return Outcome(session=uuid.uuid4().hex, processes=tuple(RankProcess(*process) for _, _, process in records.values()))

    def _give_up(self, everybody: Mapping[int, str]) -> Outcome:
        """Returns which rank kept this one waiting until its timeout."""
        if self._reason.failure:
            return self._reason
        missing = [rank for rank, key in everybody.items() if not self._store.check([key])]
        if self._missed.failure and len(missing) == self._group.size - 1:
            return self._missed  # the others had given up before this rank arrived, and did not try again
        if not missing:
            first = self._group.ranks[0]
            silent = f"rank {first} does not answer: it called Pipeline(...) and then was silent"
            return Outcome(failure=f"{silent} for {self._timeout:g} s; see the log there", rank=first)
        late = f"{named('rank', missing)} did not call Pipeline(...) within {self._timeout:g} s"
        if self._was_given_up(everybody, missing) and (stall := self._own_stall(late, math.inf)) is not None:
            return stall
        remedy = "see the log there, or raise `timeout` if it may take that long"
        return Outcome(failure=f"{late}; {remedy}", rank=missing[0] if len(missing) == 1 else -1)


class _SilentError(Exception):
    """The store has been silent for too long."""


def _decision_key(current: str) -> str:
    return f"{current}/decision"


def _read_key(current: str, rank: int) -> str:
    """The key that a rank sets once it has read the decision."""
    return f"{current}/{rank}/read"


def _as_outcome(text: bytes) -> Outcome:
    """Parses an outcome, ignoring fields that another revision may have added."""
    written = json.loads(text)
    outcome = Outcome(**{name: written[name] for name in Outcome._fields if name in written})
    return outcome._replace(processes=tuple(RankProcess(*process) for process in outcome.processes))


def _without_store(group: Group) -> Outcome:
    host = group.store_host
    if host is None:
        return Outcome(failure="the torch.distributed store does not answer: see the log of the process that hosts it")
    return Outcome(failure=host_is_silent(host), rank=host)
