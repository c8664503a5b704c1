"""The choice: a problem solved on one placement, and the best of many placements with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite
from textwrap import fill
from time import perf_counter

from zerobubble.arguments import NUMBER, WHOLE, Wanted, each, either, instance, optional, takes
from zerobubble.costs import NONE, Costs, Level, Limits
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
    shorter,
    start_attempt,
    with_list_schedule,
    with_paired_schedule,
    with_serial_schedule,
    with_sharper_bound,
)
from zerobubble.planning.placements import ANY, family, placements_to_try
from zerobubble.planning.problem.head import HELD_OF_HEAD, parts_on
from zerobubble.planning.problem.problem import Objective, Problem, Solved, Status
from zerobubble.planning.problem.recomputation import levels_for, refuse_beside_recomputation
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import Workload
from zerobubble.planning.reasons import NOTE_WIDTH, Told, comparison_table, notes
from zerobubble.planning.recompute.bought import Bought
from zerobubble.planning.recompute.lighter import lightened
from zerobubble.planning.recompute.plan import plan_recomputing
from zerobubble.planning.rounds import CtrlC, compile_search, contenders, rank_key, successive_halving, with_sharper_bounds
from zerobubble.planning.seeds import promising
from zerobubble.planning.shards.few_gathers import FewGathers, few_gathers
from zerobubble.planning.simple_choice import simple_choice, simple_choice_text
from zerobubble.planning.unequal.plan import alike, unequal
from zerobubble.planning.weight_order import with_weights_ordered
from zerobubble.units import counted

CUT_SHORT = "Ctrl-C cut the search short: this is the best until then."

SECONDS = 5.0
"""How long to search where nobody says."""

MICROBATCHES = Wanted("a number of microbatches", NUMBER.accepts)


@dataclass(frozen=True, repr=False)
class Choice(Displayed):
    """One placement in the competition: its best answer, and a sentence that says why it is the best, or what stopped it.

    `searched` says whether the answer was searched for, or is the best published schedule that fits.
    """

    name: str
    solved: Solved
    note: str
    searched: bool = False

    @property
    def is_result(self) -> bool:
        """Whether the answer was searched for or is proven optimal."""
        return self.searched or self.solved.status is Status.OPTIMAL

    def _summary(self) -> str:
        return f"{self.name}: {self.note}"


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """The placements tried, the best first, those on which nothing can run last. `str` of it is a table with the reasons.

    `seconds` is the time of all together, without the seconds it took to compile the search. `simple` is a published schedule that comes
    as close as the winner, None where none does. `interrupted` says that Ctrl-C cut the search short. Where weights lie in shards, the
    winner is chosen by its gathers, too, as `few_gathers` tells; `choices` are then the competition without gathers. `bought` tells what
    recomputation buys, where it was asked for.
    """

    choices: tuple[Choice, ...]
    seconds: float
    compiling: float = 0.0
    simple: Solved | None = None
    interrupted: bool = False
    few_gathers: FewGathers | None = None
    bought: Bought | None = None

    @property
    def best(self) -> Solved:
        """The winner; infeasible when no placement fits."""
        return self.choices[0].solved if self.few_gathers is None else self.few_gathers.chosen.solved

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
        table = comparison_table(Told(choice.name, choice.solved, choice.note, choice.is_result) for choice in self.choices)
        remarks = [simple_choice_text(self.simple, self.best)] if self.simple is not None else []
        remarks += [str(self.bought)] if self.bought is not None else []
        remarks += [CUT_SHORT] if self.interrupted else []
        paragraphs = [fill(remark, NOTE_WIDTH, break_on_hyphens=False) for remark in remarks]
        return "\n\n".join([table, *paragraphs, *([str(self.few_gathers)] if self.few_gathers is not None else [])])


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
    Ctrl-C gives the best so far. The answer is checked and played anew in plain Python. Raises `InputError` for a negative budget, and for
    a head divided over ranks and a link to the host, which `plan_head` and `plan_offloaded` plan for.

    >>> import zerobubble as zb
    >>> problem = zb.planning.Problem(zb.Placement.vee(2), 4, zb.Costs.uniform(4), zb.Limits((4_000_000,) * 2))
    >>> zb.planning.solve(problem, seconds=0).status.value
    'optimal'
    """
    if problem.has_divided_head:
        raise InputError("solve orders the passes of stages alone, and this problem has a head divided over the ranks: take plan_head")
    if problem.host is not None:
        raise InputError("solve keeps all that waits on the device, and this problem has a link to the host: take plan_offloaded")
    name, budget = problem.placement.name, as_budget(seconds, evaluations)
    if baseline is not None:
        return attempt_by_baseline(name, baseline, problem, budget).solved
    if problem.sharded is not None:
        return plan_problems({name: problem}, budget, seed, progress, {name: chain(seeds, promising(problem, budget.for_seeds))}).best
    started = perf_counter()
    attempt = start_attempt(name, problem, budget, chain(seeds, promising(problem, budget.for_seeds)))
    with suppress(KeyboardInterrupt):
        compiling = compile_search([attempt], budget)
        attempt = with_sharper_bound(attempt, budget)
        spent = perf_counter() - started - compiling
        if not budget.is_empty:
            attempt = with_list_schedule(improve(attempt, budget.share(1, spent=spent), seed, progress))
    attempt = with_serial_schedule(attempt)
    return with_paired_schedule(replace(attempt, solved=with_weights_ordered(attempt.solved))).solved


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
    sharded=optional(Sharded),
    shares=each(NUMBER),
    recompute=str,
    levels=optional(each(instance(Level))),
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
    sharded: Sharded | None = None,
    shares: Sequence[float] = (),
    recompute: str = "none",
    levels: Sequence[Level] | None = None,
    progress: ProgressCallback | None = None,
) -> Plan:
    """The best schedule over `placements`: names of families, `any` for all, or placements; each answer with a bound and a reason.

    `work` is a `Workload`, planned on any placement, or the `Costs` of stages, planned on the placement that they know or that is
    given. `memory` is the room on each rank in microbatches of all its stages, or in bytes as `Limits`; without it there is room for
    everything. Of plans that are equally short the one with the smaller makespan wins. The budget is for all placements together, and
    the rest is as in `solve`. Raises `InputError` for a part that cannot be used.

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
        sharded: weights that FSDP2 divides: the winner then gathers least of the schedules that are hardly longer, gathers included.
        shares: a factor for each microbatch on the times and bytes of its passes, where they are of unequal cost. The microbatches of the
            schedule are then in the places that make it short; see `planning.order_microbatches` for a schedule that stays.
        recompute: "full" computes every forward again, "auto" what pays within the memory, by stage and microbatch; "none" nothing.
        levels: how much may be computed again; if not given, the levels that were measured with the costs, where some were, and else
            `costs.SELECTIVE` and `costs.FULL`.
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
    measured = work.levels if isinstance(work, Costs) and recompute != "none" else ()
    offered = levels_for(recompute, measured or None if levels is None else levels)
    if isinstance(work, Costs) and work.shares:
        shares, work = shares or work.shares, replace(work, shares=())
    if shares and (baseline is not None or sharded is not None):
        raise InputError(
            "microbatches of unequal cost are planned by neither a baseline nor with weights in shards: leave one of the two out"
        )
    if offered:
        beside = {"baseline": baseline is not None, "sharded": sharded is not None}
        refuse_beside_recomputation([name for name, is_given in beside.items() if is_given])
    problems = problems_of(work, num_microbatches, memory, tried, objective, sharded, shares)
    if offered and shares:
        return _plan_unequal_again(problems, offered, as_budget(seconds, evaluations), seed, progress)
    if offered:
        started, again = perf_counter(), plan_recomputing(problems, offered, as_budget(seconds, evaluations), seed, progress)
        return replace(_plan_of(again.attempts, started, again.compiling), simple=None, bought=again.bought)
    if shares:
        return _plan_unequal(problems, as_budget(seconds, evaluations), seed, progress)
    if baseline is not None:
        started = perf_counter()
        return _plan_of(_all_by(baseline, problems, as_budget(seconds, evaluations)), started)
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
    """The plan over `problems`, by the name of their placement, started from `seeds` or else from the published schedules.

    Where weights are sharded, alike in all problems, a quarter of the seconds is for gathers.
    """
    started, given = perf_counter(), seeds or {}
    sharded = next((problem.sharded for problem in problems.values()), None)
    whole, budget = budget, budget if sharded is None else budget._replace(seconds=0.75 * budget.seconds)
    attempts: list[Attempt] = []
    compiling = 0.0
    with CtrlC() as ctrl_c:
        for name, problem in problems.items():
            attempts.append(start_attempt(name, problem, budget.share(len(problems)), given.get(name)))
        compiling = compile_search(contenders(attempts), budget)
        attempts = with_sharper_bounds(attempts, budget)
        spent = perf_counter() - started - compiling
        attempts = attempts if budget.is_empty else successive_halving(attempts, budget.share(1, spent=spent), seed, on_progress)
    if not attempts:
        raise KeyboardInterrupt
    answered = [with_serial_schedule(attempt) for attempt in attempts]
    ordered = [replace(attempt, solved=with_weights_ordered(attempt.solved)) for attempt in answered]
    if sharded is None:
        return _plan_of([with_paired_schedule(attempt) for attempt in ordered], started, compiling, ctrl_c.came)
    left = whole._replace(seconds=max(0.0, whole.seconds - (perf_counter() - started - compiling)))
    choice = few_gathers(ordered, sharded, left, seed)
    return replace(_plan_of(ordered, started, compiling, ctrl_c.came), simple=None, few_gathers=choice)


UNEQUAL_PLACEMENTS = 3
"""Placements on which orders of microbatches of unequal cost are searched for: those that are best where all are alike."""


def _plan_unequal(problems: Mapping[str, Problem], budget: Budget, seed: int, on_progress: ProgressCallback | None) -> Plan:
    """The plan for microbatches of unequal cost: a half of the budget is for them as if they were alike, the rest for their order."""
    started = perf_counter()
    found = plan_problems({name: alike(problem) for name, problem in problems.items()}, budget.share(2), seed, on_progress)
    left = budget.share(2 * UNEQUAL_PLACEMENTS)
    attempts = []
    for place, choice in enumerate(found.choices):
        part = left if place < UNEQUAL_PLACEMENTS and not found.interrupted else Budget(0.0, left.evaluations and 0)
        solved = unequal(problems[choice.name], choice.solved, part, seed)
        attempts.append(Attempt(choice.name, solved, searched=not part.is_empty, interrupted=found.interrupted))
    return _plan_of(attempts, started, found.compiling)


def _plan_unequal_again(
    problems: Mapping[str, Problem], offered: Sequence[Level], budget: Budget, seed: int, on_progress: ProgressCallback | None
) -> Plan:
    """`_plan_unequal` with recomputation: levels are chosen as if microbatches were alike, and R's left out again in their order."""
    started = perf_counter()
    as_alike = {name: alike(problem, offered) for name, problem in problems.items()}
    again = plan_recomputing(as_alike, offered, budget.share(2), seed, on_progress)
    left, nothing = budget.share(2 * (UNEQUAL_PLACEMENTS + 1)), Budget(0.0, budget.evaluations and 0)
    by_placement = {problem.placement: problem for problem in problems.values()}

    def ordered(solved: Solved, part: Budget) -> Solved:
        return unequal(by_placement[solved.problem.placement], solved, part, seed)

    ranked = sorted(again.attempts, key=rank_key)
    without = ordered(again.bought.without, nothing if ranked[0].interrupted else left)
    attempts = []
    for place, attempt in enumerate(ranked):
        part = left if place < UNEQUAL_PLACEMENTS and not attempt.interrupted else nothing
        solved = lightened(ordered(attempt.solved, part), nothing)
        if NONE in offered and solved.problem.placement == without.problem.placement:
            solved = shorter(solved, without)
        attempts.append(replace(attempt, solved=solved, searched=attempt.searched or not part.is_empty))
    chosen = min(attempts, key=rank_key).solved
    full = again.bought.full
    if full is not None:
        full = ordered(full, nothing) if NONE in offered else chosen
    plan = _plan_of(attempts, started, again.compiling)
    return replace(plan, simple=None, bought=Bought(without, full, chosen))


