"""The GPU benchmark and its report also run completely on a machine without a GPU.

The report names everything that failed, and no path of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import report
from tests.refusals import states

pytestmark = pytest.mark.spread

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.py"
PASSED = {
    "doctor": {"checks": [{"check": "gloo", "status": "ok", "found": "there"}]},
    "results": {"machine": {"device": "a GPU"}, "memory": [{"schedule": "1f1b", "predicted_over_allocated": 1.0}]},
    "steps": {"steps": [{"schedule": "zb-v", "precision": "bfloat16", "gradient_error": 0.004}]},
    "tests": {"files": [{"file": "test_packing", "tests": 3, "failed": {}}]},
    "ends": dict.fromkeys(("doctor", "results", "steps", "tests"), "exit code 0"),
}


def run(*options: str) -> list[str]:
    """What it prints; its results, if there are any, must stay as they are."""
    results = BENCHMARK.with_name("results.json")
    before = results.read_bytes() if results.exists() else None
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(BENCHMARK), *options], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    assert (results.read_bytes() if results.exists() else None) == before
    return done.stdout.splitlines()


@pytest.mark.long
def test_the_benchmark_reports_that_there_is_no_gpu() -> None:
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
    expected = [(precision, way) for precision in ("float32", "bfloat16") for way in ways]
    assert [(row["precision"], row["way"]) for row in split] == [*expected, ("float8", "deferred"), ("float8", "graph")]
    assert all(float(row[name]) > 0 for row in split for name in (fused if row["precision"] != "float8" else fused[:1]))
    assert [row["schedule"] for row in rows if "overhead_us" in row] == ["1f1b", "zb-h1"]
    memory = {row["schedule"]: float(row["predicted_over_allocated"]) for row in rows if "predicted_over_allocated" in row}
    assert memory.keys() == {"gpipe", "1f1b", "zb-h1"}
    assert all(0.95 <= ratio <= 1 for ratio in memory.values())
    (offload,) = [row for row in rows if "offloads" in row]
    assert int(offload["offloads"]) > 0
    repeats = [row for row in rows if "deterministic_kernels" in row]
    assert [row["deterministic_kernels"] for row in repeats] == ["False", "True"]
    assert all(row["repeated_equal"] == row["offloaded_equal"] == "True" for row in repeats)


def test_the_report_names_what_failed() -> None:
    assert list(report.faults_of(PASSED)) == []
    split = {"precision": "float32", "way": "graph", "over_eager_fused": 1.2}
    broken = {
        "doctor": {"checks": [{"check": "ports", "status": "failed", "found": "none"}]},
        "results": {"machine": {"device": "a GPU"}, "memory": [{"schedule": "gpipe", "predicted_over_allocated": 0.5}], "split": [split]},
        "steps": {"steps": [{"schedule": "zb-v", "precision": "bfloat16", "gradient_error": 0.2}]},
        "tests": {"files": [{"file": "test_mesh", "failed": {"test_a": "", "test_b": ""}}, {"file": "test_fsdp", "timed_out": 900}]},
    }
    assert len(list(report.faults_of(PASSED | broken))) == 7
    ends = PASSED["ends"] | {"results": "exit code 1"}
    assert len(list(report.faults_of(PASSED | {"ends": ends}))) == 1, "a measurement that stopped early has only a part of its results"
    for step in broken:
        assert len(list(report.faults_of(PASSED | {step: None}))) == 1
    rehearsed = broken["results"] | {"machine": {"device": "cpu"}}
    assert len(list(report.faults_of(PASSED | {"results": rehearsed}))) == 1, "the time of a split says nothing on a CPU"


def test_the_report_has_no_paths_of_the_machine() -> None:
    given = {
        f"{report.ROOT}/src/zerobubble/ir.py:3": ["/home/someone/.venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", 1],
        "File": 'File "/opt/tools/thing.py", line 7, at 1/2 of https://example.org/a/b',
    }
    assert report.clean(given) == {
        "src/zerobubble/ir.py:3": ["torch/nn/modules/linear.py", 1],
        "File": 'File "thing.py", line 7, at 1/2 of https://example.org/a/b',
    }


@pytest.mark.long
def test_the_report_is_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK.with_name("report.py")), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["rehearsed"], found["faults"]) == (True, [])
    assert {row["schedule"] for row in found["results"]["memory"]} == {"gpipe", "1f1b", "zb-h1"}
    assert {row["precision"] for row in found["steps"]["steps"]} == {"float32", "bfloat16", "float8"}
    assert all(row["ours_over_pytorch"] > 0 for row in found["steps"]["steps"])
    assert [(row["file"], row["failures"]) for row in found["tests"]["files"]] == [("test_packing", 0)]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# PASS")
    for written in (text, json.dumps(found)):
        assert str(report.ROOT) not in written
        assert sys.prefix not in written
