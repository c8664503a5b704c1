"""Cuts of layers planned together with other axes, by alternating search and local moves.

The layers are cut alone first, and the search for the other axes runs on those cuts. Then layers move: each cut a few moves away is judged
by replaying the current plan on it, and the most promising ones are searched. Every plan is verified on its own cut, and the best one seen
wins, so the result is never worse than planning one after the other with half of the budget each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter
from time import perf_counter
from typing import Any

from zerobubble.bounds import Bound
from zerobubble.costs import Costs, Level
from zerobubble.errors import InputError, ScheduleError
from zerobubble.offload.choice import with_other_costs
from zerobubble.partition import Cuts, Layer, LayerCut
from zerobubble.partition.local_search import moves
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Budget, ProgressCallback, Search, with_bound
from zerobubble.planning.axes.head import HeadParts
from zerobubble.planning.layer_plan import CutSavings, LayerProblem, plan_layers, show_cuts
from zerobubble.planning.problem.from_work import ample_limits
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.rounds import CtrlC
from zerobubble.planning.shards.few_gathers import FewGathers
from zerobubble.planning.shards.plan_with_gathers import PlanWithGathers

ROUNDS, WIDTH = 3, 2
"""Rounds of moves of layers, and how many cuts are searched in each."""
Price = tuple[int, int]
"""The objective of a plan, with gathers if there are some, and its makespan, both in ns."""


@dataclass(frozen=True)
class OtherAxes:
    """The axes planned along with the layers: shares, sharded weights, recompute levels, a head, offload."""

    shares: tuple[float, ...] = ()
    sharded: Sharded | None = None
    offered: tuple[Level, ...] = ()
    head_parts: HeadParts | None = None
    has_host: bool = False

    def problem(self, layer_problem: LayerProblem, cut: LayerCut) -> Problem:
        """The problem for a cut, without the axes that other searches add; raises `InputError` if parameters alone fill a rank."""
        problem = layer_problem.problem(cut)
        costs = replace(problem.costs, shares=self.shares)
        has_ample_memory = layer_problem.limits is None
        limits = ample_limits(problem.placement, costs, problem.num_microbatches) if has_ample_memory else problem.limits
        shards = None if self.sharded is None else self.sharded.for_layers(cut.layers, cut.cuts, cut.placement)
        return replace(problem, costs=costs, limits=limits, sharded=shards)

    def starts(self, layer_problem: LayerProblem) -> Iterator[LayerCut]:
        """Further cuts to start from: for a whole head in the last layer, and for forwards that keep less."""
        layers = layer_problem.layers
        others: list[Sequence[Layer]] = []
        if self.head_parts is not None:
            whole = self.head_parts.head.whole(_costs_of(layers[-1]))
            heavier: dict[str, Any] = {name: whole.column(name)[0] for name in ("forward", "backward", "weight", "held_after_f")}
            others.append((*layers[:-1], replace(layers[-1], **heavier)))
        if self.offered or self.has_host:
            kept = 0.0 if self.has_host else min(level.mean_kept for level in self.offered)
            others.append([replace(layer, held_after_f=round(kept * layer.held_after_f)) for layer in layers])
        for other in others:
            with suppress(InputError):
                yield replace(layer_problem.cut(other, layer_problem.limits), layers=tuple(layers), bound=0, reason="")


def _costs_of(layer: Layer) -> Costs:
    """The costs of one layer as a stage."""
    forward, backward, weight = (layer.forward,), (layer.backward,), (layer.weight,)
    return Costs(forward, backward, weight, (), (layer.held_after_f,), (layer.held_after_b,))


def plan_cuts(
    layer_problems: Mapping[str, LayerProblem],
    budget: Budget,
    seed: int,
    *,
    others: OtherAxes,
    search: Search,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Plans cuts of layers together with all axes that `search` plans.

    The result is never worse than planning one after the other with half of the budget each.

    The first step does just that: it cuts the layers alone, and the search runs on these cuts. Cuts that suit the other axes are tried,
    too, such as those with a whole head in the last stage. Then layers of the winner move. This takes up to three times the budget. Raises
    `InputError` if nothing fits.
    """
    started, half = perf_counter(), budget.share(2)
    for level in others.offered:
        if isinstance(level.extra, tuple) or isinstance(level.kept, tuple):
            raise InputError(
                "level {name!r} has shares by stage, which the cut of layers decides",
                name=level.name,
                remedy="give one number for all stages",
            )
    if others.sharded is not None:
        one = next(iter(layer_problems.values()))
        others.sharded.for_layers(one.layers, (), one.placement)  # raises where they are those of other layers
    alone = _layers_alone(layer_problems, half, seed, progress)
    families = _families(layer_problems, alone, others)
    if not families:
        raise InputError("no cut of the layers leaves memory for activations", remedy="give more memory, or use more ranks")
    parts = [half, *[budget.share(4)] * (len(families) - 1)]
    found, refused = _found(families, parts, search, seed)
    feasible = [plan for plan in found if plan.order is not None]
    if not feasible:
        raise refused[0] if refused else InputError("nothing can run with balanced cuts: {reason}", reason=found[0].reason)
    first = min(feasible, key=_price)
    layer_problem = next(one for one in layer_problems.values() if one.placement == first.placement)
    tried = [first]
    with CtrlC() as ctrl_c:
        if not any(plan.interrupted for plan in found):
            show_cuts(tried, first.placement.name, progress)
            for better in _moved(layer_problem, first, others, search, half, seed):
                tried.append(better)
                show_cuts(tried, first.placement.name, progress)
    best = min(tried, key=_price)
    limits = layer_problem.limits
    bounded = replace(best, problem=replace(best.problem, cut=_bounded(layer_problem, best)))
    first = replace(first, problem=replace(first.problem, cut=_bounded(layer_problem, first)))
    savings = CutSavings(_bare(first), _bare(bounded), len({_cuts(plan) for plan in tried}), limits, _left_out(alone))
    cut_short = ctrl_c.came or any(plan.interrupted for plan in (*found, *tried))
    choices = best.choices or first.choices
    seconds = perf_counter() - started
    return replace(bounded, choices=choices, savings=(savings, *best.savings), seconds=seconds, interrupted=cut_short, simple=None)


