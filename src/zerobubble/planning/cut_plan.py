"""Layers cut with any other axis: a cut for the layers alone, what the search for the rest finds on it, and moves of layers from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any

from zerobubble.costs import Costs, Level
from zerobubble.errors import InputError, ScheduleError
from zerobubble.offload.choice import with_other_costs
from zerobubble.partition import Cuts, Layer, LayerCut
from zerobubble.partition.descent import moves
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Budget, ProgressCallback, Search
from zerobubble.planning.competition import room_for_all
from zerobubble.planning.head_plan import PlacedHead
from zerobubble.planning.layer_plan import CutSavings, LayerProblem, plan_layers, show_cuts
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.recompute.plan import with_levels
from zerobubble.planning.rounds import CtrlC
from zerobubble.planning.shards.few_gathers import FewGathers
from zerobubble.planning.shards.priced import Priced

ROUNDS, WIDTH = 3, 2
"""Rounds of moves of layers at most, and how many cuts get a search in each."""


@dataclass(frozen=True)
class Beside:
    """What is planned with the layers: shares of microbatches, weights in shards, levels offered, a head, offload to the host."""

    shares: tuple[float, ...] = ()
    sharded: Sharded | None = None
    offered: tuple[Level, ...] = ()
    placed: PlacedHead | None = None
    has_host: bool = False

    def problem(self, layer_problem: LayerProblem, cut: LayerCut) -> Problem:
        """The problem for a cut, without the axes that steps of the search add; raises `InputError` where parameters alone fill a rank."""
        problem = layer_problem.problem(cut)
        costs = replace(problem.costs, shares=self.shares)
        is_roomy = layer_problem.limits is None
        limits = room_for_all(problem.placement, costs, problem.num_microbatches) if is_roomy else problem.limits
        shards = None if self.sharded is None else self.sharded.of_layers(cut.layers, cut.cuts, cut.placement)
        return replace(problem, costs=costs, limits=limits, sharded=shards)

    def starts(self, layer_problem: LayerProblem) -> Iterator[LayerCut]:
        """Further cuts to start from: for a whole head in the last layer, and for forwards that keep less."""
        layers = layer_problem.layers
        others: list[Sequence[Layer]] = []
        if self.placed is not None:
            whole = self.placed.head.whole(_costs_of(layers[-1]))
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
    beside: Beside,
    search: Search,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Cuts of layers with all that `search` plans for, never worse than one after the other with half of the budget each.

    That is made first: the layers cut for themselves, and the search on their cuts. Cuts that suit the other axes are tried, too, such
    as those with a whole head in the last stage. Then layers of the winner move: each cut nearby is judged with the plan that there is, and
    the most promising are searched. It takes up to three times the budget. Raises `InputError` where nothing fits.
    """
    started, half = perf_counter(), budget.share(2)
    for level in beside.offered:
        if isinstance(level.extra, tuple) or isinstance(level.kept, tuple):
            raise InputError(f"level {level.name!r} has shares by stage, which the cut of layers decides: give one number for all stages")
    if beside.sharded is not None:
        one = next(iter(layer_problems.values()))
        beside.sharded.of_layers(one.layers, (), one.placement)  # raises where they are those of other layers
    alone = _layers_alone(layer_problems, half, seed, progress)
    families = _families(layer_problems, alone, beside)
    if not families:
        raise InputError("no cut of the layers leaves room for activations: give more memory, or use more ranks")
    parts = [half, *[budget.share(4)] * (len(families) - 1)]
    found, refused = _found(families, parts, search, seed)
    able = [plan for plan in found if plan.order is not None]
    if not able:
        raise refused[0] if refused else InputError(f"nothing can run with balanced cuts: {found[0].reason}")
    first = min(able, key=_price)
    layer_problem = next(one for one in layer_problems.values() if one.placement == first.placement)
    tried = [first]
    with CtrlC() as ctrl_c:
        if not any(plan.interrupted for plan in found):
            show_cuts(tried, first.placement.name, progress)
            for better in _moved(layer_problem, first, beside, search, half, seed):
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
    """The plan of each family, and why the others have none: their cuts may not suit what they do not know of, such as gathers."""
    found, refused = [], []
    for family, part in zip(families, parts, strict=True):
        try:
            found.append(search(family, part, seed))
        except InputError as error:
            refused.append(error)
    return found, refused


def _layers_alone(layer_problems: Mapping[str, LayerProblem], budget: Budget, seed: int, progress: ProgressCallback | None) -> Plan | None:
    """The plan for the layers without any other axis; None where none fits so."""
    with suppress(InputError):
        return plan_layers(layer_problems, budget, seed, progress)
    return None


