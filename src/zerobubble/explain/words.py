"""A difference between plan and run in words: one sentence on the whole, then one for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerobubble.costs import NS_PER_MS

if TYPE_CHECKING:
    from zerobubble.explain.difference import Account, Difference, Drift

MOST_DRIFTS = 2
"""Kinds of passes that a sentence names."""
SMALLEST = 5_000
"""Shorter times, in ns, would read as 0.00 ms and are left out of the sentences."""


def lines(difference: Difference) -> Iterator[str]:
    """The sentences, largest causes first."""
    more = "longer" if difference.extra >= 0 else "shorter"
    took = f"{_ms(difference.measured)} where the plan says {_ms(difference.planned)}"
    yield f"{difference.name} took {took}, {_ms(abs(difference.extra))} {more}."
    for account in difference.accounts:
        yield _sentence(account, difference)


def _sentence(account: Account, difference: Difference) -> str:
    own = [drift for drift in difference.drifts if account.rank in drift.ranks]
    others = [drift for drift in difference.drifts if account.rank not in drift.ranks]
    causes = [
        (account.passes.busy, f"in its own passes{_named(own)}"),
        (account.passes.idle, f"waiting for passes of other ranks{_named(others)}"),
        (account.noise.busy, "by noise in its own passes"),
        (account.noise.idle, "waiting by noise in passes of other ranks"),
        (account.comm, "waiting for messages"),
        (account.host, "host overhead"),
    ]
    told = [(time, f"{_ms(abs(time))} {'' if time > 0 else 'less '}{what}") for time, what in causes if abs(time) >= SMALLEST]
    told.sort(key=lambda part: -abs(part[0]))
    has_lost = account.extra >= 0
    parts = ", ".join(text for time, text in told if (time > 0) is has_lost)
    against = ", ".join(text for time, text in told if (time > 0) is not has_lost)
    why = ", but ".join(filter(None, (parts, against)))
    idle = f"idle for {_ms(account.idle)} of {_ms(account.total)}, {_ms(account.plan.total)} by the plan ({_plan(account)})"
    return f"rank {account.rank} {'lost' if has_lost else 'won'} {_ms(abs(account.extra))}{': ' * bool(why)}{why}; {idle}."


def _plan(account: Account) -> str:
    parts = [f"{name} {_ms(time)}" for name, time in account.plan._asdict().items() if abs(time) >= SMALLEST]
    return ", ".join(parts) or "none"


def _named(drifts: list[Drift]) -> str:
    """The drifts that cost most, if any is off."""
    most = sorted(drifts, key=lambda drift: -abs(drift.steps * (drift.measured - drift.planned)))[:MOST_DRIFTS]
    told = [str(drift) for drift in most if drift.measured != drift.planned]
    return f" ({', '.join(told)})" if told else ""


def _ms(time: int) -> str:
    return f"{time / NS_PER_MS:,.2f} ms"
