"""Cuts of layers and schedule chosen together, by a beam search over cuts that starts from balanced ones.

A move shifts layers across the boundaries of stages. Neighboring cuts are first priced by replaying the current order with their costs;
those whose lower bound leaves no improvement are discarded, and the cheapest ones get a short search. The balanced plan is one of the
candidates, so the result is never worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError, ScheduleError
from zerobubble.ir import Placement, Schedule
from zerobubble.partition import Cuts, Layer, LayerCut, activation_limits, cut_layers, parameter_bytes, stage_costs
from zerobubble.partition.balancing import fitting_cut
from zerobubble.partition.local_search import moves
from zerobubble.partition.speeds import Links, Speeds
from zerobubble.planning.answer import Plan, Saving
from zerobubble.planning.attempt import Attempt, Budget, PlanProgress, ProgressCallback, improve, with_sharper_bound
from zerobubble.planning.competition import compete
from zerobubble.planning.explanation import explained
from zerobubble.planning.problem.from_work import Memory
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.replay import Replay
from zerobubble.planning.rounds import CtrlC
from zerobubble.units import counted, ms, show_bytes, show_ms, show_percent

BEAM_WIDTH = 4
"""Cuts that get a short search in a round, and how many of them the next round starts from."""

ROUNDS = 6
"""Maximum rounds of the beam search."""


@dataclass(frozen=True, repr=False)
class CutSavings(Saving):
    """The savings from moving the cuts of the winner: `balanced` is its plan on balanced cuts, `found` is the one on its own cuts.

    `cuts_planned` is the number of cuts of the winner that were planned. `limits` are bytes for parameters and activations together.
    `left_out` has the reasons of placements that cannot be cut. Other placements have balanced cuts.
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
        """Share of the balanced plan's time that other cuts and further search save."""
        return 1 - self.found.time / self.balanced.time if self.found.time and self.balanced.time else 0.0

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
                "Other placements have balanced cuts. Bound and reason of a placement are for its cuts.",
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


@dataclass(frozen=True)
class LayerProblem:
    """Layers to be cut. Together with a cut, they form a `Problem`. `limits` bound parameters and activations together.

    `speeds` has the speeds of the ranks, as in `cut_layers`, and `links` those of the links. A problem stores them in its cut.
    """

    layers: Sequence[Layer]
    placement: Placement
    num_microbatches: int
    limits: Limits | None
    objective: Objective
    speeds: Speeds = ()
    links: Links = ()

    def cut(self, layers: Sequence[Layer], limits: Limits | None) -> LayerCut:
        """The best cut of `layers`, which may replace those of the problem; raises as `cut_layers` does."""
        return replace(cut_layers(layers, self.placement, limits, speeds=self.speeds), links=self.links)

    @cached_property
    def feasible_cut(self) -> LayerCut:
        """The best cut that leaves memory for one microbatch, without which nothing runs; raises as `cut_layers` does."""
        return self.cut(self.layers, self.limits)

    @cached_property
    def unlimited_cut(self) -> LayerCut:
        """The best cut with any memory; raises as `cut_layers` does."""
        return self.cut(self.layers, None)

    def fitting(self, held: int | Schedule) -> LayerCut | None:
        """The best cut that leaves memory for what is held, as in `cut_layers`; None if none is found."""
        found = fitting_cut(self.layers, self.placement, self.limits, held, self.speeds, self.feasible_cut)
        return None if found is None else replace(found, links=self.links)

    def costs(self, cuts: Cuts) -> Costs:
        """The costs of the stages of these cuts."""
        return stage_costs(self.layers, cuts, self.placement, self.speeds, self.links)

    def problem(self, cut: LayerCut) -> Problem:
        """The problem for `cut`; raises `InputError` if parameters alone fill a rank."""
        if self.limits is not None:
            limits = activation_limits(self.layers, cut.cuts, self.placement, self.limits)
        else:
            all_layers = sum(max(layer.held_after_f, layer.held_after_b) for layer in self.layers)
            limits = Limits((self.num_microbatches * all_layers + 1,) * self.placement.num_ranks)
        return Problem(self.placement, self.num_microbatches, self.costs(cut.cuts), limits, self.objective, cut=cut)


def equal_limits(layers: Sequence[Layer], num_ranks: int, memory: float) -> Limits:
    """Bytes per rank: an equal share of all parameters and of the activations of `memory` microbatches."""
    parameters, held = (sum(getattr(layer, name) for layer in layers) for name in ("parameters_bytes", "held_after_f"))
    return Limits((max(1, round((parameters + memory * held) / num_ranks)),) * num_ranks)


