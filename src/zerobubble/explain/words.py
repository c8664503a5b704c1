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
        (account.passes.busy, f"its own passes{_named(own)}"),
        (account.passes.idle, f"waiting for passes of other ranks{_named(others)}"),
        (account.noise.total, f"noise ({_ms(account.noise.busy)} in its own passes)"),
        (account.comm, "messages later than planned"),
        (account.host, "host overhead"),
    ]
    parts = [f"{_ms(time)} {what}" for time, what in sorted(causes, key=lambda cause: -abs(cause[0])) if abs(time) >= SMALLEST]
    idle = f"idle for {_ms(account.idle)} of {_ms(account.total)}, {_ms(account.plan.total)} by the plan ({_plan(account)})"
    done = "lost" if account.extra >= 0 else "won"
    return f"rank {account.rank} {done} {_ms(abs(account.extra))}{': ' * bool(parts)}{', '.join(parts)}; {idle}."


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
