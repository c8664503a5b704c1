"""Orders that keep their time when passes do not: the slack goes where it costs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from zerobubble.errors import InputError, ScheduleError
from zerobubble.ir import Op, Schedule
from zerobubble.plan.problem import Problem
from zerobubble.plan.replay import Replay
from zerobubble.simulate import memory_faults

REACH = 6
"""How many places a pass is moved at most."""


@dataclass(frozen=True)
class Noise:
    """Samples of what passes really take: factors on their measured times, the same for every order that is compared."""

    samples: tuple[dict[Op, float], ...]

    @classmethod
    def of(cls, schedules: Iterable[Schedule], error: float, samples: int, seed: int) -> Noise:
        """Normal factors of standard deviation `error` for the passes of `schedules`, drawn from `seed`."""
        dice = Random(seed)
        ops = sorted({op for schedule in schedules for _, _, op in schedule.ops()})
        return cls(tuple({op: max(0.0, dice.gauss(1, error)) for op in ops} for _ in range(samples)))

    def mean(self, problem: Problem, replay: Replay) -> float:
        """The objective in ns, on average over the samples."""
        measured = replay.durations(problem.costs)
        drawn = [self.drawn(factors, replay, measured) for factors in self.samples]
        return sum(replay.play(problem.objective, durations, problem.costs.comm) for durations in drawn) / len(drawn)

    @staticmethod
    def drawn(factors: dict[Op, float], replay: Replay, measured: Sequence[int]) -> list[int]:
        """What the steps take in one sample, in ns."""
        return [round(duration * factors[step[0]]) if step else 0 for step, duration in zip(replay.steps, measured, strict=True)]


def steadiest(
    problem: Problem,
    candidates: Sequence[Schedule],
    *,
    error: float = 0.1,
    allow: float = 0.0,
    samples: int = 16,
    tries: int = 200,
    seed: int = 0,
) -> Schedule:
    """The schedule with the shortest mean objective when every pass takes its own time, with `error` as its standard deviation.

    It is one of the `candidates`, polished by `tries` moves of single passes where that also helps in other samples than those it was
    polished in. By the measured times it takes no longer than the best candidate, or longer by the share `allow` at most. A try plays
    the schedule in Python once per sample. Raises `InputError` where no candidate fits the limits, `ScheduleError` for one that
    cannot run.
    """
    fitting = [schedule for schedule in candidates if _fits(problem, schedule)]
    if not fitting:
        raise InputError(f"none of the {len(candidates)} candidates fits the memory limits")
    longest = min(Replay.of(schedule).time(problem.objective, problem.costs) for schedule in fitting) * (1 + allow)
    known, fresh = (Noise.of(fitting, error, count, seed + turn) for turn, count in enumerate((samples, 4 * samples)))
    best = min(fitting, key=lambda schedule: _judged(problem, schedule, known, longest))
    polished = _polished(problem, best, known, longest, tries, Random(seed))
    return min((best, polished), key=lambda schedule: _judged(problem, schedule, fresh, longest))


def _polished(problem: Problem, best: Schedule, noise: Noise, longest: float, tries: int, dice: Random) -> Schedule:
    """`best` after those of `tries` moves that do not make its mean objective longer."""
    mean = _judged(problem, best, noise, longest)
    for _ in range(tries):
        moved = _nudged(best, dice)
        now = _judged(problem, moved, noise, longest)
        if now <= mean:
            mean, best = now, moved
    return best


def _fits(problem: Problem, schedule: Schedule) -> bool:
    return not memory_faults(schedule, problem.costs, problem.limits)


def _judged(problem: Problem, schedule: Schedule, noise: Noise, longest: float) -> float:
    """The mean objective over the samples; infinite for an order that breaks the rules or the limits, or takes more than `longest`."""
    if not _fits(problem, schedule):
        return inf
    try:
        replay = Replay.of(schedule)
    except ScheduleError:
        return inf
    return noise.mean(problem, replay) if replay.time(problem.objective, problem.costs) <= longest else inf


def _nudged(schedule: Schedule, dice: Random) -> Schedule:
    """The schedule with one pass a few places away in its row, legal or not."""
    rank = dice.randrange(schedule.num_ranks)
    row = list(schedule.rows[rank])
    op = row.pop(dice.randrange(len(row)))
    at = schedule.rows[rank].index(op) + dice.choice((-1, 1)) * dice.randint(1, REACH)
    row.insert(max(0, at), op)
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))
