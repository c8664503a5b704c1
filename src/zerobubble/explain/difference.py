"""A run held against its plan: what the plan did not know, cause by cause, adding up to the ns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_low
from typing import Any, NamedTuple

from zerobubble.arguments import takes
from zerobubble.costs import Costs
from zerobubble.display import Displayed
from zerobubble.explain.idle import Causes, attribute
from zerobubble.explain.replay import TimedOrder, measured, planned
from zerobubble.explain.words import lines
from zerobubble.ir import Kind, Schedule
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_ms

Passes = tuple[tuple[Kind, int], ...]
"""What a step consists of, as (kind, stage): one pass, or two overlapped."""


PARTS = (
    "work",
    "dependency",
    "comm",
    "imbalance",
    "memory",
    "own passes",
    "others' passes",
    "noise, busy",
    "noise, idle",
    "messages",
    "host",
)
"""What an account adds up, as titles: the plan's work and its idle time by cause, then what the plan did not know."""


class Part(NamedTuple):
    """Time in ns that a rank spends more than planned: `busy` in its own passes, `idle` because others keep it waiting."""

    busy: int
    idle: int

    @property
    def total(self) -> int:
        return self.busy + self.idle


@dataclass(frozen=True, slots=True, repr=False)
class Account(Displayed):
    """Where one rank's time went, in ns: `total`, the sum of all, is the makespan of the run.

    `work` are its passes as planned, `plan` the idle time of the plan by its causes. The rest the plan did not know, and may be
    negative: `passes` that take longer by the median, `noise` of single ones around it, `comm` for messages later than planned,
    `host` for the time in which a rank had all it needed and yet did not start.
    """

    rank: int
    work: int
    plan: Causes
    passes: Part
    noise: Part
    comm: int
    host: int

    def _summary(self) -> str:
        planned = f"works {show_ms(self.work)} and idles {show_ms(self.plan.total)} as planned"
        return f"of rank {self.rank}: {planned}, {show_ms(self.extra)} beyond the plan"

    def _details(self) -> Iterator[str]:
        for name, time in zip(PARTS, self.parts(), strict=True):
            yield f"{name}: {show_ms(time)}"

    @property
    def extra(self) -> int:
        """What the run took beyond the plan."""
        return self.passes.total + self.noise.total + self.comm + self.host

    @property
    def idle(self) -> int:
        """The rank's idle time in the run."""
        return self.plan.total + self.passes.idle + self.noise.idle + self.comm + self.host

    @property
    def total(self) -> int:
        return self.work + self.plan.total + self.extra

    def parts(self) -> tuple[int, ...]:
        """The summands of `total`, in the order of `PARTS`."""
        return (self.work, *self.plan, *self.passes, *self.noise, self.comm, self.host)


