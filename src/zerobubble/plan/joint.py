"""Boundaries and schedule chosen together: from the balanced cuts on, layers move wherever a quick plan comes out shorter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from zerobubble.costs import Limits
from zerobubble.errors import InputError, ScheduleError
from zerobubble.ir import Placement, Schedule
from zerobubble.partition import Cuts, Layer, activation_limits, balance_placement, stage_costs
from zerobubble.partition.descent import moves
from zerobubble.plan.attempt import Attempt, Budget, improve
from zerobubble.plan.choose import SECONDS, solve
from zerobubble.plan.problem import Objective, Problem, Solved
from zerobubble.plan.replay import Replay

WIDTH = 4
"""How many cuts are kept, and how many new ones get a quick plan in a round."""

ROUNDS = 6
"""How often layers move, at most."""


@dataclass(frozen=True)
class LayersPlan:
    """The cuts and the plan found together, and what the balanced cuts give: `cuts_planned` is how many cuts had a plan made."""

    cuts: Cuts
    solved: Solved
    balanced_cuts: Cuts
    balanced: Solved
    cuts_planned: int

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
class Model:
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
        return Problem(self.placement, self.num_microbatches, costs, limits, self.objective)


def plan_layers(
    layers: Sequence[Layer],
    placement: Placement,
    num_microbatches: int,
    limits: Limits | None = None,
    *,
    objective: Objective = Objective.SPAN,
    seconds: float = SECONDS,
    seed: int = 0,
    evaluations: int | None = None,
) -> LayersPlan:
    """Cuts of `layers` for `placement` and a schedule, together at most as long as `solve` makes the balanced cuts with the same budget.

    That plan is made first and in full; what follows begins with it and may take as long again: half for quick plans of other cuts,
    half for the best cuts found. `limits` are bytes for parameters and activations. Raises `InputError` as `balance_placement` does.
    """
    model = Model(layers, placement, num_microbatches, limits, objective)
    cuts = balance_placement(layers, placement, limits)
    balanced = solve(model.problem(cuts), seconds=seconds, seed=seed, evaluations=evaluations)
    if balanced.schedule is None:
        raise InputError(f"nothing can run with balanced cuts: {balanced.reason}")
    budget = Budget(seconds, evaluations).share(2)
    start = Sketch(cuts, balanced, balanced.schedule)
    sketches = _explored(model, start, budget, seed)
    best = min(sketches, key=lambda sketch: sketch.time)
    full = best.searched(budget, seed + 1)
    return LayersPlan(full.cuts, full.solved, cuts, balanced, len(sketches))


@dataclass(frozen=True)
class Sketch:
    """Cuts with the best plan so far."""

    cuts: Cuts
    solved: Solved
    schedule: Schedule

    @property
    def time(self) -> int:
        return self.solved.time or 0

    def searched(self, budget: Budget, seed: int) -> Sketch:
        """The same cuts after a search, the plan no longer than before."""
        solved = improve(Attempt(self.solved.problem.placement.name, self.solved), budget, seed).solved
        return Sketch(self.cuts, solved, solved.schedule or self.schedule)


class Idea(NamedTuple):
    """Cuts one move away from planned ones, the order made there, and the objective in ns that this order has here."""

    time: int
    cuts: Cuts
    schedule: Schedule


def _explored(model: Model, start: Sketch, budget: Budget, seed: int) -> list[Sketch]:
    """All cuts that had a plan made, `start` among them: in each round the most promising neighbours of the best so far."""
    quick = budget.share(WIDTH * ROUNDS)
    ends = inf if budget.evaluations is not None else perf_counter() + budget.seconds
    beam, known, ideas = [start], {start.cuts: start}, list[Idea]()
    for turn in range(ROUNDS):
        best = min(sketch.time for sketch in known.values())
        ideas += [idea for sketch in beam for idea in _neighbours(model, sketch, ends)]
        ideas = sorted((idea for idea in ideas if idea.cuts not in known), key=lambda idea: idea[:2])
        beam = [sketch.searched(quick, seed + turn) for sketch in islice(_promising(model, ideas, best), WIDTH)]
        known |= {sketch.cuts: sketch for sketch in beam}
        if perf_counter() > ends or min((sketch.time for sketch in beam), default=best) >= best:
            break
    return list(known.values())


def _neighbours(model: Model, sketch: Sketch, ends: float) -> Iterator[Idea]:
    """Every move of layers from the cuts of `sketch`, as far as the clock allows."""
    replay = Replay.of(sketch.schedule)
    for cuts in moves(sketch.cuts, len(model.layers)):
        if perf_counter() > ends:
            return
        yield Idea(replay.time(model.objective, stage_costs(model.layers, cuts)), cuts, sketch.schedule)


def _promising(model: Model, ideas: Iterable[Idea], best: int) -> Iterator[Sketch]:
    """The ideas that can be shorter than `best` and whose order fits the memory, each of different cuts."""
    taken: set[Cuts] = set()
    for idea in ideas:
        sketch = None if idea.cuts in taken else _sketched(model, idea)
        if sketch is not None and sketch.solved.bound.time < best:
            taken.add(idea.cuts)
            yield sketch


def _sketched(model: Model, idea: Idea) -> Sketch | None:
    """The idea as a plan; None where the order does not fit the memory."""
    try:
        problem = model.problem(idea.cuts)
        return Sketch(idea.cuts, Solved.of(problem, problem.bound(), idea.schedule, 0.0, "the order of other cuts"), idea.schedule)
    except (InputError, ScheduleError):
        return None