def problems_of_layers(
    layers: Sequence[Layer],
    placements: Mapping[str, Placement],
    num_microbatches: int,
    memory: Memory | None,
    objective: Objective,
    speeds: Speeds = (),
    links: Links = (),
) -> dict[str, LayerProblem]:
    """The layers to be cut on each placement, within `memory` in microbatches of an equal share of them, or in bytes."""
    num_ranks = next(iter(placements.values())).num_ranks
    if isinstance(memory, str):
        memory = Limits((memory,) * num_ranks)
    limits = memory if memory is None or isinstance(memory, Limits) else equal_limits(layers, num_ranks, memory)
    shared = num_microbatches, limits, objective, speeds, links
    return {name: LayerProblem(layers, placement, *shared) for name, placement in placements.items()}


def plan_layers(
    layer_problems: Mapping[str, LayerProblem], budget: Budget, seed: int = 0, progress: ProgressCallback | None = None
) -> Plan:
    """Plans cuts of layers and a schedule; never longer than the best plan on balanced cuts with the same budget.

    That plan is made first. Then the winner's cuts move, which may take the same time again: half for short searches on other cuts, half
    for the best cuts found. Ctrl-C ends the first or the second part with the best so far. Raises `InputError` as `cut_layers` does if no
    placement can be cut.
    """
    limits = next(iter(layer_problems.values())).limits
    starts, left_out = _balanced(layer_problems)
    balanced = compete(starts, budget, seed, progress=progress)
    winner, *others = balanced.choices
    if winner.plan.order is None:
        raise InputError("nothing can run with balanced cuts: {reason}", reason=winner.plan.reason)
    began = perf_counter()
    start = Candidate.from_attempt(Attempt(winner.name, winner.plan))
    tried = [start]
    with CtrlC() as ctrl_c:
        show_cuts([winner.plan], winner.name, progress)
        for candidate in _beam_search(layer_problems[winner.name], start, budget.share(2), seed, progress):
            tried.append(candidate)
            show_cuts([each.attempt.plan for each in tried], winner.name, progress)
            if candidate.attempt.interrupted:
                break
    best = min(tried, key=lambda candidate: candidate.time)
    cut_short = balanced.interrupted or ctrl_c.came or any(candidate.attempt.interrupted for candidate in tried)
    bounded = best.attempt if cut_short else with_sharper_bound(best.attempt, budget.share(2))
    answers = [Attempt(winner.name, bounded.plan, searched=not budget.is_empty)]
    answers += [Attempt(other.name, other.plan, searched=other.searched) for other in others]
    seconds = balanced.seconds + perf_counter() - began
    found = replace(balanced, choices=explained(answers), seconds=seconds, interrupted=cut_short)
    savings = CutSavings(winner.plan, bounded.plan, len({candidate.cuts for candidate in tried}), limits, left_out)
    return found.with_winner(bounded.plan, savings)


def show_cuts(plans: Sequence[Plan], name: str, progress: ProgressCallback | None) -> None:
    """Calls `progress` with the shortest plan of a search over cuts so far, and the number of different cuts."""
    if progress is not None:
        best, cuts = min(plans, key=lambda plan: plan.time or 0), {plan.cut.cuts for plan in plans if plan.cut}
        how = f"the best of {counted(len(cuts), 'cut')} of the layers"
        progress(PlanProgress.for_problem(name, best.problem, best.time or 0, best.bound.time, how))


def _balanced(layer_problems: Mapping[str, LayerProblem]) -> tuple[dict[str, Problem], tuple[str, ...]]:
    """The problem of the balanced cut on each placement that has one, and the reasons of the others; raises if none has one."""
    starts: dict[str, Problem] = {}
    names: dict[str, list[str]] = {}
    for name, layer_problem in layer_problems.items():
        try:
            starts[name] = _start(layer_problem)
        except InputError as error:
            names.setdefault(str(error), []).append(name)
    left_out = tuple(f"{', '.join(alike)}: {error}" for error, alike in names.items())
    if not starts:
        others = len(layer_problems) - len(next(iter(names.values()), ()))
        more = f"; the other {counted(others, 'placement')} cannot be cut either" if others else ""
        raise InputError(f"{left_out[0]}{more}" if left_out else "a plan needs at least one placement to try")
    return starts, left_out


def _start(layer_problem: LayerProblem) -> Problem:
    """The problem of a balanced cut.

    The cut leaves memory for the number of microbatches that gives the lowest bound; if several do, for the fewest.

    A cut that leaves memory for only one may balance times better, but its ranks would wait for each other. Raises `InputError` if nothing
    fits.
    """
    limits = layer_problem.limits
    best = layer_problem.problem(layer_problem.feasible_cut)
    held, most = 2, 0 if limits is None else min(layer_problem.placement.num_ranks, layer_problem.num_microbatches)
    while held <= most and (fitting := layer_problem.fitting(held)) is not None:
        best = min(best, layer_problem.problem(fitting), key=lambda problem: problem.bound().time)
        held *= 2
    return best


