"""The search on one placement if joining passes of a row saves time: fused BW (`Costs.fused`), overlapped pairs (`Costs.hidden`).

First, up to three searches order passes one at a time: with B and W split; with fused backward passes; and with the time of W reduced to
that of BW minus B. Adjacent B and W of their results are joined. Then annealing starts from the best of each; its moves join passes into
steps (one `Step` each), split steps, and move them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

from zerobubble.bounds.overlap import fusing_saves
from zerobubble.costs import Costs
from zerobubble.ir import Kind, Schedule
from zerobubble.kinds import traits_of
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import CHECK_SECONDS, Attempt, Budget, ProgressCallback, improve, shorter, start_attempt
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.seeds import overlapped_seeds
from zerobubble.planning.transforms import fused_variants

EACH_SEARCH, EACH_BEFORE_PAIRS = 0.2, 0.1
"""Share of the budget for each search of passes one at a time. The second applies if pairs save time, which these searches ignore."""


def improve_in_steps(attempt: Attempt, budget: Budget, seed: int = 0, on_progress: ProgressCallback | None = None) -> Attempt:
    """Improves an attempt like `improve`; if steps of several passes save time, the search also chooses these. Never worse."""
    plan = attempt.plan
    problem = plan.problem
    if not problem.plans_steps or budget.is_empty or not attempt.can_improve:
        return improve(attempt, budget, seed, on_progress)
    started, starts, interrupted = perf_counter(), [], False
    each = EACH_BEFORE_PAIRS if any(problem.costs.hidden) else EACH_SEARCH
    part = Budget(each * budget.seconds, budget.evaluations and int(each * budget.evaluations))
    searches = list(one_pass_problems(problem))
    for variant in searches:
        found = _searched(attempt.name, variant, part, seed, on_progress)
        interrupted |= found.interrupted
        joined = [] if found.plan.order is None else list(fused_variants(found.plan.order, problem))
        for made in joined:
            plan = shorter(plan, Plan.from_schedule(problem, plan.bound, made, plan.seconds, f"{found.plan.how}, {made.name}"))
        starts += joined
        if interrupted:
            break
    if not interrupted and plan.time != plan.bound.time:
        left = max(0.0, budget.seconds - (perf_counter() - started) - CHECK_SECONDS * problem.num_passes)
        counted = budget.evaluations and budget.evaluations - len(searches) * (part.evaluations or 0)
        plan, interrupted = _with_steps(plan, [*starts, *attempt.seeds], Budget(left, counted), seed)
    seconds = attempt.plan.seconds + perf_counter() - started
    return replace(attempt, plan=replace(plan, seconds=seconds), searched=True, interrupted=interrupted)


def one_pass_problems(problem: Problem) -> Iterator[Problem]:
    """Yields the problem without steps of several passes: with B and W split, with BW only if fusing saves, and `without_savings`."""
    costs = problem.costs
    split = replace(costs, hidden=(), further=tuple(column for column in costs.further if column[0] != traits_of(Kind.BW).fused_time))
    yield _with_costs(problem, split)
    if fusing_saves(costs):
        without_shares, nothing = replace(costs, shares=()), (0,) * costs.num_stages
        whole = tuple(without_shares.time(Kind.BW, stage) for stage in range(costs.num_stages))
        yield _with_costs(problem, replace(split, backward=whole, weight=nothing, held_after_b=nothing))
    yield problem.without_savings


def _with_costs(problem: Problem, costs: Costs) -> Problem:
    return replace(problem, costs=costs, workload=None, cut=None, trains=True)


def _searched(name: str, problem: Problem, budget: Budget, seed: int, on_progress: ProgressCallback | None) -> Attempt:
    """Starts and improves an attempt at a problem without steps of several passes; all of it counts toward `budget`."""
    started = perf_counter()
    begun = start_attempt(name, problem, budget)
    return improve(begun, budget._replace(seconds=max(0.0, budget.seconds - (perf_counter() - started))), seed, on_progress)


def _with_steps(plan: Plan, others: list[Schedule], budget: Budget, seed: int) -> tuple[Plan, bool]:
    """Returns the plan after a search for steps that starts from its schedule and `others`, and whether Ctrl-C ended it."""
    from zerobubble.planning.search import search_in_steps

    problem = plan.problem
    starts = [schedule for schedule in (plan.order, *overlapped_seeds(problem), *others) if schedule is not None]
    found = search_in_steps(problem, plan.bound.time, starts, seconds=budget.seconds, seed=seed, evaluations=budget.evaluations)
    if found is None:
        return plan, False
    name = f"planned by {found.how}"
    return shorter(plan, Plan.from_schedule(problem, plan.bound, replace(found.schedule, name=name), plan.seconds, name)), found.interrupted
