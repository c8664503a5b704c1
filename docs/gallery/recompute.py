"""The picture of docs/recompute.md: the best schedules that were found in the same memory without R and with it, one below the other.

`make gallery` searches and draws. The picture names every pass and the level of every stage, so that a test can read the schedules in it,
judge them and draw them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zerobubble import Schedule, plan, simulate
from zerobubble.costs import Level
from zerobubble.export import timeline_svg
from zerobubble.planning import Plan, Workload

RECOMPUTE = Path(__file__).parents[1] / "recompute.svg"
WORK = Workload.uniform(4, times=(10, 10, 8), comm=0.3)
MICROBATCHES, MEMORY, PLACEMENT = 8, 1.5, "vee"
EVALUATIONS = 20_000
WITHOUT, WITH = "without R", "with R"


def found(recompute: str) -> Plan:
    """The best of a search within `MEMORY`: with R where it pays (`auto`), or with none."""
    return plan(WORK, MICROBATCHES, MEMORY, placements=PLACEMENT, evaluations=EVALUATIONS, recompute=recompute)


def drawn(without: Schedule, lean: Schedule, levels: Sequence[Level]) -> str:
    """The picture of a schedule and one with R, whose stages have these levels, each with the memory that its ranks hold."""
    plain = WORK.costs(lean.placement)
    name = f"{WITH}, levels of stages 0 to {len(levels) - 1}: {', '.join(level.name for level in levels)}"
    timelines = (
        simulate(replace(without, name=WITHOUT), plain),
        simulate(replace(lean, name=name), plain.with_recompute(levels)),
    )
    unit = WORK.limits(1).memory
    return timeline_svg(*timelines, title="The same memory, without and with R", memory=True, microbatch_bytes=unit)


def recompute_picture() -> str:
    """The picture, after both searches."""
    without, lean = found("none"), found("auto")
    assert lean.problem.recomputation is not None
    return drawn(without.schedule, lean.schedule, lean.problem.recomputation.chosen)
