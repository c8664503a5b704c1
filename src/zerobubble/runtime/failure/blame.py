"""Who is to blame when messages stay out: every rank says what it does, and the chain of who waits for whom ends at the culprit."""

from __future__ import annotations

from typing import NamedTuple

from zerobubble.runtime.transport.contact import EVERYBODY, IN_TIME, NOBODY, STARTING


class RankStatus(NamedTuple):
    """What a rank does, such as `waiting for the loss`, the `peer` it waits for, the `reason` why it gave up, if it did, and its pass."""

    doing: str
    peer: int = NOBODY
    reason: str = ""
    op: str = ""


CLOSING = RankStatus("closing the pipeline")
"""What a rank says that has left the others."""


class FailureReport(NamedTuple):
    """Who failed, at which pass or action, and why; `rank` is -1 where no single rank is to blame, `absent` ranks say nothing."""

    rank: int
    op: str
    message: str
    absent: tuple[int, ...] = ()


def diagnose(words: dict[int, RankStatus], size: int, caller: int) -> FailureReport:
    """Who keeps the ranks waiting, by the `words` of those that answered, among them the `caller` who lost contact.

    A rank that says nothing is gone or frozen. If all answer, it is the one at the end of the chain of those who wait. Where the chain
    bites its tail, the ranks make different calls, or the culprit came too late, after another had given it up.
    """
    absent = tuple(rank for rank in range(size) if rank not in words)
    if absent:
        told = next((rank for rank, word in words.items() if word.reason and word.peer in absent), caller)
        named = f"rank {absent[0]} is" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))} are"
        lost = f"rank {told} lost contact{'' if words[told].peer < 0 else f' with rank {words[told].peer}'}"
        remedy = "see the log there: a process that was killed often ran out of memory"
        return FailureReport(
            absent[0], "", f"{named} gone or frozen: {lost} while {words[told].doing} ({words[told].reason}); {remedy}", absent
        )
    culprit = _end_of_chain(words, caller)
    if culprit is None:
        return _circle(words, caller)
    kept = f"rank {caller} gave up {words[caller].doing} ({words[caller].reason})"
    remedy = "; raise `timeout` if it may take that long" if words[caller].reason == IN_TIME else ""
    return FailureReport(
        culprit, words[culprit].op, f"rank {culprit} kept the others waiting: it was {words[culprit].doing} when {kept}{remedy}"
    )


def _circle(words: dict[int, RankStatus], caller: int) -> FailureReport:
    """All wait for each other, or one came when another had given it up, or what is between them broke."""
    gave_up = {rank: word for rank, word in sorted(words.items()) if word.reason == IN_TIME}
    for rank, word in gave_up.items():
        late = words.get(word.peer)
        if late is not None and late.doing == STARTING:
            kept = f"rank {word.peer} kept the others waiting: it came when rank {rank} had given up {word.doing} ({IN_TIME})"
            return FailureReport(word.peer, late.op, f"{kept}; raise `timeout` if it may take that long")
    said = ", ".join(f"rank {rank} was {word.doing}" for rank, word in sorted(words.items()))
    if gave_up:
        remedy = "make the same calls in the same order on every rank, or raise `timeout`"
        return FailureReport(-1, "", f"the ranks wait for each other ({IN_TIME}): {said}; {remedy}")
    remedy = "raise `timeout` if one of them was late, else see whether something between them closes connections"
    return FailureReport(-1, "", f"ranks that live lost contact ({words[caller].reason}): {said}; {remedy}")


def _end_of_chain(words: dict[int, RankStatus], caller: int) -> int | None:
    """The rank that waits for none, followed from `caller`; None where those on the way wait for each other."""
    rank, passed = caller, set[int]()
    while rank not in passed:
        passed.add(rank)
        word = words[rank]
        if word.peer == NOBODY:
            return rank
        elsewhere = [other for other in words if words[other][:2] != word[:2]] if word.peer == EVERYBODY else [word.peer]
        idle = [other for other in elsewhere if words[other].peer == NOBODY]
        rank = (idle or elsewhere or [rank])[0]
    return None
