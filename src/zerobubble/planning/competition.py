"""The choice: a problem solved on one placement, and the best of many placements with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import ceil, isfinite
from time import perf_counter

from zerobubble.arguments import NUMBER, WHOLE, Wanted, either, instance, optional, takes
from zerobubble.costs import Costs, Limits
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Placement, Schedule
from zerobubble.planning.attempt import (
    Attempt,
    Budget,
    ProgressCallback,
    attempt_by_baseline,
    improve,
    start_attempt,
    with_list_schedule,
    with_serial_schedule,
)
from zerobubble.planning.placements import ANY, family, placements_to_try
from zerobubble.planning.problem import Objective, Problem, Solved, Workload
from zerobubble.planning.reasons import can_beat, comparison_table, notes
from zerobubble.planning.seeds import promising
from zerobubble.units import counted

SECONDS = 5.0
"""How long to search where nobody says."""

MICROBATCHES = Wanted("a number of microbatches", NUMBER.accepts)


@dataclass(frozen=True, repr=False)
class Choice(Displayed):
    """One placement in the competition: its best answer, and a sentence that says why it is the best, or what stopped it."""

    name: str
    solved: Solved
    note: str

    def _summary(self) -> str:
        return f"{self.name}: {self.note}"


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """The placements tried, the best first, those on which nothing can run last. `str` of it is a table with the reasons.

    `seconds` is the time of all together, without the seconds it took to compile the search.
    """

    choices: tuple[Choice, ...]
    seconds: float
    compiling: float = 0.0

    @property
    def best(self) -> Solved:
        """The winner; infeasible when no placement fits."""
        return self.choices[0].solved

    @property
    def schedule(self) -> Schedule:
        """The winner's schedule; raises `InputError` with the reason when there is none."""
        if self.best.schedule is None:
            raise InputError(f"no schedule fits: {self.best.reason}")
        return self.best.schedule

    @property
    def lower_bound(self) -> float:
        """No schedule on any placement tried has a smaller bubble."""
        able = [choice.solved for choice in self.choices if choice.solved.time is not None] or [self.best]
        return min(solved.least_bubble for solved in able)

    def _summary(self) -> str:
        return f"of {counted(len(self.choices), 'placement')}, the best {self.best._summary()}"

    def __str__(self) -> str:
        return comparison_table([(choice.name, choice.solved, choice.note) for choice in self.choices])


@takes(problem=Problem, seconds=NUMBER, seed=WHOLE, evaluations=optional(WHOLE), baseline=optional(str))
@garbage_collection_paused()
def solve(
    problem: Problem,
    *,
    seconds: float = SECONDS,
    seed: int = 0,
    evaluations: int | None = None,
    baseline: str | None = None,
    seeds: Sequence[Schedule] = (),
    progress: ProgressCallback | None = None,
) -> Solved:
    """The best schedule for `problem` found in `seconds`, or by `evaluations` schedules played, which is always the same one.

    The seconds are for seeds, search and the last check together, compiling the search apart. With 0 of either it is the best of
    `seeds` and the published schedules. `baseline` names a planner of the papers to ask instead.
    Ctrl-C gives the best so far. The answer is checked and played anew in plain Python. Raises `InputError` for a negative budget.

    >>> import zerobubble as zb
    >>> problem = zb.planning.Problem(zb.Placement.vee(2), 4, zb.Costs.uniform(4), zb.Limits((4_000_000,) * 2))
    >>> zb.planning.solve(problem, seconds=0).status.value
    'optimal'
    """
    name, budget = problem.placement.name, as_budget(seconds, evaluations)
    if baseline is not None:
        return attempt_by_baseline(name, baseline, problem).solved
    started = perf_counter()
    attempt = start_attempt(name, problem, budget, chain(seeds, promising(problem, budget.for_seeds)))
    with suppress(KeyboardInterrupt):
        spent = perf_counter() - started
        _compile_search([attempt], budget)
        if not budget.is_empty:
            attempt = with_list_schedule(improve(attempt, budget.share(1, spent=spent), seed, progress))
    return with_serial_schedule(attempt).solved


