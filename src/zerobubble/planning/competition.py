"""The search over placements: problems are solved on each, compete for the budget, and the winner gets the reasons.

`solve` searches on one placement. `plan_problems` starts an attempt on each, drops those whose bound proves that they cannot win, and
divides the budget among the others by successive halving (`rounds`). `compete` chooses the search for what is planned: a published planner,
recomputation, microbatches of unequal cost, or fused backward passes. The lower bound of each placement makes dropping it sound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from math import isfinite
from time import perf_counter

from zerobubble.arguments import BYTES, NUMBER, WHOLE, Wanted, either, optional, takes, wrong
from zerobubble.bounds.overlap import fusing_saves
from zerobubble.costs import NONE, UNIT_BYTES, Costs, Level, Limits
from zerobubble.errors import InputError, ScheduleError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Placement, Schedule
from zerobubble.planning.answer import Choice, Plan, Status
from zerobubble.planning.attempt import (
    PASSES_WITHOUT_CLOCK,
    Attempt,
    Budget,
    ProgressCallback,
    left_out,
    shorter,
    start_attempt,
    with_bound,
    with_list_schedule,
    with_paired_schedule,
    with_serial_schedule,
    with_sharper_bound,
)
from zerobubble.planning.by_baseline import attempt_by_baseline, plan_by_baseline
from zerobubble.planning.forward_only import forward_attempts
from zerobubble.planning.in_steps import improve_in_steps, one_pass_problems
from zerobubble.planning.placements import ANY, Placements, family, placements_to_try
from zerobubble.planning.problem.head import HEAD_BYTES, parts_on
from zerobubble.planning.problem.problem import Objective, Problem, microbatch_bytes
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import RANK_BYTES, Workload, limits_for
from zerobubble.planning.recompute.plan import RecomputeSavings, plan_recomputing, with_levels
from zerobubble.planning.recompute.reduction import with_less_recompute
from zerobubble.planning.rounds import CtrlC, compile_search, notes, open_attempts, rank_key, successive_halving, with_sharper_bounds
from zerobubble.planning.seeds import estimate_of_best_seed, ranked_seeds
from zerobubble.planning.shards.few_gathers import few_gathers
from zerobubble.planning.transforms import fused_variants
from zerobubble.planning.unequal.plan import plan_unequal, with_equal_microbatches
from zerobubble.planning.weight_order import with_weights_ordered
from zerobubble.schedules import SCHEDULES

SECONDS = 5.0
"""Default seconds to search."""

MICROBATCHES = NUMBER._replace(words="a number of microbatches")
MEMORY = either(
    MICROBATCHES, Wanted("bytes such as '40GB' or '37.5GiB'", lambda given: isinstance(given, str) and BYTES.accepts(given)), Limits
)
"""The memory limit of a rank: microbatches of all its stages, bytes as text, or the bytes of each rank."""
Memory = float | str | Limits


@takes(problem=Problem, seconds=optional(NUMBER), seed=WHOLE, evaluations=optional(WHOLE), baseline=optional(str))
@garbage_collection_paused()
def solve(
    problem: Problem,
    *,
    seconds: float | None = None,
    seed: int = 0,
    evaluations: int | None = None,
    baseline: str | None = None,
    seeds: Sequence[Schedule] = (),
    progress: ProgressCallback | None = None,
) -> Plan:
    """Finds the shortest schedule for `problem` in `seconds` (5), or with `evaluations` schedules played, which is deterministic.

    Seeds, search and the final check share the seconds. Compilation does not count. With a budget of 0 the answer is the best of
    `seeds` and the published schedules. `baseline` names a planner of the papers to use instead. Ctrl-C returns the best so far. The answer
    is verified and played in plain Python. Raises `InputError` for a negative budget, for both `seconds` and `evaluations`, and for a
    divided head or a host, which `zb.plan` plans.

    >>> import zerobubble as zb
    >>> problem = zb.planning.Problem(zb.Placement.vee(2), 4, zb.Costs.uniform(4), zb.Limits((4_000_000,) * 2))
    >>> zb.planning.solve(problem, seconds=0).status.value
    'optimal'
    """
    if problem.has_divided_head:
        raise InputError("solve does not plan a divided head", remedy="use zb.plan(head=...)")
    if problem.host is not None:
        raise InputError("solve does not plan offload to a host", remedy="use zb.plan(host=...)")
    name, budget = problem.placement.name, as_budget(seconds, evaluations)
    if problem.is_forward_only and baseline is None:
        return forward_attempts({name: problem})[0].plan
    if baseline is not None:
        return attempt_by_baseline(name, baseline, problem, budget).plan
    if problem.sharded is not None:
        return plan_problems({name: problem}, budget, seed, progress, {name: chain(seeds, ranked_seeds(problem, budget.for_seeds))})
    started = perf_counter()
    attempt = start_attempt(name, problem, budget, chain(seeds, ranked_seeds(problem, budget.for_seeds)))
    with suppress(KeyboardInterrupt):
        compiling = compile_search([attempt], budget)
        attempt = with_sharper_bound(attempt, budget)
        spent = perf_counter() - started - compiling
        if not budget.is_empty:
            attempt = with_list_schedule(improve_in_steps(attempt, budget.share(1, spent=spent), seed, progress))
    attempt = with_serial_schedule(attempt)
    return with_paired_schedule(replace(attempt, plan=with_weights_ordered(attempt.plan))).plan


def compete(
    problems: Mapping[str, Problem],
    budget: Budget,
    seed: int,
    *,
    progress: ProgressCallback | None = None,
    baseline: str | None = None,
    offered: Sequence[Level] = (),
) -> Plan:
    """The plan over `problems` (by name of placement), by this planner or a `baseline`, with the recompute levels `offered`."""
    started = perf_counter()
    are_alike = not any(problem.costs.shares for problem in problems.values())
    if baseline is not None:
        attempts, savings = plan_by_baseline(baseline, problems, budget, seed, offered)
        found = _plan_of(attempts, started)
        return replace(found, simple=found.simple if are_alike and not offered else None, savings=savings)
    if all(problem.is_forward_only for problem in problems.values()):
        return plan_problems(problems, budget, seed, progress)
    if (offered or not are_alike) and any(fusing_saves(problem.costs) for problem in problems.values()):
        return _plan_fused(problems, offered, budget, seed, progress)
    if offered and are_alike:
        recomputed = plan_recomputing(problems, offered, budget, seed, progress)
        return replace(_plan_of(recomputed.attempts, started, recomputed.compiling), simple=None, savings=(recomputed.savings,))
    if offered:
        return _plan_unequal_with_recompute(problems, offered, budget, seed, progress)
    if not are_alike:
        return _plan_unequal(problems, budget, seed, progress)
    return plan_problems(problems, budget, seed, progress)


def placements_for(work: Workload | Costs, given: Placements | None) -> dict[str, Placement]:
    """The placements to try for `work`, by name: those `given`, or all for a workload, or the one that the costs know.

    Raises `InputError` for an unknown name, and for costs of stages without one placement.
    """
    if isinstance(work, Workload):
        return placements_to_try(ANY if given is None else given, work.num_ranks)
    known = work.placement if given is None else given
    if isinstance(known, str) and work.placement is not None and known != ANY:
        known = family(known, work.placement.num_ranks)
    if not isinstance(known, Placement):
        stages = work.num_stages
        even = f"Placement.vee({stages // 2}) or " if stages % 2 == 0 else ""
        remedy = f"give it, such as placements={even}Placement.linear({stages}), or plan a Workload"
        raise InputError("costs of {stages} stages need one placement", stages=stages, remedy=remedy)
    return placements_to_try(known, known.num_ranks)


@garbage_collection_paused()
def plan_problems(
    problems: Mapping[str, Problem],
    budget: Budget,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
    seeds: Mapping[str, Iterable[Schedule]] | None = None,
) -> Plan:
    """The plan over `problems` (by name of placement), started from `seeds` or else from the published schedules.

    If weights are sharded, in all problems alike, a quarter of the seconds is for gathers.
    """
    started, given = perf_counter(), seeds or {}
    if all(problem.is_forward_only for problem in problems.values()):
        return _plan_of(forward_attempts(problems), started, is_short=True)
    sharded = next((problem.sharded for problem in problems.values()), None)
    whole, budget = budget, budget if sharded is None else budget._replace(seconds=0.75 * budget.seconds)
    attempts: list[Attempt] = []
    compiling = 0.0
    with CtrlC() as ctrl_c:
        for attempt in _started(problems, budget, given):
            attempts.append(attempt)
        compiling = compile_search(open_attempts(attempts), budget)
        attempts = with_sharper_bounds(attempts, budget)
        spent = perf_counter() - started - compiling
        attempts = attempts if budget.is_empty else successive_halving(attempts, budget.share(1, spent=spent), seed, on_progress)
    if not attempts:
        raise KeyboardInterrupt
    answered = [attempt if attempt.is_left_out else with_serial_schedule(attempt) for attempt in attempts]
    ordered = [replace(attempt, plan=with_weights_ordered(attempt.plan)) for attempt in answered]
    if sharded is None:
        is_short = not budget.lasts_for_seeds(sum(problem.num_passes for problem in problems.values()))
        return _plan_of([with_paired_schedule(attempt) for attempt in ordered], started, compiling, ctrl_c.came, is_short)
    left = whole._replace(seconds=max(0.0, whole.seconds - (perf_counter() - started - compiling)))
    choice = few_gathers(ordered, left, seed)
    found = replace(_plan_of(ordered, started, compiling, ctrl_c.came), simple=None)
    if choice is None:
        return found
    return found.with_winner(choice.chosen.plan, choice)


def _started(problems: Mapping[str, Problem], budget: Budget, given: Mapping[str, Iterable[Schedule]]) -> Iterator[Attempt]:
    """Starts an attempt on each placement, with a first schedule.

    If the budget is too short for all, the most promising by bounds and closed forms come first, and those for which no time is left are
    left out. One schedule is always made: the first that half the budget lasts for, or else the smallest.
    """
    whole, started = budget.share(len(problems)), perf_counter()
    if budget.lasts_for_seeds(sum(problem.num_passes for problem in problems.values())):
        yield from (start_attempt(name, problem, whole, given.get(name)) for name, problem in problems.items())
        return
    bounds = {name: problem.bound() for name, problem in problems.items()}
    names = sorted(problems, key=lambda name: estimate_of_best_seed(problems[name], bounds[name].time))
    feasible = [name for name in names if not problems[name].shortage_reason]
    smallest = min(feasible, key=lambda name: problems[name].num_passes, default=names[0])
    first = next((name for name in feasible if budget.lasts_for_seeds(problems[name].num_passes)), smallest)
    for name in (first, *(other for other in names if other != first)):
        left = budget._replace(seconds=budget.seconds - 2 * (perf_counter() - started))
        if name == first or name not in feasible or (left.seconds > 0 and left.lasts_for_seeds(problems[name].num_passes)):
            yield start_attempt(name, problems[name], whole, given.get(name), bounds[name])
        else:
            yield left_out(name, problems[name], bounds[name])


UNEQUAL_PLACEMENTS = 3
"""Placements searched for microbatches of unequal cost: those with the shortest list schedules."""


def _plan_unequal(problems: Mapping[str, Problem], budget: Budget, seed: int, on_progress: ProgressCallback | None) -> Plan:
    """The plan for microbatches of unequal cost. A quarter of the budget plans them as if equal, the rest as they are.

    List schedules on each placement decide which are searched, since the best for equal microbatches may be far from it.
    """
    started = perf_counter()
    found = plan_problems(
        {name: with_equal_microbatches(problem) for name, problem in problems.items()}, budget.share(4), seed, on_progress
    )
    nothing = budget.emptied
    listed = {choice.name: (choice.plan, plan_unequal(problems[choice.name], choice.plan, nothing, seed)) for choice in found.choices}
    feasible = sorted((name for name, (_, made) in listed.items() if made.time is not None), key=lambda name: listed[name][1].time or 0)
    searched = [] if budget.is_empty or found.interrupted else feasible[:UNEQUAL_PLACEMENTS]
    attempts = []
    for name, (equal, plan) in listed.items():
        if name in searched:
            further = plan_unequal(problems[name], equal, budget.part(0.75 / len(searched)), seed)
            plan = with_bound(shorter(plan, further), further.bound)
        attempts.append(Attempt(name, plan, searched=name in searched, interrupted=found.interrupted))
    return _plan_of(attempts, started, found.compiling)


def _plan_unequal_with_recompute(
    problems: Mapping[str, Problem], offered: Sequence[Level], budget: Budget, seed: int, on_progress: ProgressCallback | None
) -> Plan:
    """`_plan_unequal` with recomputation: levels are chosen for equal microbatches, then R's are removed where the order permits."""
    started = perf_counter()
    equal = {name: with_equal_microbatches(problem, offered) for name, problem in problems.items()}
    recomputed = plan_recomputing(equal, offered, budget.share(2), seed, on_progress)
    left, nothing = budget.share(2 * (UNEQUAL_PLACEMENTS + 1)), budget.emptied
    by_placement = {problem.placement: problem for problem in problems.values()}

    def ordered(plan: Plan, part: Budget) -> Plan:
        return plan_unequal(by_placement[plan.problem.placement], plan, part, seed)

    ranked = sorted(recomputed.attempts, key=rank_key)
    without = ordered(recomputed.savings.without, nothing if ranked[0].interrupted else left)
    attempts = []
    for place, attempt in enumerate(ranked):
        part = left if place < UNEQUAL_PLACEMENTS and not attempt.interrupted else nothing
        plan = with_less_recompute(ordered(attempt.plan, part), nothing)
        if NONE in offered and plan.problem.placement == without.problem.placement:
            plan = with_bound(shorter(plan, without), max(plan.bound, without.bound))
        attempts.append(replace(attempt, plan=plan, searched=attempt.searched or not part.is_empty))
    chosen = min(attempts, key=rank_key).plan
    full = recomputed.savings.full
    if full is not None:
        full = ordered(full, nothing) if NONE in offered else chosen
    found = _plan_of(attempts, started, recomputed.compiling)
    return replace(found, simple=None, savings=(RecomputeSavings(without, full, chosen),))


