"""The benchmark for a GPU runs whole where there is none, so that it runs where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.refusals import states

pytestmark = pytest.mark.spread

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.py"


def run(*options: str) -> list[str]:
    """What it prints; its results, if there are any, must stay as they are."""
    results = BENCHMARK.with_name("results.json")
    before = results.read_bytes() if results.exists() else None
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(BENCHMARK), *options], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    assert (results.read_bytes() if results.exists() else None) == before
    return done.stdout.splitlines()


def test_without_a_gpu_it_says_so() -> None:
    (line,) = run()
    states(line, "GPU", "nothing")


@pytest.mark.long
@pytest.mark.parametrize("options", [["--eager"], []])
def test_the_rehearsal_runs_whole(options: list[str]) -> None:
    rows = [dict(zip(words[::2], words[1::2], strict=True)) for words in map(str.split, run("--device", "cpu", *options))]
    ways, fused = ["deferred", "graph"], ["over_eager_fused"]
    if not options:
        ways, fused = [*ways, "compiled"], [*fused, "over_compiled_fused"]
    split = [row for row in rows if "way" in row]
    assert [(row["dtype"], row["way"]) for row in split] == [(dtype, way) for dtype in ("float32", "bfloat16") for way in ways]
    assert all(float(row[name]) > 0 for row in split for name in fused)
    assert [row["schedule"] for row in rows if "overhead_us" in row] == ["1f1b", "zb-h1"]
    memory = {row["schedule"]: float(row["predicted_over_allocated"]) for row in rows if "predicted_over_allocated" in row}
    assert memory.keys() == {"gpipe", "1f1b", "zb-h1"}
    assert all(0.95 <= ratio <= 1 for ratio in memory.values())
    (offload,) = [row for row in rows if "offloads" in row]
    assert int(offload["offloads"]) > 0
    repeats = [row for row in rows if "deterministic_kernels" in row]
    assert [row["deterministic_kernels"] for row in repeats] == ["False", "True"]
    assert all(row["repeated_equal"] == row["offloaded_equal"] == "True" for row in repeats)
