"""Slices of a sequence as an axis: the number of slices into which each microbatch is cut.

Every number is a problem of its own, with as many more and shorter passes. The F of slices run in order and the B in reverse order, and the
keys and values of a microbatch stay until the B of its first slice has run. Bounds are those of `bounds.slices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerobubble.arguments import COUNT, as_tuple, require, wrong
from zerobubble.bounds import Bound
from zerobubble.errors import InputError
from zerobubble.planning.answer import Plan, Saving
from zerobubble.planning.axes.axis import ChoicesOfAxis, Contest
from zerobubble.planning.candidate import Candidate
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.ranking import rank_key
from zerobubble.slicing import MOST_SLICES, slices_of
from zerobubble.units import counted, ms, show_ms, show_percent

NAME = "slices"

AUTO = (1, 2, 4, 8, 16)
"""The numbers of slices that `auto` tries."""


class SlicesAsked(NamedTuple):
    """The numbers of slices to choose from, and the shares of F and of B that attention between tokens takes."""

    counts: tuple[int, ...] = ()
    attention: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def read(cls, slices: int | str | Sequence[int], attention: Sequence[float]) -> SlicesAsked:
        """Reads the arguments `slices` and `attention` of `plan`. Raises `InputError` for those that cannot be used."""
        shares = as_tuple("plan: attention", attention)
        if len(shares) not in (0, 2):
            raise wrong("attention", shares, "two shares, of F and of B, such as (0.2, 0.3)")
        slices_of((1.0,), *shares)
        if isinstance(slices, str):
            if slices != "auto":
                raise wrong("slices", slices, "'auto', a number of slices, or several to choose from")
            counts: tuple[int, ...] = AUTO
        else:
            counts = (slices,) if isinstance(slices, int) else as_tuple("plan: slices", slices)
        for count in counts:
            require("slices", count, COUNT)
            if count > MOST_SLICES:
                raise wrong("slices", count, f"at most {MOST_SLICES:,}")
        if shares and counts in ((), (1,)):
            raise InputError("attention is for slices of a sequence", remedy="give slices, or leave attention out")
        return cls(() if counts == (1,) else tuple(dict.fromkeys(counts)), (shares[0], shares[1]) if shares else (0.0, 0.0))


@dataclass(frozen=True)
class SlicesChoices(ChoicesOfAxis):
    """Slices of equal length, in the numbers asked for."""

    asked: SlicesAsked

    def choices(self, candidate: Candidate) -> Iterator[Candidate]:
        for count in self.asked.counts:
            problem, target = (self._sliced(problem, count) for problem in (candidate.problem, candidate.target))
            yield candidate.choose(NAME, str(count), problem, target)

    def _sliced(self, problem: Problem, count: int) -> Problem:
        if count == 1:
            return problem
        costs = problem.costs.sliced(count, attention=self.asked.attention)
        return replace(problem, num_microbatches=problem.num_microbatches * count, costs=costs)

    def finish(self, found: Plan, contest: Contest) -> Plan:
        tried = tuple(self._tried(count, found, contest) for count in self.asked.counts)
        return replace(found, savings=(SliceSavings(tried, found.problem.slices), *found.savings))

    @staticmethod
    def _tried(count: int, found: Plan, contest: Contest) -> TriedSlices:
        """The best plan with this number of slices on any placement, with the least bound of all placements."""
        entries = [entry for entry in contest.entries if entry.candidate.label(NAME) == str(count) and entry.plans]
        best = min(entries, key=lambda entry: rank_key(entry.best), default=None)
        name, plan = ("", None) if best is None else (best.candidate.name, best.best)
        return TriedSlices(count, name, plan, contest.least_bound(found, NAME, str(count)))


class TriedSlices(NamedTuple):
    """The best plan with a number of slices and its placement, None without a schedule, and the least bound over the placements."""

    number: int
    placement: str
    plan: Plan | None
    bound: Bound

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures in JSON."""
        plan = self.plan
        return {
            "slices": self.number,
            "placement": self.placement or None,
            "time_ms": None if plan is None or plan.time is None else ms(plan.time),
            "bound_ms": ms(self.bound.time),
            "peak_microbatches": plan and plan.peak_microbatches,
        }


@dataclass(frozen=True, repr=False)
class SliceSavings(Saving):
    """The best plans with each number of slices that was `tried`, and the number that was `chosen`."""

    axis = "slices"

    tried: tuple[TriedSlices, ...]
    chosen: int

    def _summary(self) -> str:
        return "; ".join(map(_figures, self.tried))

    def __str__(self) -> str:
        return f"Slices of each microbatch: {self._summary()}.{self._gain()}"

    def _gain(self) -> str:
        """The least time that slices save, if whole microbatches were tried: against their bound, since their plan may be far from it."""
        tried = {each.number: each for each in self.tried}
        whole, best = tried.get(1), tried[self.chosen].plan
        if whole is None or best is None or best.time is None or self.chosen == 1 or best.time >= whole.bound.time:
            return ""
        return f" {counted(self.chosen, 'slice')} save at least {show_percent(1 - best.time / whole.bound.time)} of the time."

    def to_dict(self) -> dict[str, Any]:
        """The figures in JSON: the chosen number, and the best plan with each number that was tried."""
        return {"chosen": self.chosen, "tried": [each.to_dict() for each in self.tried]}


def _figures(tried: TriedSlices) -> str:
    if tried.plan is None or tried.plan.time is None:
        return f"{tried.number} nothing was made (bound {show_ms(tried.bound.time)})"
    return f"{tried.number} {show_ms(tried.plan.time)} on {tried.placement} (bound {show_ms(tried.bound.time)})"