@dataclass(frozen=True)
class Candidate:
    """Cuts and the attempt on them, which has at least a schedule."""

    cuts: Cuts
    attempt: Attempt

    @classmethod
    def from_attempt(cls, attempt: Attempt) -> Candidate:
        """The attempt with the cuts of its problem."""
        assert attempt.plan.cut is not None, "plans for layers have a cut"
        return cls(attempt.plan.cut.cuts, attempt)

    @property
    def time(self) -> int:
        return self.attempt.plan.time or 0

    def searched(self, budget: Budget, seed: int, on_progress: ProgressCallback | None) -> Candidate:
        """The same cuts after a search, never worse."""
        return Candidate(self.cuts, improve(self.attempt, budget, seed, on_progress))


class Neighbor(NamedTuple):
    """Cuts one move away from planned ones, the order planned there, and its objective (ns) on the cuts here."""

    time: int
    cuts: Cuts
    schedule: Schedule


def _beam_search(
    layer_problem: LayerProblem, start: Candidate, budget: Budget, seed: int, on_progress: ProgressCallback | None
) -> Iterator[Candidate]:
    """Other cuts, each after a short search: in each round the most promising neighbors of the round before.

    Last come the best cuts of all, after a search with the other half of the budget.
    """
    quick = budget.share(BEAM_WIDTH * ROUNDS)
    ends = inf if budget.evaluations is not None else perf_counter() + budget.seconds
    beam, known, neighbors = [start], {start.cuts: start}, list(_cut_for_its_order(layer_problem, start))
    for turn in range(ROUNDS):
        best = min(candidate.time for candidate in known.values())
        neighbors += [neighbor for candidate in beam for neighbor in _neighbors(layer_problem, candidate, ends)]
        neighbors = sorted((neighbor for neighbor in neighbors if neighbor.cuts not in known), key=lambda neighbor: neighbor[:2])
        beam = []
        for candidate in islice(_promising(layer_problem, start, neighbors, best, ends), BEAM_WIDTH):
            beam.append(candidate.searched(quick, seed + turn, on_progress))
            yield beam[-1]
        known |= {candidate.cuts: candidate for candidate in beam}
        if perf_counter() > ends or min((candidate.time for candidate in beam), default=best) >= best:
            break
    yield min(known.values(), key=lambda candidate: candidate.time).searched(budget, seed + 1, on_progress)


def _cut_for_its_order(layer_problem: LayerProblem, candidate: Candidate) -> Iterator[Neighbor]:
    """The best cut whose memory the order of `candidate` fits."""
    schedule = candidate.attempt.plan.schedule
    fitting = layer_problem.fitting(schedule)
    if fitting is not None:  # if cuts are found by search, those of `candidate` may be the only ones known to fit
        time = Replay.from_schedule(schedule).time(layer_problem.objective, layer_problem.costs(fitting.cuts))
        yield Neighbor(time, fitting.cuts, schedule)


def _neighbors(layer_problem: LayerProblem, candidate: Candidate, ends: float) -> Iterator[Neighbor]:
    """Every move of layers from the cuts of `candidate`, while time is left."""
    schedule = candidate.attempt.plan.schedule
    replay = Replay.from_schedule(schedule)
    for cuts in moves(candidate.cuts, len(layer_problem.layers)):
        if perf_counter() > ends:
            return
        yield Neighbor(replay.time(layer_problem.objective, layer_problem.costs(cuts)), cuts, schedule)


def _promising(layer_problem: LayerProblem, start: Candidate, neighbors: Iterable[Neighbor], best: int, ends: float) -> Iterator[Candidate]:
    """The neighbors that may be shorter than `best` and whose order fits the memory, each cut once, while time is left."""
    taken: set[Cuts] = set()
    for neighbor in neighbors:
        if perf_counter() > ends:
            return
        plan = None if neighbor.cuts in taken else _as_solved(layer_problem, start, neighbor)
        if plan is not None and plan.bound.time < best:
            taken.add(neighbor.cuts)
            yield Candidate(neighbor.cuts, Attempt(start.attempt.name, plan))


def _as_solved(layer_problem: LayerProblem, start: Candidate, neighbor: Neighbor) -> Plan | None:
    """The order of a neighbor as a plan for its cuts; None if it does not fit the memory."""
    try:
        assert start.attempt.plan.cut is not None, "plans for layers have a cut"
        problem = layer_problem.problem(replace(start.attempt.plan.cut, cuts=neighbor.cuts))
        return Plan.from_schedule(problem, problem.bound(), neighbor.schedule, 0.0, "the order of other cuts")
    except (InputError, ScheduleError):
        return None
