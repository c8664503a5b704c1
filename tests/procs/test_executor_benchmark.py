"""The executor's benchmark runs every runtime it compares, on small cases."""

from __future__ import annotations

import runpy
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.versions import needs_torchs_runtime
from zerobubble.runtime.transport import shared_memory
from zerobubble.runtime.transport.ring import RingLane

FOLDER = Path(__file__).parents[2] / "benchmarks" / "executor"


def rows(group: Any, schedule: str, latency_ms: float) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        # the benchmark changes these for good
        for owner, name in ((RingLane, "sender"), (RingLane, "receiver"), (shared_memory, "message_bytes")):
            stack.enter_context(mock.patch.object(owner, name, getattr(owner, name)))
        stack.enter_context(mock.patch.object(sys, "path", [str(FOLDER), *sys.path]))
        bench = runpy.run_path(str(FOLDER / "run.py"))
        bench["efficiency"].__globals__["PASS_MS"] = 1.0
        found = [bench["efficiency"](zb.make(schedule, 4, 8).to_text(), latency_ms, repeats=1)]
        if not latency_ms:
            found.append(bench["overhead"](schedule, 8, repeats=1))
        return found


@needs_torchs_runtime
@pytest.mark.long
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_every_runtime_takes_its_steps(world: Ranks, name: str) -> None:
    for efficiency, overhead in world.run(rows, name, 0.0, ranks=4):
        assert all(0 < efficiency[who] < 1 for who in ("ours", "pytorch", "sleeping")), efficiency
        assert all(overhead[f"{who}_us"] > 0 for who in ("ours", "ours_on_gloo", "pytorch", "bare", "messages")), overhead


@pytest.mark.long
def test_messages_arrive_late_and_the_simulation_knows(world: Ranks) -> None:
    for (late,) in world.run(rows, "zb-h1", 5.0, ranks=4):
        assert late["simulated_ms"] > zb.simulate(zb.make("zb-h1", 4, 8), zb.Costs.uniform(4, (1.0,) * 3)).makespan / 1e6
        assert 0 < late["ours"] < 1.01, late
