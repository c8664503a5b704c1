"""Cuts of the layers and schedule chosen together: a beam search that starts from balanced cuts and moves layers across them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from zerobubble.arguments import NUMBER, WHOLE, each, instance, optional, takes
from zerobubble.costs import Limits
from zerobubble.display import Displayed
from zerobubble.errors import InputError, ScheduleError
from zerobubble.ir import Placement, Schedule
from zerobubble.partition import Cuts, Layer, LayerCut, activation_limits, cut_layers, parameter_bytes, slices, stage_costs
from zerobubble.partition.balancing import fitting_cut
from zerobubble.partition.descent import moves
from zerobubble.planning.attempt import Attempt, Budget, ProgressCallback, improve, with_sharper_bound
from zerobubble.planning.competition import SECONDS, Plan, as_budget, explained, plan_problems
from zerobubble.planning.problem.problem import Objective, Problem, Solved
from zerobubble.planning.replay import Replay
from zerobubble.planning.rounds import CtrlC
from zerobubble.simulation import peak_memory
from zerobubble.units import counted

BEAM_WIDTH = 4
"""How many cuts get a short search in a round, and how many of them the next round starts from."""

ROUNDS = 6
"""Rounds of the beam search, at most."""


@dataclass(frozen=True, repr=False)
class LayersPlan(Displayed):
    """The cut and the plan found together, and what a balanced cut gives: `cuts_planned` is how many cuts of the winner had a plan made.

    In `plan` the winner has the cut `cut`, the other placements balanced ones. `balanced_cut` and `balanced` are the cut and the plan that
    the winner had before its cuts were moved. `left_out` says of each placement that cannot be cut why.
    """

    cut: LayerCut
    plan: Plan
    balanced_cut: LayerCut
    balanced: Solved
    cuts_planned: int
    left_out: tuple[str, ...] = ()

    def _summary(self) -> str:
        gain = f"{100 * self.gain:.2f} % less time than with balanced cuts"
        return f"{self.solved._summary()}; {gain}"

    def _details(self) -> Iterator[str]:
        yield f"cuts before the layers {', '.join(map(str, self.cuts))}; balanced cuts {', '.join(map(str, self.balanced_cuts))}"
        yield f"the cut {self.cut._summary()}"
        yield from self.left_out
        yield from str(self.plan).split("\n")

    @property
    def cuts(self) -> Cuts:
        """Where the winner is cut."""
        return self.cut.cuts

    @property
    def balanced_cuts(self) -> Cuts:
        """Where the winner is cut if it is balanced."""
        return self.balanced_cut.cuts

    @property
    def solved(self) -> Solved:
        """The winner."""
        return self.plan.best

    @property
    def rank_bytes(self) -> tuple[tuple[int, int], ...]:
        """What each rank holds in the winner: the bytes of parameters, gradients and optimizer state, and the most of activations."""
        assert self.solved.schedule is not None
        parameters = parameter_bytes(self.cut.layers, self.cuts, self.cut.placement)
        return tuple(zip(parameters, peak_memory(self.solved.schedule, self.solved.problem.costs), strict=True))

    @property
    def gain(self) -> float:
        """The share of the balanced plan's time that is saved, by other cuts and by searching on."""
        return 1 - self.solved.time / self.balanced.time if self.solved.time and self.balanced.time else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: both cuts, both times in ns, the gain as a share, and the plan."""
        return {
            "format": "zerobubble layers plan 1",
            "cuts": list(self.cuts),
            "balanced_cuts": list(self.balanced_cuts),
            "time": self.solved.time,
            "balanced_time": self.balanced.time,
            "gain": self.gain,
            "plan": self.solved.to_dict(),
        }


@dataclass(frozen=True)
class LayerProblem:
    """Layers to be placed: with any cuts they are a `Problem`. `limits` bound parameters and activations together."""

    layers: Sequence[Layer]
    placement: Placement
    num_microbatches: int
    limits: Limits | None
    objective: Objective

    def problem(self, cuts: Cuts) -> Problem:
        """The problem for `cuts`; raises `InputError` where parameters alone fill a rank."""
        costs = stage_costs(self.layers, cuts)
        if self.limits is not None:
            limits = activation_limits(self.layers, cuts, self.placement, self.limits)
        else:
            all_layers = sum(max(layer.held_after_f, layer.held_after_b) for layer in self.layers)
            limits = Limits((self.num_microbatches * all_layers + 1,) * self.placement.num_ranks)
        layers_per_stage = tuple(map(len, slices(self.layers, cuts)))
        names = tuple(layer.full_name for layer in self.layers)
        return Problem(
            self.placement,
            self.num_microbatches,
            costs,
            limits,
            self.objective,
            layers_per_stage=layers_per_stage,
            layer_names=names if all(names) else (),
        )


@takes(
    layers=each(Layer),
    placements=instance(Placement, Mapping),
    num_microbatches=WHOLE,
    limits=optional(Limits),
    objective=str,
    seconds=NUMBER,
    seed=WHOLE,
    evaluations=optional(WHOLE),
)
def plan_layers(
    layers: Sequence[Layer],
    placements: Placement | Mapping[str, Placement],
    num_microbatches: int,
    limits: Limits | None = None,
    *,
    objective: str = Objective.SPAN,
    seconds: float = SECONDS,
    seed: int = 0,
    evaluations: int | None = None,
    progress: ProgressCallback | None = None,
) -> LayersPlan:
    """Cuts of `layers` and a schedule, together at most as long as the best plan over `placements` on balanced cuts with the same budget.

    That plan is made first and in full; what follows moves the winner's cuts and may take as long again: half for quick plans of other
    cuts, half for the best cuts found. Ctrl-C ends the first part, or the second, with the best so far. `limits` are bytes for
    parameters and activations. Raises `InputError` as `balance_placement` does, where no placement can be cut.
    """
    named = {placements.name: placements} if isinstance(placements, Placement) else placements
    aim, budget = Objective.named(objective), as_budget(seconds, evaluations)
    layer_problems = {name: LayerProblem(layers, placement, num_microbatches, limits, aim) for name, placement in named.items()}
    starts, left_out = _balanced(layer_problems)
    balanced = plan_problems({name: problem for name, (_, problem) in starts.items()}, budget, seed, progress)
    winner, *others = balanced.choices
    if winner.solved.schedule is None:
        raise InputError(f"nothing can run with balanced cuts: {winner.solved.reason}")
    began, balanced_cut = perf_counter(), starts[winner.name][0]
    tried = [Candidate(balanced_cut.cuts, Attempt(winner.name, winner.solved))]
    with CtrlC() as ctrl_c:
        for candidate in _beam_search(layer_problems[winner.name], tried[0], budget.share(2), seed, progress):
            tried.append(candidate)
            if candidate.attempt.interrupted:
                break
    best = min(tried, key=lambda candidate: candidate.time)
    cut_short = balanced.interrupted or ctrl_c.came or any(candidate.attempt.interrupted for candidate in tried)
    bounded = best.attempt if cut_short else with_sharper_bound(best.attempt, budget.share(2))
    answers = [Attempt(winner.name, bounded.solved, searched=not budget.is_empty)]
    answers += [Attempt(other.name, other.solved, searched=other.searched) for other in others]
    seconds = balanced.seconds + perf_counter() - began
    plan = replace(balanced, choices=explained(answers), seconds=seconds, simple=None, interrupted=cut_short)
    cut = replace(balanced_cut, cuts=best.cuts)
    return LayersPlan(cut, plan, balanced_cut, winner.solved, len({candidate.cuts for candidate in tried}), left_out)


def _balanced(layer_problems: Mapping[str, LayerProblem]) -> tuple[dict[str, tuple[LayerCut, Problem]], tuple[str, ...]]:
    """The balanced cut and their problem on each placement that has them, and of the others why not; raises that where none has them."""
    starts: dict[str, tuple[LayerCut, Problem]] = {}
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


def _start(layer_problem: LayerProblem) -> tuple[LayerCut, Problem]:
    """The balanced cut that leaves memory for so many microbatches that the bound is lowest, the fewest of equals, and its problem.

    A cut that leaves room for one alone may balance times better, and yet its ranks would wait for each other. Raises `InputError` where
    nothing fits.
    """
    layers, placement, limits = layer_problem.layers, layer_problem.placement, layer_problem.limits
    cut = cut_layers(layers, placement, limits)
    best = cut, layer_problem.problem(cut.cuts)
    held, most = 2, 0 if limits is None else min(placement.num_ranks, layer_problem.num_microbatches)
    while held <= most and (fitting := fitting_cut(layers, placement, limits, held)) is not None:
        best = min(best, (fitting, layer_problem.problem(fitting.cuts)), key=lambda start: start[1].bound().time)
        held *= 2
    return best


@dataclass(frozen=True)
class Candidate:
    """Cuts with what is known of them, a schedule at least."""

    cuts: Cuts
    attempt: Attempt

    @property
    def time(self) -> int:
        return self.attempt.solved.time or 0

    def searched(self, budget: Budget, seed: int, on_progress: ProgressCallback | None) -> Candidate:
        """The same cuts after a search, the plan no longer than before."""
        return Candidate(self.cuts, improve(self.attempt, budget, seed, on_progress))


class Neighbour(NamedTuple):
    """Cuts one move away from planned ones, the order made there, and the objective in ns that this order has here."""

    time: int
    cuts: Cuts
    schedule: Schedule


def _beam_search(
    layer_problem: LayerProblem, start: Candidate, budget: Budget, seed: int, on_progress: ProgressCallback | None
) -> Iterator[Candidate]:
    """Other cuts, each after a short search: in each round the most promising neighbours of those of the round before.

    Last come the best cuts of all, after a search with the other half of the budget.
    """
    quick = budget.share(BEAM_WIDTH * ROUNDS)
    ends = inf if budget.evaluations is not None else perf_counter() + budget.seconds
    beam, known, neighbours = [start], {start.cuts: start}, list(_cut_for_its_order(layer_problem, start))
    for turn in range(ROUNDS):
        best = min(candidate.time for candidate in known.values())
        neighbours += [neighbour for candidate in beam for neighbour in _neighbours(layer_problem, candidate, ends)]
        neighbours = sorted((neighbour for neighbour in neighbours if neighbour.cuts not in known), key=lambda neighbour: neighbour[:2])
        beam = []
        for candidate in islice(_promising(layer_problem, start.attempt.name, neighbours, best), BEAM_WIDTH):
            beam.append(candidate.searched(quick, seed + turn, on_progress))
            yield beam[-1]
        known |= {candidate.cuts: candidate for candidate in beam}
        if perf_counter() > ends or min((candidate.time for candidate in beam), default=best) >= best:
            break
    yield min(known.values(), key=lambda candidate: candidate.time).searched(budget, seed + 1, on_progress)


def _cut_for_its_order(layer_problem: LayerProblem, candidate: Candidate) -> Iterator[Neighbour]:
    """The best cut of all for which there is room in the order of `candidate`."""
    schedule = candidate.attempt.solved.schedule
    assert schedule is not None
    fitting = fitting_cut(layer_problem.layers, layer_problem.placement, layer_problem.limits, schedule)
    if fitting is not None:  # where cuts are searched for, those of `candidate` may be the only ones known to fit
        time = Replay.of(schedule).time(layer_problem.objective, stage_costs(layer_problem.layers, fitting.cuts))
        yield Neighbour(time, fitting.cuts, schedule)


def _neighbours(layer_problem: LayerProblem, candidate: Candidate, ends: float) -> Iterator[Neighbour]:
    """Every move of layers from the cuts of `candidate`, as far as the clock allows."""
    schedule = candidate.attempt.solved.schedule
    assert schedule is not None
    replay = Replay.of(schedule)
    for cuts in moves(candidate.cuts, len(layer_problem.layers)):
        if perf_counter() > ends:
            return
        yield Neighbour(replay.time(layer_problem.objective, stage_costs(layer_problem.layers, cuts)), cuts, schedule)


def _promising(layer_problem: LayerProblem, name: str, neighbours: Iterable[Neighbour], best: int) -> Iterator[Candidate]:
    """The neighbours that can be shorter than `best` and whose order fits the memory, each of different cuts."""
    taken: set[Cuts] = set()
    for neighbour in neighbours:
        solved = None if neighbour.cuts in taken else _as_solved(layer_problem, neighbour)
        if solved is not None and solved.bound.time < best:
            taken.add(neighbour.cuts)
            yield Candidate(neighbour.cuts, Attempt(name, solved))


def _as_solved(layer_problem: LayerProblem, neighbour: Neighbour) -> Solved | None:
    """The order of a neighbour as a plan for its cuts; None where it does not fit the memory."""
    try:
        problem = layer_problem.problem(neighbour.cuts)
        return Solved.of(problem, problem.bound(), neighbour.schedule, 0.0, "the order of other cuts")
    except (InputError, ScheduleError):
        return None
