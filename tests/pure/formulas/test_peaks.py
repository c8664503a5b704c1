"""Peak memory of every schedule at every shape, as its line in `PEAKS` says."""

from __future__ import annotations

import pytest

from tests.pure.formulas.peaks import MOST, PEAKS
from tests.pure.formulas.played import GRID, allowed, drawn
from tests.pure.shapes import EVERY, grid, stage_counts
from tests.thinned import every_and_all
from zerobubble import Costs, make
from zerobubble.costs import UNIT_BYTES
from zerobubble.schedules import SCHEDULES
from zerobubble.simulation import peak_memory


def test_every_schedule_has_its_peak() -> None:
    assert {*PEAKS, *MOST} == set(SCHEDULES)


def check_peak(name: str, p: int, m: int, v: int) -> None:
    schedule = make(name, p, m, v)
    peaks = [peak // UNIT_BYTES for peak in peak_memory(schedule, Costs.uniform(schedule.num_stages))]
    if name in MOST:
        assert max(peaks) == MOST[name](p, m, v), (p, m, v)
    else:
        assert peaks == [PEAKS[name](p, m, v, r) for r in range(p)], (p, m, v)


@every_and_all(23)
@pytest.mark.parametrize(("name", "v"), EVERY)
def test_peak_memory(name: str, v: int, nth: int) -> None:
    for p, m in grid(name, v)[::nth]:
        check_peak(name, p, m, v)


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_peak_memory_of_many_ranks(name: str) -> None:
    for p, m, v in drawn([(p, m) for p, m in GRID if p > 8 and m % 9 == p % 9], stage_counts(name)):
        if allowed(name, [(p, m)], v):
            check_peak(name, p, m, v)