@takes(
    work=instance(Workload, Costs),
    num_microbatches=WHOLE,
    memory=optional(either(MICROBATCHES, Limits)),
    placements=optional(instance(str, Placement, Iterable)),
    objective=str,
    seconds=NUMBER,
    seed=WHOLE,
    evaluations=optional(WHOLE),
    baseline=optional(str),
)
def plan(
    work: Workload | Costs,
    num_microbatches: int,
    memory: float | Limits | None = None,
    *,
    placements: str | Placement | Iterable[str | Placement] | None = None,
    objective: str = Objective.SPAN,
    seconds: float = SECONDS,
    seed: int = 0,
    evaluations: int | None = None,
    baseline: str | None = None,
    progress: ProgressCallback | None = None,
) -> Plan:
    """The best schedule over `placements`: names of families, `any` for all, or placements; each answer with a bound and a reason.

    `work` is a `Workload`, planned on any placement, or the `Costs` of stages, planned on the placement that they know or that is
    given. `memory` is the room on each rank in microbatches of all its stages, or in bytes as `Limits`; without it there is room for
    everything. The budget is for all placements together, and the rest is as in `solve`. Raises `InputError` for a part that cannot
    be used.

    Arguments:
        work: what whole ranks do (`Workload`), or what stages cost (`Costs`), measured by `Pipeline.profile` for example.
        num_microbatches: slices of each batch.
        memory: room for activations on each rank, in microbatches of all its stages, or in bytes as `Limits`; None for as much as it takes.
        placements: where to look, such as "vee" or ["linear", "looped-2"]; "any", all families, for a `Workload` where nothing is said.
        objective: "span", the longest time of a rank from its first pass to its last, or "makespan", where ranks meet after each step.
        seconds: how long to search, over all placements; 0 takes the best published schedule.
        evaluations: how many schedules to play instead, so that the answer is the same on every machine and rank.
        seed: another one makes other random choices.
        baseline: a planner of the papers to ask instead, such as "zb-heuristic".
        progress: called now and then with how far the search is.

    >>> import zerobubble as zb
    >>> work = zb.Workload.uniform(4, times=(10, 10, 8), comm=0.3)
    >>> found = zb.plan(work, 8, memory=4, placements=["linear", "vee"], seconds=0)
    >>> found
    <Plan of 2 placements, the best on vee over 4 ranks: zb-v-greedy, span 232.2 ms, bubble 3.53 % (bound 3.20 %), feasible>
    >>> found.schedule.placement.name
    'vee'
    """
    tried = placements_for(work, placements)
    problems = problems_of(work, num_microbatches, memory, tried, objective)
    if baseline is not None:
        started = perf_counter()
        return _plan_of(_all_by(baseline, problems), started)
    return plan_problems(problems, as_budget(seconds, evaluations), seed, progress)


def placements_for(work: Workload | Costs, given: str | Placement | Iterable[str | Placement] | None) -> dict[str, Placement]:
    """The placements to try for `work`, by name: those `given`, or else all for a workload, and for costs the one they know.

    Raises `InputError` for an unknown name, and for costs of stages without one placement.
    """
    if isinstance(work, Workload):
        return placements_to_try(ANY if given is None else given, work.num_ranks)
    known = work.placement if given is None else given
    if isinstance(known, str) and work.placement is not None and known != ANY:
        known = family(known, work.placement.num_ranks)
    if not isinstance(known, Placement):
        raise InputError("costs of stages belong to one placement: give it as placements, or give the work of each rank as a Workload")
    return placements_to_try(known, known.num_ranks)


@garbage_collection_paused()
def plan_problems(
    problems: Mapping[str, Problem],
    budget: Budget,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
    seeds: Mapping[str, Iterable[Schedule]] | None = None,
) -> Plan:
    """The plan over `problems`, by the name of their placement, started from `seeds` or else from the published schedules."""
    started, given = perf_counter(), seeds or {}
    attempts = [start_attempt(name, problem, budget.share(len(problems)), given.get(name)) for name, problem in problems.items()]
    compiling = 0.0
    with suppress(KeyboardInterrupt):
        spent = perf_counter() - started
        compiling = _compile_search(_contenders(attempts), budget)
        attempts = attempts if budget.is_empty else successive_halving(attempts, budget.share(1, spent=spent), seed, on_progress)
    return _plan_of(list(map(with_serial_schedule, attempts)), started, compiling)


def _plan_of(attempts: Sequence[Attempt], started: float, compiling: float = 0.0) -> Plan:
    ranked = sorted(attempts, key=_rank_key)
    explained = zip(ranked, notes([(attempt.solved, attempt.searched) for attempt in ranked]), strict=True)
    return Plan(tuple(Choice(a.name, a.solved, note) for a, note in explained), perf_counter() - started - compiling, compiling)


