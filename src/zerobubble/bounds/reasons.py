"""Why a bound holds, in words with figures."""

from __future__ import annotations

from zerobubble.bounds.chain import Home, Window
from zerobubble.costs import NS_PER_MS


def tell_wait(home: Home, turn: int, idle: int) -> str:
    """The rank idles before its first pass of a turn and then does the rest of its work."""
    if turn == 0:
        return _work(home) + (f" and cannot begin before {_ms(idle)}" if idle else "")
    return f"{_work(home)} and must {_idle_before(home, turn, idle)}"


def tell_waits(home: Home, window: Window, first: int, last: int) -> str:
    """The rank idles before its first pass of one turn and after its last pass of another, all inside `window`."""
    load, end = home.load, window.ends[home.places[last]]
    before = home.starts[first] - window.start - load.before[first]
    after = end - home.starts[last] - load.turns[last] - load.after[last]
    if load.work < load.before[first] + load.after[last] + load.turns[last]:
        there, back = home.starts[first] - window.start, end - home.starts[last]
        return f"a microbatch takes {_ms(there)} to {_name(home, first)} and from {_name(home, last)} on {_ms(back)}"
    parts = [_idle_before(home, first, before)] * (before != 0) + [_idle_after(home, last, after)] * (after != 0)
    return f"{_work(home)} and{_within(home, window)} must {', and '.join(parts)}"


def _within(home: Home, window: Window) -> str:
    if window.rank is None:
        return " within the makespan"
    return f" within the span of rank {window.rank}" if window.rank != home.rank else ""


def tell_room(home: Home, turn: int, between: int) -> str:
    """The forwards of a turn wait for room."""
    fit = home.load.limit // home.load.during(turn)
    first = f"rank {home.rank} needs {_ms(between)} from its first {_name(home, turn)} to its last"
    return f"{first}, because its memory holds only {fit} of these at a time until their B"


def tell_area(home: Home, time: int) -> str:
    """Memory is full for so long."""
    return f"the microbatches of rank {home.rank} fill its memory for {_ms(time)}, even if each is held no longer than it would be alone"


def _work(home: Home) -> str:
    return f"rank {home.rank} has {_ms(home.load.work)} of work"


def _idle_before(home: Home, turn: int, idle: int) -> str:
    if turn == 0:
        return f"wait {_ms(idle)} before it begins"
    if idle < 0:
        return f"do no more than {_ms(-idle)} of it before"
    return f"idle {_ms(idle)} before its first {_name(home, turn)}, because {_fit(home, turn)}"


def _idle_after(home: Home, turn: int, idle: int) -> str:
    if idle < 0:
        return f"leave no more than {_ms(-idle)} of it until later"
    return f"idle {_ms(idle)} after its last {_name(home, turn)} begins, because only {_ms(home.load.after[turn])} of work can be left then"


def _fit(home: Home, turn: int) -> str:
    load = home.load
    forwards = load.limit // min(load.saved) if min(load.saved) else load.microbatches * load.num_stages
    if turn == load.num_stages and forwards < load.microbatches * load.num_stages:
        return f"only {forwards} of its forwards fit in memory"
    return f"only {_ms(load.before[turn])} of work can come before it"


def _name(home: Home, turn: int) -> str:
    return f"{home.passes[turn].kind} of stage {home.passes[turn].stage}"


def _ms(time: int) -> str:
    return f"{time / NS_PER_MS:.6g} ms"
