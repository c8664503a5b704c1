"""Explains bounds, with figures.

`here` has the passes of one rank; its visits are defined in `rank_load`.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from zerobubble.bounds.chain import BoundedTime, RankPasses
from zerobubble.bounds.microbatch_starts import MEMORY, TRANSIT, WORK, MicrobatchStarts
from zerobubble.bounds.one_machine import Busy
from zerobubble.units import named, show_ms

FUSED = "counting W only as the time that a BW takes beyond its B"
"""Appended to reasons if a BW takes less than B and W (`Costs.fused`), so that W counts as less than its time."""

HIDDEN = "leaving out all the time that overlapped passes can hide"
"""Appended to reasons if `Costs.hidden` is set: their figures are less than the times of passes."""


def work_reason(rank: int, work: int, begin: int) -> str:
    """The rank does all its work after the time at which it can begin."""
    return f"rank {rank} has {show_ms(work)} of work" + (f" and cannot begin before {show_ms(begin)}" if begin else "")


def head_reason(here: RankPasses, visit: int, idle: int) -> str:
    """The rank idles before its first pass of a visit and then does the rest of its work."""
    if visit == 0:
        return _work(here) + (f" and cannot begin before {show_ms(idle)}" if idle else "")
    return f"{_work(here)} and must {_idle_before(here, visit, idle)}"


def head_and_tail_reason(here: RankPasses, window: BoundedTime, first: int, last: int) -> str:
    """The rank idles before its first pass of one visit and after its last pass of another, all inside `window`."""
    load, end = here.load, window.ends[here.places[last]]
    before = here.starts[first] - window.start - load.before[first]
    after = end - here.starts[last] - load.pass_times[last] - load.after[last]
    if load.work < load.before[first] + load.after[last] + load.pass_times[last]:
        out, back = here.starts[first] - window.start, end - here.starts[last]
        return f"a microbatch needs {show_ms(out)} until {_name(here, first)} can start, and {show_ms(back)} from {_name(here, last)} on"
    waits = [_idle_before(here, first, before)] * (before > 0) + [_idle_after(here, last, after)] * (after > 0)
    outside = [(side, -idle) for side, idle in (("before", before), ("after", after)) if idle < 0]
    period = "the makespan" if window.rank is None else f"the span of rank {window.rank}"
    within = "" if window.rank == here.rank else f" within {period}"
    must = f" and{within} must {', and '.join(waits)}" if waits else ""
    return "; ".join(
        [f"{_work(here)}{must}", *(f"at most {show_ms(time)} of that work can come {side} {period}" for side, time in outside)]
    )


def first_backward_reason(here: RankPasses, window: BoundedTime, most: int) -> str:
    """Before its first B a rank can do little work that does not cost an R later."""
    first = here.load.num_stages
    head = f"its first {_name(here, first)} cannot start before {show_ms(here.starts[first] - window.start)}"
    within = "" if window.rank in (None, here.rank) else f" within the span of rank {window.rank}"
    gain = f"the forwards that fit in memory until then do at most {show_ms(most)} of this work, net of the R's that they need later"
    return f"{_work(here)} without R;{within} {head}, and {gain}"


def memory_wait_reason(here: RankPasses, visit: int, between: int) -> str:
    """The forwards of one visit wait for memory."""
    fit = here.load.limit // here.load.held_during(visit)
    first = f"rank {here.rank} needs {show_ms(between)} from its first {_name(here, visit)} to its last"
    return f"{first}, because its memory holds the activations of only {fit} of these until their B"


def starts_reason(starts: MicrobatchStarts, rank: int, visit: int | None, until_end: int, event: str) -> str:
    """The times of the critical path add up to the bound."""
    times, ranks = Counter({TRANSIT: until_end}), defaultdict[str, set[int]](set)
    for cause in starts.critical_path(rank, visit):
        times[cause.reason] += cause.time
        ranks[cause.reason].add(cause.rank)
    parts = [f"{show_ms(times[TRANSIT])} for microbatches to pass through the stages"]
    for what, words in ((WORK, "of work in between on"), (MEMORY, "for B and W that free memory on")):
        if ranks[what]:
            parts.append(f"{show_ms(times[what])} {words} {named('rank', sorted(ranks[what]))}")
    return f"the critical path until {event} takes {', and '.join(parts)}"


def busy_reason(busy: Busy, event: str) -> str:
    """Passes of one rank cannot start early, and something follows each of them."""
    work = f"rank {busy.rank} has {show_ms(busy.work)} of passes that cannot start before {show_ms(busy.start)}"
    return f"{work}, and each must end at least {show_ms(busy.after)} before {event}" if busy.after else work


def full_memory_reason(here: RankPasses, time: int) -> str:
    """The memory of a rank is full for this long."""
    alone = "even if each microbatch is held only as long as if it were alone"
    return f"the memory of rank {here.rank} is full for {show_ms(time)}, {alone}"


def _work(here: RankPasses) -> str:
    return f"rank {here.rank} has {show_ms(here.load.work)} of work"


def _idle_before(here: RankPasses, visit: int, idle: int) -> str:
    if visit == 0:
        return f"wait {show_ms(idle)} before it begins"
    return f"idle {show_ms(idle)} before its first {_name(here, visit)}, because {_fit(here, visit)}"


def _idle_after(here: RankPasses, visit: int, idle: int) -> str:
    left = f"only {show_ms(here.load.after[visit])} of work can be left then"
    return f"idle {show_ms(idle)} after its last {_name(here, visit)} begins, because {left}"


def _fit(here: RankPasses, visit: int) -> str:
    load = here.load
    forwards = load.limit // min(load.saved) if min(load.saved) else load.microbatches * load.num_stages
    if visit == load.num_stages and forwards < load.microbatches * load.num_stages:
        return f"only {forwards} of its forwards fit in memory"
    return f"only {show_ms(load.before[visit])} of work can come before it"


def _name(here: RankPasses, visit: int) -> str:
    return f"{here.passes[visit].kind} of stage {here.passes[visit].stage}"
