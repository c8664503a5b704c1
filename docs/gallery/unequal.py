"""The picture of docs/unequal.md: a plan for equal microbatches that is played with unequal ones, and below it one that was made for them.

`make gallery` searches and draws. The picture names every pass, so that a test can read its schedules, judge them and draw them again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerobubble import Schedule, plan, simulate
from zerobubble.export import timeline_svg
from zerobubble.planning import Workload

UNEQUAL = Path(__file__).parents[1] / "unequal.svg"
WORK = Workload.uniform(4, times=(10, 10, 8), comm=0.3)
SHARES, PLACEMENT = (1.0, 4.0) * 4, "vee"
EVALUATIONS = 100_000
EQUAL, PLANNED = "equal microbatches, in the order of the data", "planned"


def found(shares: tuple[float, ...]) -> Schedule:
    """The best of a search for microbatches with these shares of the costs, or for equal ones where there are none."""
    schedule = plan(WORK, len(SHARES), placements=PLACEMENT, evaluations=EVALUATIONS, shares=shares).schedule
    assert schedule is not None
    return schedule


def drawn(equal: Schedule, planned: Schedule) -> str:
    """The picture of both schedules, played with the unequal microbatches."""
    costs = replace(WORK.costs(equal.placement), shares=SHARES)
    timelines = (simulate(replace(schedule, name=name), costs) for name, schedule in ((EQUAL, equal), (PLANNED, planned)))
    return timeline_svg(*timelines, title="Microbatches of unequal cost")


def unequal_picture() -> str:
    """The picture, after both searches."""
    return drawn(found(()), found(SHARES))
