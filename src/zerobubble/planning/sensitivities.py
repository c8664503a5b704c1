"""Sensitivity of a plan to errors in measured times: each time alone, all times at random, and noise in every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random
from typing import Any, NamedTuple

from zerobubble.arguments import NUMBER, WHOLE, each, optional, takes, wrong
from zerobubble.costs import COLLECTIVE, Costs, Limits
from zerobubble.display import Displayed
from zerobubble.ir import Schedule
from zerobubble.kinds import KINDS
from zerobubble.offload import HostLink, RankOffloads
from zerobubble.planning.answer import Plan
from zerobubble.planning.plan_player import PlanPlayer
from zerobubble.planning.problem.problem import Objective
from zerobubble.planning.replay import Replay
from zerobubble.planning.table import aligned
from zerobubble.simulation import peak_memory
from zerobubble.units import counted, show_ms, show_percent

Entry = tuple[str, int]
"""One measured time: a column of `Costs` and the stage (or link)."""


class Scope(StrEnum):
    """Which times an error affects: every pass of a kind (or every message), every pass of a rank, or one measured time alone."""

    KIND = "kind"
    RANK = "rank"
    ALONE = "alone"


class Effect(NamedTuple):
    """The objective in ns if `what` takes longer (`slower`) or shorter (`faster`) than measured by the error."""

    scope: Scope
    what: str
    slower: int
    faster: int


class Spread(NamedTuple):
    """The excess of the objective over the planned time, on average and in the worst sample, as fractions of the planned time."""

    mean: float
    worst: float


@dataclass(frozen=True, repr=False)
class Sensitivity(Displayed):
    """How the objective of a plan changes if measured times are wrong.

    Attributes:
        objective: The period or the makespan.
        time: The objective of the plan in ns.
        error: The largest relative error of a measured time: 0.1 is 10 %.
        effects: Exact effects of the error on every F, B, W and message at once, on each rank's passes, then on each single measured time.
        worst: The objective in ns if everything takes longer by `error`, the maximum over all errors of that size.
        profile: The spread if each measured time is off by its own random amount up to `error`.
        jitter: The spread if passes vary independently, normally with a relative standard deviation of `error`.
        spare: The share by which the peak of each rank can grow before it exceeds the memory; None without limits.
    """

    objective: Objective
    time: int
    error: float
    effects: tuple[Effect, ...]
    worst: int
    profile: Spread
    jitter: Spread
    spare: tuple[float, ...] | None

    def _summary(self) -> str:
        off = f"up to {show_ms(self.worst)} where times are off by {100 * self.error:g} %"
        return f"of the {self.objective}: {show_ms(self.time)}, {off}; {counted(len(self.effects), 'effect')}"

    def _details(self) -> Iterator[str]:
        for effect in sorted(self.effects, key=lambda effect: effect.faster - effect.slower):
            yield f"{effect.what}: {show_ms(effect.slower)} if slower, {show_ms(effect.faster)} if faster"

    @property
    def ranks_over_limit(self) -> tuple[int, ...]:
        """The ranks whose memory would not suffice if activations were larger than measured by `error`."""
        return tuple(rank for rank, spare in enumerate(self.spare or ()) if spare < self.error)

    def weight(self, effect: Effect) -> float:
        """Percent by which the objective changes per percent of error in the times of `effect`, the mean of both directions."""
        return (effect.slower - effect.faster) / (2 * self.error * self.time) if self.time else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: times in ns, shares as fractions."""
        return {
            "format": "zerobubble sensitivity 1",
            **{name: getattr(self, name) for name in ("time", "error", "worst")},
            "objective": self.objective.value,
            "effects": [effect._asdict() | {"weight": self.weight(effect)} for effect in self.effects],
            "profile": self.profile._asdict(),
            "jitter": self.jitter._asdict(),
            "spare": None if self.spare is None else [None if spare == inf else spare for spare in self.spare],
        }