def _families(layer_problems: Mapping[str, LayerProblem], alone: Plan | None, beside: Beside) -> list[dict[str, Problem]]:
    """Problems on all placements that can be cut: on the cuts of the layers alone first, and then on others, each cut once."""
    cuts: dict[str, list[LayerCut]] = {name: [] for name in layer_problems}
    for choice in () if alone is None else alone.choices:
        if choice.plan.cut is not None:
            cuts[choice.name].append(choice.plan.cut)
    for name, layer_problem in layer_problems.items():
        known = [cut.cuts for cut in cuts[name]]
        cuts[name] += [cut for cut in beside.starts(layer_problem) if cut.cuts not in known]
    families: list[dict[str, Problem]] = []
    for place in range(max(map(len, cuts.values()))):
        family = {}
        for name, own in cuts.items():
            with suppress(InputError, IndexError):
                family[name] = beside.problem(layer_problems[name], own[place])
        families += [family] if family else []
    return families


def _moved(layer_problem: LayerProblem, first: Plan, beside: Beside, search: Search, budget: Budget, seed: int) -> Iterator[Plan]:
    """Plans on other cuts: those near the best that its plan is shortest on, each after a search."""
    ends = inf if budget.evaluations is not None else perf_counter() + budget.seconds
    best, quick, known = first, budget.share(ROUNDS * WIDTH), {_cuts(first)}
    for turn in range(ROUNDS):
        near = []
        for cuts in moves(_cuts(best), len(layer_problem.layers)):
            if perf_counter() > ends:
                break
            moved = None if cuts in known else _on_cut(layer_problem, best, cuts, beside)
            near += [] if moved is None else [moved]
        before = best
        for moved in sorted(near, key=_price)[:WIDTH]:
            known.add(_cuts(moved))
            if moved.bound.time >= _price(best)[0] and _price(moved) >= _price(best):
                continue
            with suppress(InputError):
                cut = moved.cut
                assert cut is not None, "plans for layers have a cut"
                found = search({first.placement.name: beside.problem(layer_problem, cut)}, quick, seed + turn)
                if found.order is not None and _price(found) <= _price(moved):
                    moved = found
            yield moved
            best = min(best, moved, key=_price)
        if best is before or perf_counter() > ends:
            return


def _on_cut(layer_problem: LayerProblem, plan: Plan, cuts: Cuts, beside: Beside) -> Plan | None:
    """The plan with its levels, head and offloads on other cuts, played anew; None where it does not fit."""
    cut, known = plan.cut, plan.problem
    assert cut is not None, "plans for layers have a cut"
    try:
        problem = beside.problem(layer_problem, replace(cut, cuts=cuts))
        if known.head is not None and beside.placed is not None:
            problem = beside.placed.divided(problem) if known.has_divided_head else beside.placed.whole(problem)
        if known.recomputation is not None:
            problem = with_levels(problem, known.recomputation.offered, *known.recomputation.chosen)
        problem = replace(problem, host=known.host)
        offloads = with_other_costs(plan.schedule, problem.costs, problem.limits, plan.offloads) if plan.offloads else ()
        found = Plan.of(problem, problem.bound(), plan.schedule, 0.0, f"{plan.how.removesuffix(MOVED)}{MOVED}", offloads)
        if problem.sharded is None:
            return found
        priced = Priced.of(found)
        gathers = plan.saving(FewGathers)
        return found if gathers is None else replace(found, savings=(gathers.of_order(priced),))
    except (InputError, ScheduleError):
        return None


MOVED = ", the order of other cuts"


def _price(plan: Plan) -> tuple[int, int]:
    """The objective with gathers, where there are some, and the makespan."""
    gathers = plan.saving(FewGathers)
    return (plan.time or 0) if gathers is None else gathers.chosen.time, plan.makespan or 0


def _cuts(plan: Plan) -> Cuts:
    assert plan.cut is not None, "plans for layers have a cut"
    return plan.cut.cuts


def _bounded(layer_problem: LayerProblem, plan: Plan) -> LayerCut:
    """The cut with the bound on its slowest rank that holds for layers alone, whatever their memory."""
    free = layer_problem.unlimited
    assert plan.cut is not None, "plans for layers have a cut"
    return replace(plan.cut, bound=free.bound, reason=free.reason)


def _bare(plan: Plan) -> Plan:
    return replace(plan, choices=(), savings=())


def _left_out(alone: Plan | None) -> tuple[str, ...]:
    savings = None if alone is None else alone.saving(CutSavings)
    return () if savings is None else savings.left_out