def _plan_fused(
    problems: Mapping[str, Problem], offered: Sequence[Level], budget: Budget, seed: int, on_progress: ProgressCallback | None
) -> Plan:
    """The plan with recomputation or shares if a BW takes less than B and W, which the searches for these do not support.

    Each search runs for split backward passes, for whole ones, and with the times of the bound. In each result, all B and W are joined, or
    only adjacent ones, or none: the shortest variant that fits wins.
    """
    started = perf_counter()
    split_problems = {name: tuple(one_pass_problems(problem)) for name, problem in problems.items()}
    variants = [
        {name: each[place % len(each)] for name, each in split_problems.items()} for place in range(max(map(len, split_problems.values())))
    ]
    found = [compete(each, budget.share(len(variants)), seed, progress=on_progress, offered=offered) for each in variants]
    by_placement = {problem.placement: problem for problem in problems.values()}

    def best(plans: Iterable[Plan]) -> Plan:
        return min((_joined(plan, by_placement[plan.placement]) for plan in plans), key=lambda plan: rank_key(Attempt("", plan)))

    attempts = []
    for name in problems:
        choices = [choice for each in found for choice in each.choices if choice.name == name]
        plan, cut_short = best(choice.plan for choice in choices), any(each.interrupted for each in found)
        attempts.append(Attempt(name, plan, searched=any(choice.searched for choice in choices), interrupted=cut_short))
    joined = replace(_plan_of(attempts, started, sum(each.compiling for each in found)), simple=None)
    saved = [savings for each in found if (savings := each.saving(RecomputeSavings)) is not None]
    if not saved:
        return joined
    without, full = best(savings.without for savings in saved), [savings.full for savings in saved if savings.full is not None]
    return replace(joined, savings=(RecomputeSavings(without, best(full) if full else None, replace(joined, choices=())),))