def successive_halving(
    attempts: Sequence[Attempt], budget: Budget, seed: int = 0, on_progress: ProgressCallback | None = None
) -> list[Attempt]:
    """The attempts after rounds of search, in each of which the better half of those that can still win goes on.

    An attempt whose bound is not below the best bubble found cannot win; it stays as it is. Ctrl-C ends the competition.
    """
    known = {attempt.name: attempt for attempt in attempts}
    with suppress(KeyboardInterrupt):
        for attempt in _search_rounds(known, budget, seed, on_progress):
            known[attempt.name] = attempt
            if attempt.interrupted:
                break
    return list(known.values())


def _search_rounds(known: Mapping[str, Attempt], budget: Budget, seed: int, on_progress: ProgressCallback | None) -> Iterator[Attempt]:
    """Each attempt after it was searched in a round; the caller puts it into `known` before the next one is asked for.

    The first round takes all that can still win, each later one the better half of the round before.
    """
    started, keep = perf_counter(), len(known)
    if keep > 1:
        yield from map(with_list_schedule, list(known.values()))
    rounds = max(1, len(_contenders(known.values()))).bit_length()
    for turn in range(rounds):
        left = _contenders(known.values())[:keep]
        for done, attempt in enumerate(left, turn * len(left)):
            yield improve(attempt, budget.share(rounds * len(left), done, perf_counter() - started), seed + turn, on_progress)
        keep = ceil(len(left) / 2)


def _contenders(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Those whose search may still give the winner, the best so far first."""
    ranked = sorted(attempts, key=_rank_key)
    best = ranked[0].solved
    return [attempt for attempt in ranked if attempt.can_improve and (best.time is None or can_beat(attempt.solved, best))]


def _rank_key(attempt: Attempt) -> tuple[float, int, float]:
    """Less is better: the bubble to nine digits, then messages, then memory."""
    solved = attempt.solved
    if solved.bubble is None or solved.peak_microbatches is None:
        return float("inf"), 0, 0.0
    return round(solved.bubble, 9), solved.problem.messages, solved.peak_microbatches


def _compile_search(attempts: Sequence[Attempt], budget: Budget) -> float:
    """Seconds to compile the search, 0 where none will run."""
    if budget.is_empty or not any(attempt.can_improve for attempt in attempts):
        return 0.0
    from zerobubble.planning.search import compile_kernels

    return compile_kernels()


def _all_by(baseline: str, problems: Mapping[str, Problem]) -> list[Attempt]:
    """The answers of a paper's planner, on the placements it has one for. Raises its reason when it has none for any."""
    attempts, refusals = [], []
    for name, problem in problems.items():
        try:
            attempts.append(attempt_by_baseline(name, baseline, problem))
        except InputError as error:
            refusals.append(error)
    if not attempts:
        raise refusals[0]
    return attempts


def problems_of(
    work: Workload | Costs, num_microbatches: int, memory: float | Limits | None, placements: Mapping[str, Placement], objective: str
) -> dict[str, Problem]:
    """The problem on each placement, by its name. Raises `InputError` for a part that cannot be used."""
    aim, problems = Objective.named(objective), {}
    for name, placement in placements.items():
        costs = work.costs(placement) if isinstance(work, Workload) else work
        costs.require_fit(placement, "the placement")
        limits = _limits(work, memory) or room_for_all(placement, costs, num_microbatches)
        workload = work if isinstance(work, Workload) else None
        problems[name] = Problem(placement, num_microbatches, costs, limits, aim, workload)
    return problems


def _limits(work: Workload | Costs, memory: float | Limits | None) -> Limits | None:
    """The limits that `memory` says, None where it says nothing."""
    if memory is None or isinstance(memory, Limits):
        return memory
    if isinstance(work, Costs):
        raise InputError(f"with costs of stages, memory is in bytes: give Limits, one number for each rank, instead of {memory}")
    return work.limits(memory)


def room_for_all(placement: Placement, costs: Costs, num_microbatches: int) -> Limits:
    """Limits that no order of the passes reaches beyond."""
    held = [1] * placement.num_ranks
    for rank, after_f, after_b in zip(placement.routes[0], costs.held_after_f, costs.held_after_b, strict=True):
        held[rank] += num_microbatches * max(after_f, after_b)
    return Limits(tuple(held))


def as_budget(seconds: float, evaluations: int | None) -> Budget:
    """The budget these give; raises `InputError` for one that is negative or not finite."""
    for name, value in (("seconds", seconds), ("evaluations", evaluations)):
        if value is not None and (not isfinite(value) or value < 0):
            raise InputError(f"{name} to search must be a finite number >= 0, got {value}")
    return Budget(seconds, evaluations)