@takes(
    schedule=Schedule,
    costs=Costs,
    error=NUMBER,
    limits=optional(Limits),
    samples=WHOLE,
    seed=WHOLE,
    offloads=each(RankOffloads),
    host=optional(HostLink),
)
def sensitivity(
    schedule: Schedule,
    costs: Costs,
    error: float = 0.1,
    *,
    objective: Objective = Objective.PERIOD,
    limits: Limits | None = None,
    samples: int = 100,
    seed: int = 0,
    offloads: Sequence[RankOffloads] = (),
    host: HostLink | None = None,
) -> Sensitivity:
    """Returns how the objective of a schedule changes with errors in measured times.

    Args:
        schedule: The schedule.
        costs: The measured times.
        error: The largest relative error of a time: 0.1 is 10 %.
        objective: The period or the makespan.
        limits: The memory of each rank, for `Sensitivity.spare`.
        samples: How many sets of random errors are drawn.
        seed: The seed of these draws.
        offloads: The offloads of each rank. The times of their copies have errors as well, all by the same factor.
        host: The link that the copies take.

    Raises `ScheduleError` if
    the schedule cannot run, `InputError` for an error outside 0 to 1, and for fewer than 1 sample.
    """
    check_error_share(error)
    if samples < 1:
        raise wrong("samples", samples, "at least 1")
    rng = Random(seed)
    timed, jitter = _players(schedule, costs, objective, offloads, host)
    entries, time = [*_entries(costs), *([COPIES] if offloads else [])], timed({})

    def time_if_off(names: Iterable[Entry], by: float) -> int:
        return timed(dict.fromkeys(names, 1 + by))

    groups = [*_groups(schedule, costs), *([(Scope.KIND, "every copy", [COPIES])] if offloads else [])]
    effects = tuple(Effect(scope, what, time_if_off(names, error), time_if_off(names, -error)) for scope, what, names in groups)
    profile = _spread(time, [timed({entry: rng.uniform(1 - error, 1 + error) for entry in entries}) for _ in range(samples)])
    noisy = [jitter(error, rng) for _ in range(samples)]
    spare = None if limits is None else _spare(schedule, costs, limits, offloads)
    return Sensitivity(objective, time, error, effects, time_if_off(entries, error), profile, _spread(time, noisy), spare)


COPIES: Entry = ("host", 0)
"""The entry that stands for the times of all copies."""


def _players(
    schedule: Schedule, costs: Costs, objective: Objective, offloads: Sequence[RankOffloads], host: HostLink | None
) -> tuple[Callable[[dict[Entry, float]], int], Callable[[float, Random], int]]:
    """Returns functions for the objective with factors on measured times, and under noise. `Replay` is faster, if it can play the plan."""
    if schedule.has_divided_head or offloads:
        player = PlanPlayer(schedule, offloads, host)
        ops = sorted(op for row in schedule.rows for op in row)

        def timed(factors: dict[Entry, float]) -> int:
            named = {entry: factor for entry, factor in factors.items() if entry != COPIES}
            return player.time(objective, scaled(costs, named), slower_link=factors.get(COPIES, 1.0))

        return timed, lambda error, rng: player.time(objective, costs, factors={op: rng.gauss(1, error) for op in ops})
    replay = Replay.from_schedule(schedule)
    durations = replay.durations(costs)

    def jitter(error: float, rng: Random) -> int:
        return replay.play(objective, jittered(durations, error, rng), costs.comm)

    return lambda factors: replay.time(objective, scaled(costs, factors)), jitter


def check_error_share(error: float) -> None:
    """Raises `InputError` unless the error of measured times is between 0 and 1."""
    if not 0 < error < 1:
        raise wrong("the error of measured times", error, "a share between 0 and 1, such as 0.1 for 10 %")


def scaled(costs: Costs, factors: dict[Entry, float]) -> Costs:
    """`costs` with each time named in `factors` multiplied by its factor."""
    columns = {name: list(costs.column(name)) for name, _ in factors}
    for (name, index), factor in factors.items():
        columns[name][index] = round(columns[name][index] * factor)
    return costs.with_columns(**columns)


def jittered(durations: Iterable[int], error: float, rng: Random) -> list[int]:
    """Each duration times an independent normal factor of standard deviation `error`, at least 0."""
    return [max(0, round(duration * rng.gauss(1, error))) for duration in durations]


