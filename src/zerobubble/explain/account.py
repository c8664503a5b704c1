"""How a run differs from its plan, rank by rank: where the time of each rank went, in ns and in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from zerobubble.costs import NS_PER_MS
from zerobubble.display import Displayed
from zerobubble.explain.idle import Causes
from zerobubble.kinds import Kind
from zerobubble.units import counted, show_ms

LEAST = 200
"""A difference of less than one part in `LEAST` of the plan's makespan is none."""
FACTOR = 2
"""Messages that take this many times as long as planned, or as little, do not fit the plan."""

Passes = tuple[tuple[Kind, int], ...]
"""The passes of a step, as (kind, stage): one pass, or two overlapped."""


PARTS = (
    "work",
    "dependency",
    "comm",
    "imbalance",
    "memory",
    "reduction",
    "own passes",
    "others' passes",
    "noise, busy",
    "noise, idle",
    "messages",
    "host",
    "copies",
    "replicas",
)
"""The titles of the parts of an account: the plan's work and its idle time by cause, then the deviations from the plan."""


class ExtraTime(NamedTuple):
    """Time in ns that a rank spends more than planned.

    Attributes:
        busy: In its own passes.
        idle: Because others keep it waiting.
    """

    busy: int
    idle: int

    @property
    def total(self) -> int:
        """The sum of both, in ns."""
        return self.busy + self.idle


@dataclass(frozen=True, slots=True, repr=False)
class Account(Displayed):
    """Where one rank's time went, in ns: `total`, the sum of all, is the makespan of the run.

    The fields after `plan` are differences from the plan, and may be negative.

    Attributes:
        rank: The rank.
        work: The planned time of its passes.
        plan: The idle time of the plan by cause.
        passes: How much longer passes take in the median.
        noise: Deviations from that median.
        comm: Waits for messages that arrive later than planned.
        host: Time in which the rank had all it needed and yet did not start.
        copies: Waits for copies to the host and back.
        reduction: How much later sums over replicas end.
    """

    rank: int
    work: int
    plan: Causes
    passes: ExtraTime
    noise: ExtraTime
    comm: int
    host: int
    copies: int
    reduction: int

    def _summary(self) -> str:
        planned = f"works {show_ms(self.work)} and idles {show_ms(self.plan.total)} as planned"
        return f"of rank {self.rank}: {planned}, {show_ms(self.extra)} beyond the plan"

    def _details(self) -> Iterator[str]:
        for name, time in zip(PARTS, self.parts(), strict=True):
            yield f"{name}: {show_ms(time)}"

    @property
    def extra(self) -> int:
        """The time of the run in excess of the plan."""
        return self.passes.total + self.noise.total + self.comm + self.host + self.copies + self.reduction

    @property
    def idle(self) -> int:
        """The rank's idle time in the run."""
        return self.plan.total + self.passes.idle + self.noise.idle + self.comm + self.host + self.copies + self.reduction

    @property
    def total(self) -> int:
        """The sum of all, in ns: the makespan of the run."""
        return self.work + self.plan.total + self.extra

    def parts(self) -> tuple[int, ...]:
        """The summands of `total`, in the order of `PARTS`."""
        return (self.work, *self.plan, *self.passes, *self.noise, self.comm, self.host, self.copies, self.reduction)


class Drift(NamedTuple):
    """Passes of one kind and stage whose measured time differs from the plan.

    Attributes:
        passes: The kind and stage; `name` is their text, such as "B of stage 1".
        ranks: The ranks that run them.
        steps: How often they run.
        planned: Their planned time in ns.
        measured: Their measured time in ns, in the median.
        makespan: How much longer the plan's makespan is with that time than without it in ns, after the drifts before this one.
    """

    passes: Passes
    ranks: tuple[int, ...]
    steps: int
    planned: int
    measured: int
    makespan: int

    @property
    def is_off(self) -> bool:
        """Whether the measured time is half a percent or more off the planned one."""
        return 200 * abs(self.measured - self.planned) >= max(1, self.planned)

    @property
    def name(self) -> str:
        """The passes, such as `B of stage 1`."""
        return " with ".join(f"{kind} of stage {stage}" for kind, stage in self.passes)

    @property
    def change(self) -> str:
        """The measured time, and the planned one if it differs, such as `3 ms instead of 2 ms (1.50x)`."""
        taken, planned = show_ms(self.measured), show_ms(self.planned)
        if self.measured == self.planned:
            return f"{planned} as planned"
        ratio = f" ({self.measured / self.planned:.2f}x)" if self.planned else ""
        return f"{taken} instead of {planned}{ratio}"

    def __str__(self) -> str:
        return f"{self.name} {self.change}"


