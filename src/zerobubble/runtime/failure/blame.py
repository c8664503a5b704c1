"""Finds the culprit when messages are missing: every rank reports what it does, and the chain of waiting ranks ends at the culprit.

A wait that times out names only the neighbor, which may itself be waiting. So the diagnosis follows "waits for" from rank to rank, and
checks in this order, from hard evidence to weak:

1. A rank that does not answer. Its process has ended or is frozen, or the network is cut; its silence does not say which.
2. A rank whose process stalled for long: it was late for everything, regardless of what it does now.
3. The rank at the end of the chain, which waits for no rank of this pipeline.
4. If the chain is a circle: the rank that entered its call last, else no single rank. The ranks then make different calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.error_reports.text import describe
from zerobubble.error_reports.user_code import with_place
from zerobubble.runtime.failure.report import FailureReport, RankStatus
from zerobubble.runtime.transport.contact import ELSEWHERE, EVERYBODY, NO_ANSWER, NOBODY, STARTING, TIMED_OUT, stalled
from zerobubble.units import counted, named

CLOSING = RankStatus("closing the pipeline")
"""The status of a rank that has left the pipeline."""
OUTSIDE = RankStatus("outside the pipeline, in user code")
"""The status of a rank between two calls."""


def closing_after(error: BaseException | None) -> RankStatus:
    """Returns the status of a rank that has left the pipeline because its own code has raised `error`, if any."""
    return CLOSING if error is None else CLOSING._replace(reason=with_place(describe(error), error))


_NONE_HERE = (NOBODY, ELSEWHERE)
"""The `peer` of a rank that waits for no rank of this pipeline."""

LONG_STALL_S, STALL_S = 3.0, 1.0
"""A process that recently stalled for this long is to blame for a timeout. The first value applies regardless of the chain, the second if
the chain names no rank."""


def diagnose(statuses: dict[int, RankStatus], ranks: Sequence[int], caller: int) -> FailureReport:
    """Returns which of the `ranks` keeps the others waiting, from the `statuses` of those that answered.

    The `caller` is one of these, and has lost contact.

    The order of the checks is that of the module's docstring. A circle also arises if the culprit arrived late, after another rank had
    stopped waiting for it.
    """
    absent = tuple(rank for rank in ranks if rank not in statuses)
    if absent:
        return _report_absent(statuses, absent, caller)
    culprit = _end_of_chain(statuses, caller)
    stall = _report_stall(statuses, STALL_S if culprit is None else LONG_STALL_S)
    if stall is not None:
        return stall
    if culprit is None:
        return _report_circle(statuses, caller)
    if statuses[culprit].peer == ELSEWHERE:
        return _report_pipelines(statuses, caller)
    gave_up = f"rank {caller} gave up {statuses[caller].doing} ({statuses[caller].reason})"
    doing = statuses[culprit].doing
    left_out = bool(statuses[caller].call) and doing in (CLOSING.doing, OUTSIDE.doing)
    remedies = [f"call `{statuses[caller].call}` on every rank"] if left_out else []
    if statuses[caller].reason == TIMED_OUT:
        remedies.append("raise `timeout` if it may take that long")
    if doing == CLOSING.doing and statuses[culprit].reason:
        doing, remedies = f"{doing} after {statuses[culprit].reason}", []
    remedy = f"; {', or '.join(remedies)}" if remedies else ""
    message = f"rank {culprit} kept the others waiting: it was {doing} when {gave_up}{remedy}"
    return FailureReport(culprit, statuses[culprit].op, message, (culprit,) if doing == CLOSING.doing else ())


def lost_contact(rank: int, status: RankStatus) -> str:
    """Describes how `rank` lost contact."""
    return f"rank {rank} lost contact{'' if status.peer < 0 else f' with rank {status.peer}'} while {status.doing} ({status.reason})"


def process_end_report(ended: Sequence[int], witness: int, status: RankStatus, kills: int) -> FailureReport:
    """Returns the report for ranks whose processes are known to have ended; the first of them is to blame.

    `status` is what the `witness` did then. `kills` is how many processes the OOM killer has ended on that machine since the pipeline was
    created.
    """
    first = ended[0]
    message = f"rank {first} is gone: its process ended while rank {witness} was {status.doing}{_for_memory(kills)}; see the log there"
    return FailureReport(first, "", message, tuple(ended))


def store_host_end_report(rank: int, kills: int) -> FailureReport:
    """Like `process_end_report`, for the rank that hosted the store.

    Every rank makes the same text, because ranks cannot share a report without the store.
    """
    ended = f"its process ended, and with it the torch.distributed store{_for_memory(kills)}"
    return FailureReport(rank, "", f"rank {rank} is gone: {ended}; see the log there")


def _for_memory(kills: int) -> str:
    return f", and the OOM killer has ended {counted(kills, 'process')} on that machine since the pipeline was created" if kills > 0 else ""


def sigterm_report(rank: int, status: RankStatus) -> FailureReport:
    """Returns the report of a `rank` that got SIGTERM while it did what `status` says; no rank need wait for it."""
    return FailureReport(rank, status.op, f"rank {rank} received SIGTERM while it was {status.doing}", (rank,))


def agent_end_report(rank: int, status: RankStatus) -> FailureReport:
    """Returns the report of a `rank` that ends because the torchrun agent that started it has ended."""
    return FailureReport(rank, status.op, f"rank {rank} ends with the torchrun agent that started it; it was {status.doing}", (rank,))


def _report_absent(statuses: dict[int, RankStatus], absent: tuple[int, ...], caller: int) -> FailureReport:
    """Blames those ranks without an answer with which another rank lost contact; if there are none, all ranks without an answer."""
    lost_it = [(rank, status.peer) for rank, status in statuses.items() if status.reason and status.peer in absent]
    witness = lost_it[0][0] if lost_it else caller
    blamed = sorted({peer for _, peer in lost_it}) or absent
    process = "its process is" if len(blamed) == 1 else "each process is"
    message = f"{_named(blamed)} not answer: {lost_contact(witness, statuses[witness])}; {process} {NO_ANSWER}: see the log there"
    others = [rank for rank in absent if rank not in blamed]
    either = f"; {_named(others)} not answer either" if others else ""
    return FailureReport(blamed[0], "", f"{message}{either}", absent)


def _report_stall(statuses: dict[int, RankStatus], seconds: float) -> FailureReport | None:
    """If a rank timed out, blames the rank that recently stalled longest, if for at least `seconds`."""
    gave_up = {rank: status for rank, status in sorted(statuses.items()) if status.reason == TIMED_OUT}
    rank = max(statuses, key=lambda rank: statuses[rank].stalled_s)
    if statuses[rank].stalled_s < seconds or not gave_up:
        return None
    other, status = next(iter(gave_up.items()))
    message = f"{stalled(rank, statuses[rank].stalled_s)}; meanwhile rank {other} gave up {status.doing} ({TIMED_OUT})"
    return FailureReport(rank, statuses[rank].op, message)


def _named(ranks: Sequence[int]) -> str:
    """Returns `rank 1 does` or `ranks 1 and 2 do`."""
    return f"{named('rank', ranks)} {'does' if len(ranks) == 1 else 'do'}"


def _report_circle(statuses: dict[int, RankStatus], caller: int) -> FailureReport:
    """Reports ranks that wait for each other, a rank that arrived after another had given up, or a broken connection between live ranks."""
    gave_up = {rank: status for rank, status in sorted(statuses.items()) if status.reason == TIMED_OUT}
    for rank, status in gave_up.items():
        late = _came_last(statuses, status.peer)
        if late is not None:
            kept = f"rank {late} kept the others waiting: it arrived after rank {rank} had given up {status.doing} ({TIMED_OUT})"
            return FailureReport(late, statuses[late].op, f"{kept}; raise `timeout` if it may take that long")
    doing = ", ".join(f"rank {rank} was {status.doing}" for rank, status in sorted(statuses.items()))
    if gave_up:
        remedy = "make the same calls in the same order on every rank, or raise `timeout`"
        return FailureReport(-1, "", f"the ranks wait for each other ({TIMED_OUT}): {doing}; {remedy}")
    remedy = "raise `timeout` if one of them was late, else check whether the network between them closes connections"
    return FailureReport(-1, "", f"live ranks lost contact ({statuses[caller].reason}): {doing}; {remedy}")


def _came_last(statuses: dict[int, RankStatus], rank: int) -> int | None:
    """Returns the rank that entered its call last, among `rank` and those whose begin it waits for; None if `rank` has begun already."""
    beginning: list[int] = []
    while rank in statuses and rank not in beginning and statuses[rank].doing == STARTING:
        beginning.append(rank)
        rank = statuses[rank].peer
    return min(beginning, key=lambda beginner: statuses[beginner].in_call, default=None)


def _report_pipelines(statuses: dict[int, RankStatus], caller: int) -> FailureReport:
    """Reports ranks that wait for each other in calls of different pipelines."""
    doing = ", ".join(
        f"rank {rank} was {status.doing}{f' in {status.pipeline}' if status.pipeline else ''}" for rank, status in sorted(statuses.items())
    )
    remedy = "call the pipelines in the same order on every rank, or raise `timeout`"
    return FailureReport(-1, "", f"the ranks wait in different pipelines ({statuses[caller].reason}): {doing}; {remedy}")


def _end_of_chain(statuses: dict[int, RankStatus], caller: int) -> int | None:
    """Follows the chain of waiting ranks from `caller` and returns the rank that waits for none of this pipeline; None for a circle.

    A rank in a collective waits for the ranks that are not in it. Of these, a rank that waits for none comes first.
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