def _joined(plan: Plan, problem: Problem) -> Plan:
    """Converts a plan with passes one at a time to a plan for `problem`, whose BW may take less than B and W.

    Returns the shortest that fits.
    """
    recomputed = plan.problem.recomputation
    target = problem if recomputed is None else with_levels(problem, recomputed.offered, *recomputed.chosen)
    bound = target.bound()
    if plan.order is None:
        return replace(plan, problem=target, bound=bound)
    named = plan.order.name
    ways = [
        Plan.from_schedule(target, bound, replace(made, name=named), plan.seconds, f"{plan.how}, {made.name}")
        for made in fused_variants(plan.order, target)
    ]
    return min(ways, key=lambda way: rank_key(Attempt("", way)))


def _plan_of(
    attempts: Sequence[Attempt], started: float, compiling: float = 0.0, interrupted: bool = False, is_short: bool = False
) -> Plan:
    """The plan of these attempts; no simple choice is computed if time `is_short`."""
    ranked = sorted(attempts, key=rank_key)
    cut_short = interrupted or any(attempt.interrupted for attempt in ranked)
    simple = None if cut_short or is_short else simple_choice(ranked)
    seconds = perf_counter() - started - compiling
    choices = explained(ranked)
    return replace(choices[0].plan, choices=choices, seconds=seconds, compiling=compiling, simple=simple, interrupted=cut_short)