class Drift(NamedTuple):
    """The `steps` steps of `passes` on `ranks` take a median of `measured` ns where the plan says `planned`.

    Exchanging the plan's time for it makes the makespan `makespan` ns longer.
    """

    passes: Passes
    ranks: tuple[int, ...]
    steps: int
    planned: int
    measured: int
    makespan: int

    def __str__(self) -> str:
        name = " with ".join(f"{kind} of stage {stage}" for kind, stage in self.passes)
        if not self.planned:
            return f"{name} was planned to take no time"
        return f"{name} takes {self.measured / self.planned:.2f}x what the plan says"


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Displayed):
    """A run of the schedule `name` against its plan: the makespans in ns, an account per rank, and the drifts, stage by stage.

    The `makespan` of the drifts add up to what `passes` cost every rank. As text, it is told rank by rank.
    """

    name: str
    planned: int
    measured: int
    accounts: tuple[Account, ...]
    drifts: tuple[Drift, ...]

    @property
    def extra(self) -> int:
        """What the run took beyond the plan, in ns."""
        return self.measured - self.planned

    def _summary(self) -> str:
        sign = "more" if self.extra >= 0 else "less"
        told = f"measured {show_ms(self.measured)}, {show_ms(abs(self.extra))} {sign} than planned"
        return f"{self.name}: {told}, {counted(len(self.accounts), 'rank')}"

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, in ns."""
        return {
            "format": "zerobubble difference 1",
            "name": self.name,
            "planned": self.planned,
            "measured": self.measured,
            "ranks": [_account_to_dict(account) for account in self.accounts],
            "drifts": [_drift_to_dict(drift) for drift in self.drifts],
        }


@takes(schedule=Schedule, costs=Costs, run=Timeline)
def diff(schedule: Schedule, costs: Costs, run: Timeline) -> Difference:
    """Every ns of a measured `run` of `schedule` against its simulation under `costs`, by cause; the causes add up exactly.

    The order of the schedule is played five times, each time with one more part of the plan's times exchanged for the run's. What
    makespan and work of a rank change by is put to that part:

    - passes: the medians of each kind of pass and stage, one after another by stage (the drifts); costs that were wrong all along.
    - noise: the time each single pass took.
    - comm: when each message was there, as `explain.replay.measured` tells it.
    - host: the time between the moment a rank was free and had its messages, and the start of its pass: Python, sending, the system.

    The plan's own idle time is told apart as `attribute` does. Raises as `simulate` does, and `InputError` when the run's passes are
    not those of the schedule, rank by rank in their order.
    """
    plan = planned(schedule, costs)
    exact = measured(plan, run)
    drifts, median = _drifts(plan, exact)
    noisy = replace(median, takes=exact.takes)
    late = replace(noisy, delays=exact.delays)
    orders = [plan, median, noisy, late, exact]
    makespans = [timed.makespan for timed in orders]
    works = [timed.work() for timed in orders]
    after_passes, after_noise, after_comm, after_host = (after - before for before, after in pairwise(makespans))
    accounts = []
    for rank, (causes, work, usual, single, *_) in enumerate(zip(attribute(schedule, costs).ranks, *works, strict=True)):
        passes = Part(usual - work, after_passes - (usual - work))
        noise = Part(single - usual, after_noise - (single - usual))
        accounts.append(Account(rank, work, causes, passes, noise, after_comm, after_host))
    return Difference(schedule.name, makespans[0], makespans[-1], tuple(accounts), drifts)


def _drifts(plan: TimedOrder, exact: TimedOrder) -> tuple[tuple[Drift, ...], TimedOrder]:
    """How the median of each kind of step moves the makespan, one after another; the order with all of them."""
    found: dict[Passes, list[int]] = defaultdict(list)
    for step in plan.graph.steps():
        found[tuple((plan.graph.ops[i].kind, plan.graph.ops[i].stage) for i in step)].append(step[0])
    drifts, before, timed = [], plan.makespan, plan
    for passes, numbers in sorted(found.items(), key=_by_stage):
        middle = median_low(exact.takes[number] for number in numbers)
        takes = list(timed.takes)
        for number in numbers:
            takes[number] = middle
        timed = replace(timed, takes=takes)
        after = timed.makespan
        ranks = tuple(sorted({plan.graph.rank[number] for number in numbers}))
        drifts.append(Drift(passes, ranks, len(numbers), plan.takes[numbers[0]], middle, after - before))
        before = after
    return tuple(drifts), timed


def _by_stage(found: tuple[Passes, list[int]]) -> list[tuple[int, Kind]]:
    return [(stage, kind) for kind, stage in found[0]]


def _account_to_dict(account: Account) -> dict[str, Any]:
    return {
        "rank": account.rank,
        "work": account.work,
        "plan": account.plan._asdict(),
        "passes": account.passes._asdict(),
        "noise": account.noise._asdict(),
        "comm": account.comm,
        "host": account.host,
        "total": account.total,
    }


def _drift_to_dict(drift: Drift) -> dict[str, Any]:
    passes = [[str(kind), stage] for kind, stage in drift.passes]
    return drift._asdict() | {"passes": passes, "ranks": list(drift.ranks)}
