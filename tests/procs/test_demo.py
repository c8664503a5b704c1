"""The demo: its losses are those of one device bit for bit, and the files of its report agree with each other."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.procs.ranks import Ranks
from tests.refusals import states

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "train_gpt.py")
MODEL = ["--layers", "4", "--width", "20", "--heads", "2", "--context", "16"]
SMALL = [*MODEL, "--microbatches", "4", "--steps", "2", "--compare", "1f1b", "--compare-steps", "2"]


def small_task() -> Any:
    """The demo's model and text at half the width and context."""
    sys.path.insert(0, str(EXAMPLES))
    import options
    import torch
    from gpt import GPTConfig
    from text import standard_library
    from training import Task

    chosen = options.parse(["--width", "160", "--context", "64"])
    return Task(chosen, GPTConfig(chosen.layers, chosen.width, chosen.heads, chosen.context), standard_library(), torch.device("cpu"))


def pipeline_losses(group: Any, name: str, steps: int) -> list[float]:
    task = small_task()
    from training import train

    losses: list[float] = train(task, name, steps, None, lambda step, loss: None).losses
    return losses


def one_device_losses(group: Any, steps: int) -> list[float]:
    task = small_task()
    from training import train_one_device

    losses: list[float] = train_one_device(task, steps, lambda step, loss: None)[0]
    return losses


@cache
def losses_of_one_device(world: Ranks, steps: int) -> list[float]:
    losses: list[float]
    [losses] = world.run(one_device_losses, steps, ranks=1)
    return losses


@pytest.mark.long
@pytest.mark.parametrize(("name", "steps"), [("zb-v", 25), ("zb-h1", 50)])
def test_float32_losses_are_those_of_one_device(world: Ranks, name: str, steps: int) -> None:
    expected = losses_of_one_device(world, steps)
    assert expected[-1] < 0.8 * expected[0]
    for losses in world.run(pipeline_losses, name, steps, ranks=4):
        assert losses == expected


def quiet_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def demo(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=quiet_environment(), check=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("demo")
    return out, demo("--ranks", "2", "--pace", "--out", str(out), *SMALL)


@pytest.mark.long
def test_the_demo_prints_no_warnings(report: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, finished = report
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    states(finished.stdout, 2, "1f1b")
    assert "Paced:" in finished.stdout
    for name in ("report.html", "timeline.svg", "trace.json", "metrics.json"):
        assert str(out / name) in finished.stdout.replace("\n", "")


@pytest.mark.parametrize(("overruns", "measured", "is_exact"), [(0, 1000, True), (1, 1040, True), (0, 1400, False), (80, 1000, False)])
def test_its_caution_goes_by_passes_and_by_steps(monkeypatch: pytest.MonkeyPatch, overruns: int, measured: int, is_exact: bool) -> None:
    """A step that is 40 % longer than predicted is that of a busy machine even if every pass took its nominal time."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    judge = runpy.run_path(str(EXAMPLES / "outcome.py"))["overruns"]
    run = SimpleNamespace(overruns=overruns, predicted=SimpleNamespace(makespan=1000), measured=SimpleNamespace(makespan=measured))
    run.schedule = SimpleNamespace(name="zb-v")
    text, judged = judge(SimpleNamespace(runs=[run], passes=lambda run: 1000))
    assert judged == is_exact
    assert f"zb-v {measured / 1000:.2f}" in text


@pytest.mark.long(all=True)
def test_the_files_of_a_demo_agree(report: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, _ = report
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["losses"]["pipeline"] == metrics["losses"]["one_device"]
    assert metrics["loss_difference"] == 0
    assert metrics["same_losses_with_every_schedule"]

    page = (out / "report.html").read_text()
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(found)
    assert [run["values"] for run in data["losses"]] == [metrics["losses"]["pipeline"], metrics["losses"]["one_device"]]
    trained = metrics["schedules"][-1]
    assert trained["name"] == "zb-v"
    makespans = [trained[source]["makespan_ms"] for source in ("predicted", "measured")]
    assert [timeline["name"] for timeline in data["timelines"]] == ["1f1b", "zb-v", "zb-v"]
    base = metrics["schedules"][0]["measured"]["makespan_ms"]
    assert [timeline["makespan"] / 1e6 for timeline in data["timelines"]] == [base, *reversed(makespans)]
    for drawn, run in zip(data["timelines"], [metrics["schedules"][0], trained, trained], strict=True):
        assert drawn["layers"] == run["bytes_other_than_activations"]
        assert sum(drawn["layers"]["parameters"]) == 4 * metrics["parameters"]

    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    for process, makespan in enumerate(makespans, 1):
        passes = [event for event in events if event["ph"] == "X" and event["pid"] == process and event["cat"] in {"F", "B", "W"}]
        assert len(passes) == 4 * 4 * 3
        assert max(event["ts"] + event["dur"] for event in passes) / 1000 == pytest.approx(makespan)
        counters = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == process]
        assert max(counters) == max(row["predicted_bytes" if process == 1 else "measured_bytes"] for row in metrics["memory"])
    picture = (out / "timeline.svg").read_text()
    assert all(f"{100 * trained[source]['bubble_makespan']:.2f} %" in picture for source in ("predicted", "measured"))


@pytest.mark.long(all=True)
def test_memory_of_each_rank_is_as_predicted(report: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    for row in json.loads((report[0] / "metrics.json").read_text())["memory"]:
        assert row["measured_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.05)


@pytest.mark.long
def test_the_demo_runs_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    finished = demo("--out", str(tmp_path), "--no-pace", "--no-one-device", *SMALL, launcher=launcher)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "metrics.json").read_text())["ranks"] == 2


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_interrupting_it_ends_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    arguments = ["--ranks", "2", "--out", str(tmp_path), *SMALL, "--steps", "100000"]
    running = subprocess.Popen([sys.executable, SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    while "Training" not in running.stdout.readline():
        assert running.poll() is None
    running.send_signal(number)
    _, noise = running.communicate(timeout=120)  # ends only when every rank has closed its output
    assert running.returncode == 128 + number
    assert noise == ""


@pytest.mark.long
def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finished = demo("--ranks", "2", "--out", str(tmp_path / "file" / "below"), *SMALL)
    assert finished.returncode == 1
    states(finished.stderr, "rank 0", 1)
    assert "NotADirectoryError" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule", "zb-x"], "there is no schedule 'zb-x'"),
        (["--layers", "6"], "--layers must be a multiple of the 8 stages of zb-v on 4 ranks, got 6"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--heads", "3"], "--width must be a multiple of --heads, got 320 and 3"),
    ],
)
def test_bad_options_are_reported_in_a_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(SCRIPT, run_name="__main__")
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