def explained(ranked: Sequence[Attempt]) -> tuple[Choice, ...]:
    """The attempts as choices, the best first, with the reason for their rank."""
    reasons = notes([(attempt.plan, attempt.searched) for attempt in ranked])
    return tuple(Choice(a.name, a.plan, note, a.searched) for a, note in zip(ranked, reasons, strict=True))


def problems_of(
    work: Workload | Costs,
    num_microbatches: int,
    memory: Memory | None,
    placements: Mapping[str, Placement],
    objective: str,
    sharded: Sharded | None = None,
    shares: Sequence[float] = (),
) -> dict[str, Problem]:
    """The problem on each placement, by name. Raises `InputError` for arguments that cannot be used."""
    aim, problems = Objective.named(objective), {}
    for name, placement in placements.items():
        costs = work.costs(placement) if isinstance(work, Workload) else work
        costs.require_fit(placement, "the placement")
        costs = replace(costs, shares=tuple(shares) or costs.shares)
        limits = _limits(work, memory, placement) or ample_limits(placement, costs, num_microbatches)
        workload = work if isinstance(work, Workload) else None
        problems[name] = Problem(placement, num_microbatches, costs, limits, aim, workload, sharded=sharded)
    return problems


def _limits(work: Workload | Costs, memory: Memory | None, placement: Placement) -> Limits | None:
    """The limits given by `memory`, None without one. Raises `InputError` for bytes if the bytes of a microbatch are unknown."""
    if memory is None or isinstance(memory, Limits):
        return memory
    if not isinstance(memory, str):
        return work.limits(memory) if isinstance(work, Workload) else limits_for(memory, microbatch_bytes(placement, work))
    if set(work.held_after_f) == {RANK_BYTES if isinstance(work, Workload) else UNIT_BYTES}:
        needed = f"the bytes of a microbatch, which {type(work).__name__} made of times lack"
        remedy = "give memory in microbatches, or work with bytes, such as from Pipeline.profile"
        raise InputError("{argument} {got!r} needs {needed}", argument="memory", got=memory, needed=needed, remedy=remedy)
    return Limits((memory,) * placement.num_ranks)