def _found(
    families: Sequence[Mapping[str, Problem]], parts: Sequence[Budget], search: Search, seed: int
) -> tuple[list[Plan], list[InputError]]:
    """The plan of each family of problems, and the errors of those without one, whose cuts may not suit an axis such as gathers."""
    found, refused = [], []
    for family, part in zip(families, parts, strict=True):
        try:
            found.append(search(family, part, seed))
        except InputError as error:
            refused.append(error)
    return found, refused


def _layers_alone(layer_problems: Mapping[str, LayerProblem], budget: Budget, seed: int, progress: ProgressCallback | None) -> Plan | None:
    """The plan for the layers without any other axis; None if none fits."""
    with suppress(InputError):
        return plan_layers(layer_problems, budget, seed, progress)
    return None


def _families(layer_problems: Mapping[str, LayerProblem], alone: Plan | None, others: OtherAxes) -> list[dict[str, Problem]]:
    """Families of problems, one per placement that can be cut: on the cuts of the layers alone, then on others, each cut once."""
    cuts: dict[str, list[LayerCut]] = {name: [] for name in layer_problems}
    for choice in () if alone is None else alone.choices:
        if choice.plan.cut is not None:
            cuts[choice.name].append(choice.plan.cut)
    for name, layer_problem in layer_problems.items():
        known = [cut.cuts for cut in cuts[name]]
        cuts[name] += [cut for cut in others.starts(layer_problem) if cut.cuts not in known]
    families: list[dict[str, Problem]] = []
    for place in range(max(map(len, cuts.values()))):
        family = {}
        for name, own in cuts.items():
            with suppress(InputError, IndexError):
                family[name] = others.problem(layer_problems[name], own[place])
        families += [family] if family else []
    return families


