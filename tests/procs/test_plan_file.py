"""A saved plan trains: every rank loads it from its file, and the gradients are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.test_gradients import worst_errors


def train_from(group: Any, file: str) -> tuple[dict[str, float], str]:
    schedule = zb.io.load_plan(file).schedule
    return worst_errors(group, schedule, steps=2), schedule.to_text()


@pytest.mark.sweep
@pytest.mark.parametrize(("placement", "ranks", "memory"), [("vee", 4, 2.5), ("looped-3", 2, 1.5)])
def test_a_saved_plan_trains_like_one_device(world: Ranks, tmp_path: Path, placement: str, ranks: int, memory: float) -> None:
    work = zb.Workload.uniform(ranks, (18.522, 18.086, 9.337), comm=0.601, held=0.941)
    best = zb.plan(work, 6, memory, placements=placement, evaluations=300)
    assert best.how.startswith("planned by"), "a schedule that no name gives"
    file = str(tmp_path / "plan.json")
    zb.io.save_plan(best, file)
    for worst, text in world.run(train_from, file, ranks=ranks):
        assert max(worst.values()) <= 1e-12
        assert text == best.schedule.to_text()
