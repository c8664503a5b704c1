"""Cuts of layers into stages as an axis: balanced cuts to start from, then cuts on which orders that were found are shorter.

Candidates start on the cut that balances the times of ranks best within the memory, and on cuts that suit other axes, such as a whole head
in the last stage. After each round of search, layers move across the boundaries of stages: each cut a move away is priced by replaying an
order with its costs, and the cut to which the shortest ones lead becomes a candidate. Bounds hold on one cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from operator import add
from time import perf_counter
from typing import Any, ClassVar

from zerobubble.costs import Costs, Level, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.offload import offload_faults
from zerobubble.partition import Layer, LayerCut, activation_limits, cut_layers, parameter_bytes, stage_costs
from zerobubble.partition.balancing import fitting_cut, quick_cuts
from zerobubble.partition.layers import Cuts
from zerobubble.partition.local_search import moves
from zerobubble.partition.speeds import Links, Speeds
from zerobubble.planning.answer import Plan, Saving
from zerobubble.planning.attempt import PlanProgress, ProgressCallback
from zerobubble.planning.axes.axis import ChoicesOfAxis, Contest
from zerobubble.planning.candidate import Candidate
from zerobubble.planning.problem.from_work import Memory, ample_limits
from zerobubble.planning.problem.head import Head
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.ranking import rank_key
from zerobubble.planning.replay import Replay
from zerobubble.planning.shards.few_gathers import FewGathers
from zerobubble.planning.shards.plan_with_gathers import PlanWithGathers
from zerobubble.simulation import memory_faults
from zerobubble.units import NS_PER_MS, counted, ms, show_bytes, show_ms, show_percent

NAME, BALANCED, MOVED = "layers", "balanced", "moved"

MOST_WITH_GATHERS = 4
"""Cuts that are priced with gathers in each round of moves: those on which the order is shortest without them."""


@dataclass(frozen=True)
class UncutLayers:
    """Layers to be cut. Together with a cut, they form a `Problem`. `limits` bound parameters and activations together.

    `speeds` has the speeds of the ranks, as in `cut_layers`, and `links` those of the links. A problem stores them in its cut.
    """

    layers: tuple[Layer, ...]
    num_microbatches: int
    limits: Limits | None
    objective: Objective
    speeds: Speeds = ()
    links: Links = ()
    shares: tuple[float, ...] = ()
    sharded: Sharded | None = None

    def costs(self, cuts: Cuts, placement: Placement) -> Costs:
        """The costs of the stages of these cuts."""
        return replace(stage_costs(self.layers, cuts, placement, self.speeds, self.links), shares=self.shares)

    def limits_of(self, cuts: Cuts, placement: Placement, costs: Costs) -> Limits:
        """The memory for activations; raises `InputError` if parameters alone fill a rank."""
        if self.limits is None:
            return ample_limits(placement, costs, self.num_microbatches)
        return activation_limits(self.layers, cuts, placement, self.limits)

    def problem(self, cut: LayerCut) -> Problem:
        """The problem for `cut`; raises `InputError` if parameters alone fill a rank."""
        costs = self.costs(cut.cuts, cut.placement)
        limits = self.limits_of(cut.cuts, cut.placement, costs)
        return Problem(cut.placement, self.num_microbatches, costs, limits, self.objective, cut=cut)

    def cut(self, placement: Placement, until: float, layers: Sequence[Layer] = ()) -> LayerCut:
        """The best cut that leaves memory for one microbatch, of other `layers` if given; raises as `cut_layers` does.

        Once the clock has passed `until`, it is the cut that descent from an even one reaches, if that fits.
        """
        own = layers or self.layers
        known = quick_cuts(own, placement) if perf_counter() > until else None
        found = fitting_cut(own, placement, self.limits, 1, self.speeds, known) or cut_layers(own, placement, self.limits, 1, self.speeds)
        found = replace(found, links=self.links)
        return replace(found, layers=self.layers, bound=0, reason="") if layers else found

    def balanced(self, placement: Placement, until: float) -> Problem:
        """The problem of a balanced cut, which leaves memory for the number of microbatches with the lowest bound, the fewest of several.

        A cut that leaves memory for only one may balance times better, but its ranks would wait for each other. Once the clock has passed
        `until`, no other number is tried. Raises `InputError` if nothing fits.
        """
        first = self.cut(placement, until)
        best = self.problem(first)
        held, most = 2, 0 if self.limits is None else min(placement.num_ranks, self.num_microbatches)
        while held <= most and perf_counter() < until:
            fitting = fitting_cut(self.layers, placement, self.limits, held, self.speeds, first.cuts)
            if fitting is None:
                break
            best = min(best, self.problem(replace(fitting, links=self.links)), key=_promise)
            held *= 2
        return best


def equal_limits(layers: Sequence[Layer], num_ranks: int, memory: float) -> Limits:
    """Bytes per rank: an equal share of all parameters and of the activations of `memory` microbatches."""
    parameters, held = (sum(getattr(layer, name) for layer in layers) for name in ("parameters_bytes", "held_after_f"))
    return Limits((max(1, round((parameters + memory * held) / num_ranks)),) * num_ranks)


def limits_for_layers(layers: Sequence[Layer], num_ranks: int, memory: Memory | None) -> Limits | None:
    """The bytes of each rank for `memory`, in microbatches of an equal share of the layers, or in bytes; None without a limit."""
    if isinstance(memory, str):
        return Limits((memory,) * num_ranks)
    return memory if memory is None or isinstance(memory, Limits) else equal_limits(layers, num_ranks, memory)


@dataclass(frozen=True)
class LayersChoices(ChoicesOfAxis):
    """Cuts of the layers. `starts` are the problems on the first ones, by name of placement, and `left_out` says which cannot be cut.

    The bound on the slowest rank holds for all cuts within the limits `bounding`.
    """

    uncut: UncutLayers
    starts: Mapping[str, tuple[Problem, ...]]
    left_out: tuple[str, ...] = ()
    bounding: Limits | None = None
    order_from: ClassVar[str] = ", the order of other cuts"

    @classmethod
    def on(
        cls,
        placements: Mapping[str, Placement],
        uncut: UncutLayers,
        head: Head | None = None,
        offered: Sequence[Level] = (),
        *,
        has_host: bool = False,
        until: float = inf,
    ) -> LayersChoices:
        """The choices on these placements, with cuts that suit a whole `head`, and forwards that keep less with recomputation or offload.

        Balanced cuts are searched for until the clock passes `until`; then quick ones do.

        Raises `InputError` as `cut_layers` does if no placement can be cut, and for levels that differ between stages.
        """
        for level in offered:
            if isinstance(level.extra, tuple) or isinstance(level.kept, tuple):
                raise InputError(
                    "level {name!r} has shares by stage, which the cut of layers decides",
                    name=level.name,
                    remedy="give one number for all stages",
                )
        if uncut.sharded is not None:
            uncut.sharded.for_layers(uncut.layers, (), next(iter(placements.values())))  # raises if they are those of other layers
        kept = 0.0 if has_host else min((level.mean_kept for level in offered), default=1.0)
        others = list(_for_other_axes(uncut.layers, head, kept))
        starts: dict[str, tuple[Problem, ...]] = {}
        reasons: dict[str, list[str]] = {}
        for name, placement in placements.items():
            made, reason = _starts(uncut, placement, others, until)
            if made:
                starts[name] = made
            else:
                reasons.setdefault(reason, []).append(name)
        left_out = tuple(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        if not starts:
            rest = len(placements) - len(next(iter(reasons.values()), ()))
            more = f"; the other {counted(rest, 'placement')} cannot be cut either" if rest else ""
            raise InputError(f"{left_out[0]}{more}" if left_out else "a plan needs at least one placement to try")
        return cls(uncut, starts, left_out, None if others or uncut.shares else uncut.limits)

    @property
    def problems(self) -> dict[str, Problem]:
        """The problem on the first cut of each placement."""
        return {name: starts[0] for name, starts in self.starts.items()}

    def choices(self, candidate: Candidate) -> Iterator[Candidate]:
        for problem in self.starts[candidate.name]:
            yield candidate.choose(NAME, BALANCED, problem, problem)

    def on_choice_of(self, name: str, plan: Plan) -> Candidate:
        return self._on_cut(name, _cut(plan))

    def _on_cut(self, name: str, cut: LayerCut) -> Candidate:
        """The candidate on a cut, without choices of other axes."""
        problem, known = self.uncut.problem(cut), [start.layers_per_stage for start in self.starts[name]]
        label = BALANCED if problem.layers_per_stage in known else MOVED
        return Candidate(name, problem, problem).choose(NAME, label, problem, problem)

    def near(self, name: str, plan: Plan, until: float) -> Iterator[Candidate]:
        """The cut to which moves lead while the order of `plan` gets shorter, then cuts a move away from it, the shortest first.

        Only cuts on which the order fits, until the clock passes `until`.
        """
        replay, cut = Replay.from_schedule(plan.schedule), _cut(plan)
        time, cuts = replay.time(plan.problem.objective, plan.costs), cut.cuts
        while True:
            priced = sorted(self._priced(replay, plan, cuts, until))
            fitting = (one for one in priced if self._fits(plan, one[1]))
            best = next(fitting, (time, cuts))
            if best[0] >= time or perf_counter() > until:
                break
            time, cuts = best
        if cuts != cut.cuts:
            yield self._on_cut(name, replace(cut, cuts=cuts))
        for _, other in (best, *fitting):
            if other != cut.cuts:
                yield self._on_cut(name, replace(cut, cuts=other))

    def _priced(self, replay: Replay, plan: Plan, cuts: Cuts, until: float) -> Iterator[tuple[int, Cuts]]:
        """The objective in ns of an order on each cut a move away from `cuts`, until the clock passes `until`."""
        for moved in moves(cuts, len(self.uncut.layers)):
            yield replay.time(plan.problem.objective, self._costs(plan, moved)), moved
            if perf_counter() > until:
                return

    def _costs(self, plan: Plan, cuts: Cuts) -> Costs:
        """The costs of the stages of these cuts with the head and the recompute levels of `plan`."""
        costs = plan.problem.with_head(self.uncut.costs(cuts, plan.placement))
        return costs.with_recompute(plan.levels) if plan.levels else costs

    def _fits(self, plan: Plan, cuts: Cuts) -> bool:
        """Whether the order of `plan` with its offloads fits the memory on these cuts."""
        costs = self._costs(plan, cuts)
        try:
            limits = self.uncut.limits_of(cuts, plan.placement, costs)
        except InputError:
            return False
        if plan.offloads:
            return not offload_faults(plan.schedule, costs, plan.offloads, limits)
        return not memory_faults(plan.schedule, costs, limits)

    def finish(self, found: Plan, contest: Contest) -> Plan:
        if found.order is None:
            raise InputError("nothing can run with balanced cuts: {reason}", reason=found.reason)
        moved = self._moved_with_gathers(found, contest) if found.saving(FewGathers) else found
        able = [entry for entry in contest.entries if entry.plans and not entry.candidate.is_compared]
        here = [entry for entry in able if entry.candidate.target.placement == found.placement]
        starts = [entry.best for entry in here if entry.candidate.label(NAME) == BALANCED]
        balanced = moved if _cut(moved).cuts in [_cut(start).cuts for start in starts] else min(starts, key=rank_key)
        winner, balanced = self._with_bound(moved), self._with_bound(replace(balanced, choices=(), savings=()))
        num_cuts = len({_cut(entry.best).cuts for entry in here} | {_cut(moved).cuts})
        savings = CutSavings(balanced, replace(winner, choices=(), savings=()), num_cuts, self.uncut.limits, self.left_out)
        self.show([entry.best for entry in here] + [moved], contest.progress)
        return replace(winner, savings=(savings, *winner.savings), simple=None)

    def show(self, plans: Sequence[Plan], progress: ProgressCallback | None) -> None:
        if progress is not None:
            best, num_cuts = min(plans, key=rank_key), len({_cut(plan).cuts for plan in plans})
            how = f"the best of {counted(num_cuts, 'cut')} of the layers"
            progress(PlanProgress.for_problem(best.placement.name, best.problem, best.time or 0, best.bound.time, how))

    def _moved_with_gathers(self, found: Plan, contest: Contest) -> Plan:
        """The plan after moves of layers that shorten it with its gathers, which `near` ignores."""
        end, gathers = contest.budget.end(contest.started), found.saving(FewGathers)
        while gathers is not None and contest.is_free and perf_counter() < end:
            near = sorted(self._priced(Replay.from_schedule(found.schedule), found, _cut(found).cuts, end))
            made = [self._with_gathers(found, cuts) for _, cuts in near[:MOST_WITH_GATHERS]]
            better = min((one for one in made if one is not None), key=lambda one: one.time, default=gathers.chosen)
            if better.time >= gathers.chosen.time:
                break
            gathers = gathers.for_order(replace(better, plan=contest.bounded(better.plan)))
            others = (gathers if isinstance(saving, FewGathers) else saving for saving in found.savings)
            found = found.with_winner(gathers.chosen.plan, *others)
        return found

    def _with_gathers(self, plan: Plan, cuts: Cuts) -> PlanWithGathers | None:
        """The order of `plan` on other cuts, with its gathers; None if it does not fit."""
        assert self.uncut.sharded is not None, "there are weights to gather"
        costs, cut = self._costs(plan, cuts), replace(_cut(plan), cuts=cuts)
        sharded = self.uncut.sharded.for_layers(cut.layers, cuts, cut.placement)
        with suppress(InputError):
            limits = self.uncut.limits_of(cuts, plan.placement, costs)
            moved = plan.in_other(replace(plan.problem, costs=costs, limits=limits, cut=cut, sharded=sharded), self.order_from)
            return None if moved is None else PlanWithGathers.from_plan(moved)
        return None

    def _with_bound(self, plan: Plan) -> Plan:
        """The plan with the bound on the slowest rank of any cut that can run."""
        known = _cut(plan)
        free = fitting_cut(known.layers, plan.placement, self.bounding, 1, known.speeds, known.cuts)
        assert free is not None, "the plan runs on one"
        return replace(plan, problem=replace(plan.problem, cut=replace(known, bound=free.bound, reason=free.reason)))


def _promise(problem: Problem) -> tuple[bool, int]:
    """Whether nothing fits, such as the largest of unequal microbatches, and the bound in ns."""
    return bool(problem.shortage_reason), problem.bound().time


def _starts(uncut: UncutLayers, placement: Placement, others: Sequence[Sequence[Layer]], until: float) -> tuple[tuple[Problem, ...], str]:
    """The problems on cuts to start from, and the reason why there is no balanced one."""
    made, reason = dict[tuple[int, ...], Problem](), ""
    try:
        balanced = uncut.balanced(placement, until)
        made[balanced.layers_per_stage] = balanced
    except InputError as error:
        reason = str(error)
    for other in others:
        with suppress(InputError):
            problem = uncut.problem(uncut.cut(placement, until, other))
            made.setdefault(problem.layers_per_stage, problem)
    return tuple(made.values()), reason


def _for_other_axes(layers: Sequence[Layer], head: Head | None, kept: float) -> Iterator[Sequence[Layer]]:
    """Layers whose balanced cuts suit a whole head in the last one, and forwards that keep only the share `kept` of their bytes."""
    if head is not None:
        last, times = layers[-1], (round(time * NS_PER_MS) for time in head.times)
        forward, backward, weight = map(add, times, (last.forward, last.backward, last.weight))
        held = last.held_after_f + round(head.held)
        yield (*layers[:-1], replace(last, forward=forward, backward=backward, weight=weight, fused=0, held_after_f=held))
    if kept < 1:
        yield [replace(layer, held_after_f=round(kept * layer.held_after_f)) for layer in layers]


def _cut(plan: Plan) -> LayerCut:
    assert plan.cut is not None, "plans for layers have a cut"
    return plan.cut


@dataclass(frozen=True, repr=False)
class CutSavings(Saving):
    """The savings from moving the cuts of the winner: `balanced` is its plan on balanced cuts, `found` is the one on its own cuts.

    `cuts_planned` is the number of cuts of the winner that were planned. `limits` are bytes for parameters and activations together.
    `left_out` has the reasons of placements that cannot be cut.
    """

    axis = "layers"

    balanced: Plan
    found: Plan
    cuts_planned: int
    limits: Limits | None = None
    left_out: tuple[str, ...] = ()

    @property
    def cut(self) -> LayerCut:
        """The cut of the winner."""
        assert self.found.cut is not None, "plans for layers have a cut"
        return self.found.cut

    @property
    def balanced_cut(self) -> LayerCut:
        """The balanced cut of the winner's placement."""
        assert self.balanced.cut is not None, "plans for layers have a cut"
        return self.balanced.cut

    @property
    def rank_bytes(self) -> tuple[tuple[int, int], ...]:
        """For each rank of the winner: bytes of parameters, gradients and optimizer state, and peak bytes of activations."""
        return tuple(zip(parameter_bytes(self.cut.layers, self.cut.cuts, self.cut.placement), self.found.peaks, strict=True))

    @property
    def gain(self) -> float:
        """Share of the balanced plan's time that other cuts and further search save, without gathers; 0 if they make it longer."""
        return max(0.0, 1 - self.found.time / self.balanced.time) if self.found.time and self.balanced.time else 0.0

    def _summary(self) -> str:
        return f"{show_percent(self.gain)} less time than with balanced cuts"

    def __str__(self) -> str:
        cut = self.cut
        return "\n".join(
            [
                f"The winner has stages of {_sizes(cut)} layers: {self._gain_text}.",
                *self._speeds_text(),
                f"Its slowest rank takes {show_ms(cut.slowest)} for a microbatch, {cut.excess:.3f} x an even share; no cut on this "
                f"placement is below {cut.least_excess:.3f} x: {cut.reason}.",
                f"{cut.heaviest_text}.",
                *self._bytes_text(),
                "Bound and reason of a placement are for its cuts.",
                *(f"Left out: {reason}" for reason in self.left_out),
            ]
        )

    @property
    def _gain_text(self) -> str:
        if self.cut.cuts != self.balanced_cut.cuts:
            return f"{show_percent(self.gain)} shorter than the best plan on balanced cuts, stages of {_sizes(self.balanced_cut)}"
        searched_on = f"; searching on saved {show_percent(self.gain)}" if self.gain > 0 else ""
        return f"no plan on other cuts was found to be shorter than on these balanced ones{searched_on}"

    def _speeds_text(self) -> Iterator[str]:
        """The layers of each rank, if ranks have different speeds."""
        if self.cut.speeds:
            ranks = ", ".join(f"{layers} at {speed:g}" for layers, speed in zip(self.cut.rank_layers, self.cut.speeds, strict=True))
            yield (
                f"Layers of each rank at its speed: {ranks}. An even share is proportional to speed. The total time of the layers depends "
                "on the cut, so placements are sorted by step, not by bubble."
            )

    def _bytes_text(self) -> Iterator[str]:
        """Memory of the fullest rank, if bytes are limited."""
        if self.limits is not None and any(layer.parameters_bytes for layer in self.cut.layers):
            rank, (parameters, activations) = max(enumerate(self.rank_bytes), key=lambda held: sum(held[1]))
            memory = f"of {show_bytes(self.limits.memory[rank])}, {show_bytes(parameters)} of them for parameters"
            yield f"The fullest rank, {rank}, holds {show_bytes(parameters + activations)} {memory} with gradients and optimizer state."

    def to_dict(self) -> dict[str, Any]:
        """Both cuts, the gain as a share, the placements left out, and the quality of the winner's cut, times in ms."""
        return {
            "cuts": list(self.cut.cuts),
            "balanced_cuts": list(self.balanced_cut.cuts),
            "gain": self.gain,
            "left_out": list(self.left_out),
            "slowest_ms": ms(self.cut.slowest),
            "excess": self.cut.excess,
            "bound_ms": ms(self.cut.bound),
            "reason": self.cut.reason,
            **({"speeds": list(self.cut.speeds), "layers_per_rank": list(self.cut.rank_layers)} if self.cut.speeds else {}),
            **({"links": list(self.cut.links)} if self.cut.links else {}),
            "heaviest": self.cut.heaviest_text,
            "rank_bytes": [list(held) for held in self.rank_bytes],
        }


def _sizes(cut: LayerCut) -> str:
    return " ".join(str(len(stage)) for stage in cut.stages)
