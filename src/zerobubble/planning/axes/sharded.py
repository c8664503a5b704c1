"""Weights that FSDP2 shards as an axis: among the schedules that are nearly as short as the shortest, the one with the fewest gathers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Attempt
from zerobubble.planning.axes.axis import ChoicesOfAxis, Contest
from zerobubble.planning.candidate import Candidate
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.shards.few_gathers import few_gathers


@dataclass(frozen=True)
class ShardedChoices(ChoicesOfAxis):
    """Orders that are searched without gathers of the weights `sharded`.

    The best order of each choice and the published schedules are simulated with gathers. Then passes move so that weights stay gathered.
    """

    sharded: Sharded
    finish_share = 0.25

    def choices(self, candidate: Candidate) -> Iterator[Candidate]:
        problem, target = (replace(problem, sharded=None) for problem in (candidate.problem, candidate.target))
        yield candidate.choose("sharded", "sharded", problem, target)

    def finish(self, found: Plan, contest: Contest) -> Plan:
        choices = tuple(replace(choice, plan=self._sharded(choice.plan)) for choice in found.choices)
        found = replace(self._sharded(found), choices=choices, simple=None)
        plans = [found, *(choice.plan for choice in choices)]
        attempts: list[Attempt] = []
        for plan in plans:
            bare = replace(plan, choices=(), savings=())
            if plan.order is not None and not any((bare.order, bare.problem) == (one.plan.order, one.plan.problem) for one in attempts):
                attempts.append(Attempt(plan.placement.name, bare, contest.seeds_on(plan)))
        gathers = few_gathers(attempts, contest.left, contest.seed, published=contest.is_free) if attempts else None
        return found if gathers is None else found.with_winner(gathers.chosen.plan, gathers, *found.savings)

    def _sharded(self, plan: Plan) -> Plan:
        """The plan with sharded weights and the same figures, which ignore gathers."""
        cut, sharded = plan.cut, self.sharded
        sharded = sharded if cut is None else sharded.for_layers(cut.layers, cut.cuts, cut.placement)
        return replace(plan, problem=replace(plan.problem, sharded=sharded))