def ample_limits(placement: Placement, costs: Costs, num_microbatches: int) -> Limits:
    """Returns limits that never bind."""
    held = [1] * placement.num_ranks
    costs = costs.scaled(max(costs.shares)) if costs.shares else costs
    for rank, after_f, after_b in zip(placement.routes[0], costs.held_after_f, costs.held_after_b, strict=True):
        held[rank] += num_microbatches * max(after_f, after_b)
    if parts := dict(costs.further).get(HEAD_BYTES):
        held = [size + num_microbatches * parts[stage] for size, stage in zip(held, parts_on(placement), strict=True)]
    return Limits(tuple(held))


def has_ample_memory(problem: Problem) -> bool:
    """Whether the limits never bind, as if no limit was given."""
    return problem.limits == ample_limits(problem.placement, problem.costs, problem.num_microbatches)


def as_budget(seconds: float | None, evaluations: int | None) -> Budget:
    """The budget, by default `SECONDS`; raises `InputError` if it is negative or not finite, and for both kinds of it."""
    if seconds is not None and evaluations is not None:
        raise InputError("{argument} and {other} contradict each other", argument="evaluations", other="seconds", remedy="give one")
    for name, value in (("seconds", seconds), ("evaluations", evaluations)):
        if value is not None and (not isfinite(value) or value < 0):
            raise wrong(name, value, "a finite number >= 0")
    return Budget(SECONDS if seconds is None else seconds, evaluations)