def _moved(layer_problem: LayerProblem, first: Plan, others: OtherAxes, search: Search, budget: Budget, seed: int) -> Iterator[Plan]:
    """Plans on nearby cuts: those on which the current plan is shortest, each after a search."""
    ends = inf if budget.evaluations is not None else perf_counter() + budget.seconds
    best, quick, known = first, budget.share(ROUNDS * WIDTH), {_cuts(first)}
    for turn in range(ROUNDS):
        near = []
        for cuts in moves(_cuts(best), len(layer_problem.layers)):
            if perf_counter() > ends:
                break
            candidate = None if cuts in known else _on_cut(layer_problem, best, cuts, others)
            near += [] if candidate is None else [candidate]
        before = best
        for _, replayed in sorted(near, key=itemgetter(0))[:WIDTH]:
            moved = _with_bounds(replayed, best)
            known.add(_cuts(moved))
            if moved.bound.time >= _price(best)[0] and _price(moved) >= _price(best):
                continue
            with suppress(InputError):
                cut = moved.cut
                assert cut is not None, "plans for layers have a cut"
                found = search({first.placement.name: others.problem(layer_problem, cut)}, quick, seed + turn)
                if found.order is not None and _price(found) <= _price(moved):
                    moved = found
            yield moved
            best = min(best, moved, key=_price)
        if best is before or perf_counter() > ends:
            return


def _on_cut(layer_problem: LayerProblem, plan: Plan, cuts: Cuts, others: OtherAxes) -> tuple[Price, Plan] | None:
    """The plan with its levels, head and offloads on other cuts, replayed, and its price; None if it does not fit.

    It has no bound yet, because bounding a cut takes longer than replaying an order on it, and most cuts are not searched.
    """
    cut, known = plan.cut, plan.problem
    assert cut is not None, "plans for layers have a cut"
    try:
        problem = others.problem(layer_problem, replace(cut, cuts=cuts))
        if known.head is not None and others.head_parts is not None:
            problem = others.head_parts.divided(problem) if known.has_divided_head else others.head_parts.whole(problem)
        if known.recomputation is not None:
            problem = problem.offering(known.recomputation.offered, *known.recomputation.chosen)
        problem = replace(problem, host=known.host)
        offloads = with_other_costs(plan.schedule, problem.costs, problem.limits, plan.offloads) if plan.offloads else ()
        found = Plan.from_schedule(problem, Bound(0, ""), plan.schedule, 0.0, f"{plan.how.removesuffix(MOVED)}{MOVED}", offloads)
        if problem.sharded is None:
            return _price(found), found
        with_gathers = PlanWithGathers.from_plan(found)
        return _price(found) if plan.saving(FewGathers) is None else (with_gathers.time, found.makespan or 0), found
    except (InputError, ScheduleError):
        return None


def _with_bounds(replayed: Plan, plan: Plan) -> Plan:
    """The result of `plan` replayed by `_on_cut`, with its bounds."""
    found = with_bound(replayed, replayed.problem.bound())
    gathers = plan.saving(FewGathers)
    return found if gathers is None else replace(found, savings=(gathers.for_order(PlanWithGathers.from_plan(found)),))


MOVED = ", the order of other cuts"


def _price(plan: Plan) -> Price:
    gathers = plan.saving(FewGathers)
    return (plan.time or 0) if gathers is None else gathers.chosen.time, plan.makespan or 0


def _cuts(plan: Plan) -> Cuts:
    assert plan.cut is not None, "plans for layers have a cut"
    return plan.cut.cuts


def _bounded(layer_problem: LayerProblem, plan: Plan) -> LayerCut:
    """The cut with the bound on its slowest rank that holds for layers alone with any memory."""
    free = layer_problem.unlimited_cut
    assert plan.cut is not None, "plans for layers have a cut"
    return replace(plan.cut, bound=free.bound, reason=free.reason)


def _bare(plan: Plan) -> Plan:
    return replace(plan, choices=(), savings=())


def _left_out(alone: Plan | None) -> tuple[str, ...]:
    savings = None if alone is None else alone.saving(CutSavings)
    return () if savings is None else savings.left_out
