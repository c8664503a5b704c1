"""Fused backward passes as an axis of plans whose other axes order passes one at a time: each search, with B and W joined in its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerobubble.planning.answer import Plan
from zerobubble.planning.axes.axis import ChoicesOfAxis
from zerobubble.planning.candidate import UNBOUNDED, Candidate, Lift
from zerobubble.planning.in_steps import one_pass_problems
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.transforms import fused_variants

LABELS = ("split", "whole", "shortened")


@dataclass(frozen=True)
class FusedChoices(ChoicesOfAxis):
    """Orders for split backward passes, for whole ones, and for the times of the bound.

    In each result, all B and W are joined, or only adjacent ones, or none.
    """

    def choices(self, candidate: Candidate) -> Iterator[Candidate]:
        problem = candidate.problem
        for label, variant in zip(LABELS, one_pass_problems(problem), strict=False):
            yield candidate.choose("fused", label, variant, lift=Lift(lambda plan, _: _joined(plan, problem)))


def _joined(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """Converts a plan with passes one at a time to plans for `problem`, whose BW may take less than B and W."""
    levels = plan.problem.recomputation
    target = problem if levels is None else problem.offering(levels.offered, *levels.chosen)
    named = plan.schedule.name
    for made in fused_variants(plan.schedule, target):
        yield Plan.from_schedule(target, UNBOUNDED, replace(made, name=named), plan.seconds, f"{plan.how}, {made.name}")
