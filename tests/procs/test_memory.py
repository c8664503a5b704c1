"""The peak memory that a profile predicts is what a metered step holds, rank by rank."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.procs.ranks import Ranks

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory" / "run.py"


def compare(group: Any, name: str) -> dict[str, Any]:
    bench = runpy.run_path(str(BENCHMARK))
    found: dict[str, Any] = bench["compare"](group, name, bench["GPTConfig"](layers=8, width=32, heads=2, context=16))
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half"])
def test_predicted_peaks_are_held(world: Ranks, name: str) -> None:
    for found in world.run(compare, name, ranks=4):
        assert len(set(found["measured"])) > 1
        assert all(abs(error) <= 0.05 for error in found["errors"]), found