class Cause(NamedTuple):
    """The main cause of a difference.

    Attributes:
        part: The part of the accounts: "passes", "noise", "messages", "host", "copies" or "replicas".
        time: What it adds to the makespan, in ns.
        rank: The rank where it lies.
        text: A sentence.
    """

    part: str
    time: int
    rank: int
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Displayed):
    """A run of the schedule `name` against its plan: the makespans in ns, an account per rank, the drifts by stage, and the main cause.

    As text, it lists the ranks.

    Attributes:
        name: The name of the schedule.
        planned: The planned makespan in ns.
        measured: The measured makespan in ns.
        accounts: Where the time of each rank went.
        drifts: The differences of pass times by stage. Their `makespan` add up to `passes.total`, which is the same on every rank.
        cause: The main cause; None if the run is as long as planned.
        messages: The mean time of a message in ns, planned and measured; None if ranks exchange none.
    """

    name: str
    planned: int
    measured: int
    accounts: tuple[Account, ...]
    drifts: tuple[Drift, ...]
    cause: Cause | None = None
    messages: tuple[int, int] | None = None

    @property
    def extra(self) -> int:
        """The time of the run in excess of the plan, in ns."""
        return self.measured - self.planned

    def _summary(self) -> str:
        sign = "more" if self.extra >= 0 else "less"
        text = f"measured {show_ms(self.measured)}, {show_ms(abs(self.extra))} {sign} than planned"
        return f"{self.name}: {text}, {counted(len(self.accounts), 'rank')}"

    def __str__(self) -> str:
        lines = [self.outcome]
        for idle, causes in self.by_rank():
            lines += [idle, *(f"  {time} {cause}" for time, cause in causes)]
        return "\n".join(lines)

    @property
    def outcome(self) -> str:
        """How long the run took, how much longer or shorter than planned, mainly why, and whether the plan's messages fit the run."""
        more = "longer" if self.extra >= 0 else "shorter"
        took = f"{self.name} took {_ms(self.measured)}, {_ms(abs(self.extra))} {more} than the planned {_ms(self.planned)}."
        why = "" if self.cause is None else f" Mainly ({self.cause.time / NS_PER_MS:+,.2f} ms): {self.cause.text}."
        return f"{took}{why}{self._wrong_messages()}"

    def _wrong_messages(self) -> str:
        """Return a sentence if messages are off by a factor that matters in a step, and the cause does not say so.

        If the host costs more than they do, the sentence names it, since messages of another profile would not change that.
        """
        planned, measured = self.messages or (0, 0)
        least, most = sorted((planned, measured))
        if most < FACTOR * least or LEAST * (most - least) < self.planned or (self.cause and self.cause.part == "messages"):
            return ""
        taken = f"take {show_ms(measured)} on average, planned were {show_ms(planned)}"
        first = self.accounts[0]  # changes of the makespan are the same for every rank
        if first.host > abs(first.comm):
            text = f" Passes that have all they need also start late ({_ms(first.host)}), which costs more than messages: they {taken}."
            return "" if self.cause and self.cause.part == "host" else text
        return f" The plan does not fit the run: messages {taken}. Measure again with `Pipeline.profile` and plan with these costs."

    def by_rank(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """For each rank, its idle time in one line, and the causes of the difference, the largest first: signed time and cause."""
        for account in self.accounts:
            yield _idle(account), _causes(account, self.drifts)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, in ns."""
        return {
            "format": "zerobubble difference 1",
            "name": self.name,
            "planned": self.planned,
            "measured": self.measured,
            "ranks": [_account_to_dict(account) for account in self.accounts],
            "drifts": [
                drift._asdict() | {"passes": [[str(kind), stage] for kind, stage in drift.passes], "ranks": list(drift.ranks)}
                for drift in self.drifts
            ],
            "cause": None if self.cause is None else self.cause._asdict(),
            "messages": self.messages and list(self.messages),
        }


def _account_to_dict(account: Account) -> dict[str, Any]:
    columns = {column.name: getattr(account, column.name) for column in fields(account)}
    return {name: value if isinstance(value, int) else value._asdict() for name, value in columns.items()} | {"total": account.total}


_MOST_DRIFTS = 2
"""The most drifts that a cause names."""
_SHORTEST = 5_000
"""Shorter times, in ns, would read as 0.00 ms and are left out."""


def _causes(account: Account, drifts: Sequence[Drift]) -> list[tuple[str, str]]:
    here = [drift for drift in drifts if account.rank in drift.ranks]
    others = [drift for drift in drifts if account.rank not in drift.ranks]
    causes = [
        (account.passes.busy, f"in its own passes{_named(here)}"),
        (account.passes.idle, f"waiting for passes of other ranks{_named(others)}"),
        (account.noise.busy, "noise in its own passes"),
        (account.noise.idle, "waiting because of noise in passes of other ranks"),
        (account.comm, "waiting for messages"),
        (account.host, "host overhead"),
        (account.copies, "waiting for copies to the host and back"),
        (account.reduction, "summing gradients over replicas"),
    ]
    causes = sorted((cause for cause in causes if abs(cause[0]) >= _SHORTEST), key=lambda cause: -abs(cause[0]))
    return [(f"{time / NS_PER_MS:+,.2f} ms", what) for time, what in causes]


def _idle(account: Account) -> str:
    return f"rank {account.rank}: idle for {_ms(account.idle)}, of which {_ms(account.plan.total)} as planned ({_plan(account)})"


def _plan(account: Account) -> str:
    parts = [f"{name} {_ms(time)}" for name, time in account.plan._asdict().items() if abs(time) >= _SHORTEST]
    return ", ".join(parts) or "none"


def _named(drifts: list[Drift]) -> str:
    """The costliest drifts, of at least half a percent."""
    most = sorted(drifts, key=lambda drift: -abs(drift.steps * (drift.measured - drift.planned)))[:_MOST_DRIFTS]
    listed = [str(drift) for drift in most if drift.is_off]
    return f": {', '.join(listed)}" if listed else ""


def _ms(time: int) -> str:
    return f"{time / NS_PER_MS:,.2f} ms"