CLOSE = 0.005
"""A published schedule counts as nearly as short if it is longer by at most this fraction."""

MOST_ASKED = 3
"""Published schedules that are played as published."""


def simple_choice(attempts: Sequence[Attempt]) -> Plan | None:
    """The shortest published schedule that is nearly as short as the best of `attempts`, which are ranked.

    It is simulated as published, with B and W fused if it fuses them. None if there is no such schedule, or if the best one is published.
    """
    best = attempts[0].plan
    if best.time is None or best.order is None or best.schedule.name in SCHEDULES:
        return None
    near = [attempt for attempt in attempts if _is_close(attempt.plan, best)]
    seeds = [plan for attempt in near for plan in (*attempt.published, *_published(attempt))]
    nearest = sorted((plan for plan in seeds if _is_close(plan, best)), key=_length)
    played = chain.from_iterable(_as_published(plan) for plan in nearest[:MOST_ASKED])
    return min((plan for plan in played if _is_close(plan, best)), key=_length, default=None)


def _is_close(plan: Plan, best: Plan) -> bool:
    return plan.time is not None and best.time is not None and plan.time <= (1 + CLOSE) * best.time


def _length(plan: Plan) -> tuple[int, int]:
    return plan.time or 0, plan.makespan or 0


def _published(attempt: Attempt) -> Iterator[Plan]:
    """Makes published schedules for an attempt that has none yet, because its heuristic met the bound."""
    problem = attempt.plan.problem
    if attempt.plan.status is not Status.OPTIMAL or attempt.published or problem.num_passes > PASSES_WITHOUT_CLOCK:
        return
    for schedule in islice(ranked_seeds(problem), MOST_ASKED):
        try:
            yield Plan.from_schedule(problem, attempt.plan.bound, schedule, 0.0, schedule.name)
        except ScheduleError:
            continue


def _as_published(plan: Plan) -> Iterator[Plan]:
    """The schedule as it was published, if that fits the memory."""
    problem, name = plan.problem, plan.how
    placement = problem.placement
    made = SCHEDULES[name].build(placement.num_ranks, problem.num_microbatches, placement.stages_per_rank)
    try:
        yield Plan.from_schedule(problem, plan.bound, replace(made, placement=placement), 0.0, name)
    except ScheduleError:
        return
