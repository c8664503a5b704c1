"""Who is to blame when messages stay out: every rank says what it does, and the chain of who waits for whom ends at the culprit.

A rank that does not answer may be gone, frozen or behind a network that is cut: from its silence nobody can tell which.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.runtime.failure.report import FailureReport, RankStatus
from zerobubble.runtime.transport.contact import ELSEWHERE, EVERYBODY, IN_TIME, NO_ANSWER, NOBODY, STARTING, stood_still

CLOSING = RankStatus("closing the pipeline")
"""The status of a rank that has left the others."""

_NONE_HERE = (NOBODY, ELSEWHERE)
"""The `peer` of a rank that waits for none of this pipeline."""

LONG_STANDSTILL_S, STANDSTILL_S = 3.0, 1.0
"""A process that has just stood still for so long is to blame for what did not come in time: the first whoever waits for whom, the second
where otherwise nobody is."""


def diagnose(statuses: dict[int, RankStatus], size: int, caller: int) -> FailureReport:
    """Who keeps the ranks waiting, by the statuses of those that answered, among them the `caller` who lost contact.

    A rank that does not answer comes first, then one whose process has just stood still. Otherwise the culprit is at the end of the chain
    of those who wait. Where the chain leads back to a rank on it, the ranks make different calls, or the culprit came too late, after
    another had given it up.
    """
    absent = tuple(rank for rank in range(size) if rank not in statuses)
    if absent:
        return _report_absent(statuses, absent, caller)
    culprit = _end_of_chain(statuses, caller)
    still = _stood_still(statuses, STANDSTILL_S if culprit is None else LONG_STANDSTILL_S)
    if still is not None:
        return still
    if culprit is None:
        return _report_circle(statuses, caller)
    if statuses[culprit].peer == ELSEWHERE:
        return _report_pipelines(statuses, caller)
    gave_up = f"rank {caller} gave up {statuses[caller].doing} ({statuses[caller].reason})"
    remedy = "; raise `timeout` if it may take that long" if statuses[caller].reason == IN_TIME else ""
    message = f"rank {culprit} kept the others waiting: it was {statuses[culprit].doing} when {gave_up}{remedy}"
    return FailureReport(culprit, statuses[culprit].op, message)


def lost_contact(rank: int, status: RankStatus) -> str:
    """How `rank` lost contact, in words."""
    return f"rank {rank} lost contact{'' if status.peer < 0 else f' with rank {status.peer}'} while {status.doing} ({status.reason})"


def report_ended(ended: Sequence[int], witness: int, status: RankStatus, kills: int) -> FailureReport:
    """The processes of these ranks are known to have ended, the first is to blame: no answers are needed.

    `status` is what the `witness` did then, and
    `kills` processes were ended on their machine for want of memory since the pipeline was made.
    """
    first = ended[0]
    message = f"rank {first} is gone: its process ended while rank {witness} was {status.doing}{_for_memory(kills)}; see the log there"
    return FailureReport(first, "", message, tuple(ended))


def report_ended_with_store(rank: int, kills: int) -> FailureReport:
    """As `report_ended`, of the rank whose process held the store: the same words on every rank, which cannot tell each other any."""
    ended = f"its process ended, and with it the store of torch.distributed{_for_memory(kills)}"
    return FailureReport(rank, "", f"rank {rank} is gone: {ended}; see the log there")


def _for_memory(kills: int) -> str:
    processes = "1 process" if kills == 1 else f"{kills} processes"
    return f", and the system has ended {processes} on that machine for want of memory since the pipeline was made" if kills > 0 else ""


def report_told_to_end(rank: int, status: RankStatus) -> FailureReport:
    """`rank` was told to end from outside, while it did what `status` says; nobody need wait for it."""
    return FailureReport(rank, status.op, f"rank {rank} was told to end by SIGTERM while it was {status.doing}", (rank,))


def report_without_agent(rank: int, status: RankStatus) -> FailureReport:
    """`rank` ends while it does what `status` says, because the agent of torchrun that started it has ended."""
    return FailureReport(rank, status.op, f"rank {rank} ends with the agent of torchrun that started it; it was {status.doing}", (rank,))


def _report_absent(statuses: dict[int, RankStatus], absent: tuple[int, ...], caller: int) -> FailureReport:
    """Of the ranks that do not answer, one with which another lost contact is to blame; else all of them."""
    lost_it = [(rank, status.peer) for rank, status in statuses.items() if status.reason and status.peer in absent]
    witness = lost_it[0][0] if lost_it else caller
    blamed = sorted({peer for _, peer in lost_it}) or absent
    process = "its process is" if len(blamed) == 1 else "each process is"
    message = f"{_named(blamed)} not answer: {lost_contact(witness, statuses[witness])}; {process} {NO_ANSWER}: see the log there"
    others = [rank for rank in absent if rank not in blamed]
    either = f"; {_named(others)} not answer either" if others else ""
    return FailureReport(blamed[0], "", f"{message}{either}", absent)


def _stood_still(statuses: dict[int, RankStatus], seconds: float) -> FailureReport | None:
    """Where a rank gave up because nothing came in time, the one that has just stood still for longest, if for at least `seconds`."""
    gave_up = {rank: status for rank, status in sorted(statuses.items()) if status.reason == IN_TIME}
    rank = max(statuses, key=lambda rank: statuses[rank].stood_still)
    if statuses[rank].stood_still < seconds or not gave_up:
        return None
    other, status = next(iter(gave_up.items()))
    message = f"{stood_still(rank, statuses[rank].stood_still)}; meanwhile rank {other} gave up {status.doing} ({IN_TIME})"
    return FailureReport(rank, statuses[rank].op, message)


def _named(ranks: Sequence[int]) -> str:
    """`rank 1 does` or `ranks 1, 2 do`."""
    return f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} do"


def _report_circle(statuses: dict[int, RankStatus], caller: int) -> FailureReport:
    """All wait for each other, or one came when another had given it up, or what is between them broke."""
    gave_up = {rank: status for rank, status in sorted(statuses.items()) if status.reason == IN_TIME}
    for rank, status in gave_up.items():
        late = _came_last(statuses, status.peer)
        if late is not None:
            kept = f"rank {late} kept the others waiting: it came when rank {rank} had given up {status.doing} ({IN_TIME})"
            return FailureReport(late, statuses[late].op, f"{kept}; raise `timeout` if it may take that long")
    said = ", ".join(f"rank {rank} was {status.doing}" for rank, status in sorted(statuses.items()))
    if gave_up:
        remedy = "make the same calls in the same order on every rank, or raise `timeout`"
        return FailureReport(-1, "", f"the ranks wait for each other ({IN_TIME}): {said}; {remedy}")
    remedy = "raise `timeout` if one of them was late, else see whether something between them closes connections"
    return FailureReport(-1, "", f"ranks that live lost contact ({statuses[caller].reason}): {said}; {remedy}")


def _came_last(statuses: dict[int, RankStatus], rank: int) -> int | None:
    """Of `rank` and those that it and they wait for to begin, who entered the call last; None where `rank` has begun already."""
    beginning: list[int] = []
    while rank in statuses and rank not in beginning and statuses[rank].doing == STARTING:
        beginning.append(rank)
        rank = statuses[rank].peer
    return min(beginning, key=lambda beginner: statuses[beginner].in_call, default=None)


def _report_pipelines(statuses: dict[int, RankStatus], caller: int) -> FailureReport:
    """Ranks wait for each other in calls of different pipelines."""
    said = ", ".join(
        f"rank {rank} was {status.doing}{f' in {status.pipeline}' if status.pipeline else ''}" for rank, status in sorted(statuses.items())
    )
    remedy = "call the pipelines in the same order on every rank, or raise `timeout`"
    return FailureReport(-1, "", f"the ranks wait in different pipelines ({statuses[caller].reason}): {said}; {remedy}")


def _end_of_chain(statuses: dict[int, RankStatus], caller: int) -> int | None:
    """The rank that waits for none of this pipeline, followed from `caller`; None where those on the way wait for each other.

    A rank in a collective waits for those that are in none, or in another, and of these first for one that waits for none.
    """
    rank = caller
    passed: set[int] = set()
    while rank not in passed:
        passed.add(rank)
        status = statuses[rank]
        if status.peer in _NONE_HERE:
            return rank
        waits_for = [status.peer]
        if status.peer == EVERYBODY:
            waits_for = [other for other in status.among or statuses if statuses[other][:2] != status[:2]]
        waiting_for_none = [other for peer in _NONE_HERE for other in waits_for if statuses[other].peer == peer]
        rank = (waiting_for_none or waits_for or [rank])[0]
    return None
