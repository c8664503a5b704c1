"""The savings of recomputation in a plan, in words and figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerobubble.costs import NONE
from zerobubble.ir import Kind, Op
from zerobubble.planning.answer import Plan, Saving
from zerobubble.units import counted, ms, show_ms


@dataclass(frozen=True, repr=False)
class RecomputeSavings(Saving):
    """The savings of recomputation: the best plan `without` it, the best with all in full, and the `chosen` one.

    Each of the first two may have no schedule, and `full` is None where it could not be chosen.
    """

    axis = "recomputation"

    without: Plan
    full: Plan | None
    chosen: Plan

    def _summary(self) -> str:
        full = [] if self.full is None or self.full is self.chosen else [f"with every forward computed again in full {_figures(self.full)}"]
        parts = [f"without R {_figures(self.without)}", *full]
        if self.chosen.order is None:
            return "; ".join(parts)
        if not _passes_again(self.chosen):
            return "; ".join([f"nothing is computed again, the plan takes {_figures(self.chosen)}", *full])
        levels = ", ".join(f"{name} for {counted(count, 'forward')}" for name, count in self._forwards().items())
        return "; ".join([*parts, f"the plan ({levels}) {_figures(self.chosen)}{self._gain()}"])

    def __str__(self) -> str:
        return f"What recomputation buys: {self._summary()}."

    def _gain(self) -> str:
        if not self.without.time or self.chosen.time is None:
            return ""
        gain = 1 - self.chosen.time / self.without.time
        return f", {100 * abs(gain):.1f} % {'less' if gain >= 0 else 'more'} time than without R"

    def _forwards(self) -> dict[str, int]:
        """How many forwards have each level."""
        again, problem = self.chosen.problem.recomputation, self.chosen.problem
        assert again is not None
        counts = {level.name: 0 for level in again.offered}
        for op in _passes_again(self.chosen):
            counts[again.chosen[op.stage].name] += 1
        counts[NONE.name] = problem.placement.num_stages * problem.num_microbatches - sum(counts.values())
        return {name: count for name, count in counts.items() if count}

    def to_dict(self) -> dict[str, Any]:
        """The figures in JSON: the forwards of each level, and the times and memory of all three plans."""
        return {
            "forwards": self._forwards() if self.chosen.order is not None else {},
            "without": _figures_dict(self.without),
            "full": self.full and _figures_dict(self.full),
            "chosen": _figures_dict(self.chosen),
        }


def _figures(solved: Plan) -> str:
    if solved.time is None:
        return f"nothing fits ({solved.reason})"
    work = solved.problem.work / solved.problem.placement.num_ranks
    ratio = f" = {solved.time / work:.3f} x the work of a rank" if work else ""
    return f"{show_ms(solved.time)}{ratio} in the memory of {_microbatches(solved)}"


def _microbatches(solved: Plan) -> str:
    """The most that a rank holds, in microbatches of all that its forwards save."""
    peak = solved.peak_microbatches or 0.0
    return f"{peak:.4g} microbatch{'' if f'{peak:.4g}' == '1' else 'es'}"


def _figures_dict(solved: Plan) -> dict[str, Any]:
    work = solved.problem.work / solved.problem.placement.num_ranks
    return {
        "placement": solved.problem.placement.name,
        "time_ms": None if solved.time is None else ms(solved.time),
        "over_work": None if solved.time is None or not work else solved.time / work,
        "peak_bytes": list(solved.peaks),
        "reason": solved.reason,
    }


def _passes_again(solved: Plan) -> list[Op]:
    return [] if solved.order is None else [op for row in solved.schedule.rows for op in row if op.kind is Kind.R]