def _plan_of(attempts: Sequence[Attempt], started: float, compiling: float = 0.0, interrupted: bool = False) -> Plan:
    ranked = sorted(attempts, key=rank_key)
    cut_short = interrupted or any(attempt.interrupted for attempt in ranked)
    simple = None if cut_short else simple_choice(ranked)
    return Plan(explained(ranked), perf_counter() - started - compiling, compiling, simple, cut_short)


def explained(ranked: Sequence[Attempt]) -> tuple[Choice, ...]:
    """The attempts, the best first, with the reason why each stands where it does."""
    reasons = notes([(attempt.solved, attempt.searched) for attempt in ranked])
    return tuple(Choice(a.name, a.solved, note, a.searched) for a, note in zip(ranked, reasons, strict=True))


def _all_by(baseline: str, problems: Mapping[str, Problem], budget: Budget) -> list[Attempt]:
    """The answers of a paper's planner, on the placements it has one for. Raises its reason when it has none for any."""
    attempts, refusals = [], []
    for name, problem in problems.items():
        try:
            attempts.append(attempt_by_baseline(name, baseline, problem, budget))
        except InputError as error:
            refusals.append(error)
    if not attempts:
        raise refusals[0]
    return attempts


def problems_of(
    work: Workload | Costs,
    num_microbatches: int,
    memory: float | Limits | None,
    placements: Mapping[str, Placement],
    objective: str,
    sharded: Sharded | None = None,
    shares: Sequence[float] = (),
) -> dict[str, Problem]:
    """The problem on each placement, by its name. Raises `InputError` for a part that cannot be used."""
    aim, problems = Objective.named(objective), {}
    for name, placement in placements.items():
        costs = work.costs(placement) if isinstance(work, Workload) else work
        costs.require_fit(placement, "the placement")
        costs = replace(costs, shares=tuple(shares) or costs.shares)
        limits = _limits(work, memory) or room_for_all(placement, costs, num_microbatches)
        workload = work if isinstance(work, Workload) else None
        problems[name] = Problem(placement, num_microbatches, costs, limits, aim, workload, sharded=sharded)
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
    costs = costs.scaled(max(costs.shares)) if costs.shares else costs
    for rank, after_f, after_b in zip(placement.routes[0], costs.held_after_f, costs.held_after_b, strict=True):
        held[rank] += num_microbatches * max(after_f, after_b)
    if parts := dict(costs.further).get(HELD_OF_HEAD):
        held = [size + num_microbatches * parts[stage] for size, stage in zip(held, parts_on(placement), strict=True)]
    return Limits(tuple(held))


def as_budget(seconds: float, evaluations: int | None) -> Budget:
    """The budget these give; raises `InputError` for one that is negative or not finite."""
    for name, value in (("seconds", seconds), ("evaluations", evaluations)):
        if value is not None and (not isfinite(value) or value < 0):
            raise InputError(f"{name} to search must be a finite number >= 0, got {value}")
    return Budget(seconds, evaluations)
