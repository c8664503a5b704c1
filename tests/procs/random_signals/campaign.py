"""Many cases, several worlds at a time, for they mostly wait; every row is printed as soon as it is complete.

A case in which only the machine was at fault is played again. After `MOST_PLAYS` its faults count: none is let pass unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

from tests.procs.random_signals.case import Case
from tests.procs.random_signals.judge import Load, Row, judged
from tests.procs.random_signals.world import Evidence, play, warm_up

MOST_PLAYS = 3


def play_all(cases: Sequence[Case], at_once: int, heard: Callable[[Row], object]) -> list[Row]:
    """The rows of all cases, in their order; `heard` gets each when it is there. Cases under way at an interruption are printed."""
    warm_up()
    load, durations = Load(), Durations()
    under_way: set[int] = set()

    def row(case: Case) -> Row:
        under_way.add(case.seed)
        for _ in range(MOST_PLAYS - 1):
            found = once(case)
            if found.faults or not found.outside:
                break
            heard(found)
        else:
            found = once(case)
            always = (f"in each of {MOST_PLAYS} plays: {fault}" for fault in found.outside)
            found = replace(found, faults=(*found.faults, *always), outside=())
        under_way.discard(case.seed)
        heard(found)
        return found

    def once(case: Case) -> Row:
        evidence = play(case, durations.of(case.calls[case.call]) * case.within)
        if any("EADDRINUSE" in log for log in evidence.logs):  # somebody has taken the port that was free before
            evidence = play(case, durations.of(case.calls[case.call]) * case.within)
        durations.learn(case, evidence)
        return judged(case, evidence, load)

    pool = ThreadPoolExecutor(at_once)
    try:
        return list(pool.map(row, cases))
    except BaseException:
        print(f"stopped with these seeds under way: {sorted(under_way)}", flush=True)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        load.close()


class Durations:
    """About how long each call takes now, in seconds: the mean over the last ranks that made it, each half as much as the one after."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def of(self, call: str) -> float:
        """What `call` takes, or a guess before one has been seen."""
        return self._seen.get(call, 0.2)

    def learn(self, case: Case, evidence: Evidence) -> None:
        """Look at the calls that came to an end before the deed."""
        for entries in evidence.diaries:
            for begin, end in pairwise(entry for entry in entries if entry.what in ("begin", "end")):
                if end.what == "end" and (evidence.deed is None or end.time < evidence.deed):
                    name = case.calls[end.call]
                    self._seen[name] = (self._seen.get(name, end.time - begin.time) + end.time - begin.time) / 2


def summary(rows: Sequence[Row]) -> str:
    """How many cases have which kind of fault."""
    kinds = {
        "hangs": "hang",
        "late reports": "got the report after",
        "wrong culprit": "blames",
        "unequal texts": "unequal",
        "wrong numbers": "has the loss",
    }
    counts = {name: sum(any(words in fault for fault in row.faults) for row in rows) for name, words in kinds.items()}
    others = sum(any(not any(words in fault for words in kinds.values()) for fault in row.faults) for row in rows)
    done = sum(row.moment != "the deed was never done" for row in rows)
    slowest = Counter({deed: max(row.seconds for row in rows if row.case.deed == deed) for deed in {row.case.deed for row in rows}})
    times = ", ".join(f"{deed} {seconds:.1f} s" for deed, seconds in slowest.most_common())
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    wrong = sum(bool(row.faults) for row in rows)
    gone_on = sum(row.case.survives and row.blamed is None and row.moment != "the deed was never done" for row in rows)
    fates = f"{len(rows)} cases, {done} with a deed, {gone_on} survived"
    return f"{fates}: {wrong} wrong: {listed}, {others} other faults; latest report after: {times}"