def _groups(schedule: Schedule, costs: Costs) -> Iterator[tuple[Scope, str, list[Entry]]]:
    """Returns the groups of measured times that an error affects together."""
    passes = _passes(costs)
    for name, letter in passes.items():
        yield Scope.KIND, f"every {letter}", [(name, stage) for stage in range(costs.num_stages)]
    yield Scope.KIND, "every message", [entry for entry in _entries(costs) if entry[0] in ("comm", COLLECTIVE)]
    for rank in range(schedule.num_ranks):
        held = sorted({stage for _, stage in schedule.placement.stages(rank)})
        yield Scope.RANK, f"rank {rank}", [(name, stage) for stage in held for name in passes]
    for name, index in _entries(costs):
        messages = "messages after" if name == "comm" else "collectives from"
        what = f"{passes[name]} of stage {index}" if name in passes else f"{messages} stage {index}"
        yield Scope.ALONE, what, [(name, index)]


def _entries(costs: Costs) -> Iterator[Entry]:
    for name in (*_passes(costs), "comm", *(name for name, _ in costs.further if name == COLLECTIVE)):
        for index, _ in enumerate(costs.column(name)):
            yield name, index


def _passes(costs: Costs) -> dict[str, str]:
    """Returns the columns of pass times, each with its label: the kind if no other column times it, else the column's name as text."""

    def kind_of(name: str) -> str:
        return next((kind for kind, row in KINDS.items() if name == row.fused_time or row.times == (name,)), name.replace("_", " "))

    return {name: kind_of(name) for name in costs.time_columns}


def _spread(time: int, sampled: list[int]) -> Spread:
    shares = [each / time - 1 if time else 0.0 for each in sampled]
    return Spread(sum(shares) / len(shares), max(shares))


def _spare(schedule: Schedule, costs: Costs, limits: Limits, offloads: Sequence[RankOffloads]) -> tuple[float, ...]:
    peaks = [rank.peak_bytes for rank in offloads] if offloads else peak_memory(schedule, costs)
    return tuple(limit / peak - 1 if peak else inf for peak, limit in zip(peaks, limits.memory, strict=True))


SHOWN = {Scope.KIND: 4, Scope.RANK: 3, Scope.ALONE: 5}
"""The number of effects shown for each scope, largest first."""


def what_if(plan: Plan, error: float, *, samples: int = 100, seed: int = 0) -> Sensitivity:
    """Returns the sensitivity of a plan to an `error` of measured times. Raises like `sensitivity`, and for a plan without a schedule."""
    problem = plan.problem
    return sensitivity(
        plan.schedule,
        problem.costs,
        error,
        objective=problem.objective,
        limits=problem.limits,
        samples=samples,
        seed=seed,
        offloads=plan.offloads,
        host=problem.host,
    )


def what_if_text(found: Sensitivity) -> str:
    """Formats a table of effects on the objective, then a sentence each on random errors, noise and memory."""
    error = f"{100 * found.error:g} %"
    head = (f"off by {error}", "longer", "shorter")
    rows = [(effect.what, _change(found, effect.slower), _change(found, effect.faster)) for effect in _shown(found)]
    everything = ("everything", _change(found, found.worst), "")
    return "\n".join(
        [*aligned([head, *rows, everything], left=(0,)), "", *_noise_sentences(found, error), *_memory_sentences(found, error)]
    )


def _shown(found: Sensitivity) -> Iterator[Effect]:
    for scope, most in SHOWN.items():
        alike = [effect for effect in found.effects if effect.scope is scope]
        yield from sorted(alike, key=lambda effect: effect.faster - effect.slower)[:most]


def _change(found: Sensitivity, time: int) -> str:
    share = time / found.time - 1 if found.time else 0.0
    return f"{'+' if share > 0 else ''}{show_percent(share)}"


def _noise_sentences(found: Sensitivity, error: str) -> Iterator[str]:
    yield f"Every measured time wrong by a random share of up to {error}: {_spread_text(found.profile)}."
    yield f"Every pass varying independently, with a standard deviation of {error}: {_spread_text(found.jitter)}."


def _spread_text(spread: Spread) -> str:
    return f"{show_percent(spread.mean)} longer on average, {show_percent(spread.worst)} at worst"


def _memory_sentences(found: Sensitivity, error: str) -> Iterator[str]:
    if found.spare is not None and found.ranks_over_limit:
        tightest = min(found.ranks_over_limit, key=found.spare.__getitem__)
        short, left = f"{len(found.ranks_over_limit)} of {len(found.spare)} ranks", show_percent(found.spare[tightest])
        yield f"Memory: activations {error} larger would not fit on {short}; rank {tightest} has {left} of its memory left."
