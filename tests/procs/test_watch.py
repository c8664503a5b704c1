"""`zb.hooks.Telemetry` with a run folder on real ranks, and `zerobubble watch` of it: running, closed, and after a rank was killed."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import indent
from threading import Event, Thread
from types import ModuleType
from typing import Any

import pytest
import torch

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.refusals import raises
from zerobubble.run_folder import HEADER, log_name
from zerobubble.runtime.hooks import step_recorder, telemetry
from zerobubble.watch.figures import figures
from zerobubble.watch.page import page_parts, timeline_parts
from zerobubble.watch.run import RunState, WatchedRun

STEPS = 6


def record(group: Any, folder: Path, *, killed: bool = False) -> tuple[list[float], list[zb.hooks.StepReport], zb.Costs, dict[str, Any]]:
    """Losses, reports, costs and the state that the run shows before it ends."""
    seen: list[zb.hooks.StepReport] = []
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group) as pipe:
        costs = pipe.profile(*batch(4))
        pipe.attach(zb.hooks.Telemetry(seen.append, folder=folder, costs=costs, detail_every=2))
        losses = [pipe.step(*batch(4)).item() for _ in range(STEPS)]
        state = figures(WatchedRun(str(folder)))
        if killed:
            if pipe.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(zb.PipelineError):
                pipe.step(*batch(4))
    return losses, seen, costs, state


@pytest.mark.parametrize(("every", "reports"), [(1, range(12)), (2, [1, 3, 5, 7, 9, 11]), (5, [1, 2, 4, 6, 11])])
def test_one_report_in_so_many_has_details_and_some_of_the_first(every: int, reports: Sequence[int]) -> None:
    assert [report for report in range(12) if telemetry.has_details(report, every)] == [*reports]


def test_a_run_is_watched_while_it_goes_on_and_once_it_is_closed(world: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcomes = world.run(record, folder, ranks=2)
    run = WatchedRun(str(folder))
    assert run.status().state is RunState.CLOSED
    for rank, (losses, seen, costs, before) in enumerate(outcomes):
        assert before["status"]["state"] in ("begins", "running")
        log = run.logs[rank]
        assert log.loss.means() == losses
        assert [report.step for report in log.recent] == list(range(STEPS))
        for written, report in zip(log.recent, seen, strict=True):
            assert written.passes == pytest.approx(report.passes, abs=1e-9)
            assert written.peak_bytes == report.peak_bytes
            assert set(report.passes) == {f"{rank}F", f"{rank}B", f"{rank}W"}
            assert list(report.waits) == [1 - rank]
        assert [report.peak_bytes is not None for report in seen] == [step % 2 == 1 for step in range(STEPS)]
        assert run.header.costs == costs
    state = figures(run)
    assert state["planned"] is not None
    assert all(row["measured"] == row["forecast"] for row in state["memory"])
    assert run.details is not None
    assert run.details_step == STEPS - 1
    assert sorted(span.op for _, span in run.details.spans()) == sorted(op for row in run.header.schedule.rows for op in row)  # type: ignore[union-attr]
    made = {span.op: span for _, span in run.details.spans()}
    assert made[zb.Op.parse("0F0")].end <= made[zb.Op.parse("1F0")].start
    timelines = timeline_parts([run])
    assert timelines is not None
    assert [line["gaps"] is not None for line in timelines["timelines"]] == [False, True]
    assert page_parts([run], [state])["tables"].count("<section") == 3


@pytest.mark.long
def test_a_continued_run_keeps_its_folder_and_another_is_refused(world: Ranks, tmp_path: Path) -> None:
    for _ in range(2):
        world.run(record, tmp_path / "run", ranks=2)
    state = figures(WatchedRun(str(tmp_path / "run")))
    assert (state["status"]["state"], state["step"], state["unreadable_lines"]) == ("ended", STEPS - 1, {})
    assert all(world.run(record_twice, tmp_path / "twice", ranks=2))


def record_twice(group: Any, folder: Path) -> bool:
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, hooks=[zb.hooks.Telemetry(folder=folder)]):
        with raises(zb.InputError, rank=0, foreign=str(folder)):
            zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, hooks=[zb.hooks.Telemetry(folder=folder)])
        return True


def test_the_watch_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    ranks = Ranks(3)
    try:
        outcomes = ranks.outcomes(partial(record, folder=tmp_path / "run", killed=True), ranks=3)
    finally:
        ranks.kill()
    assert [state for state, _ in outcomes] == ["ok", "gone", "ok"]
    run = WatchedRun(str(tmp_path / "run"))
    status = run.status()
    assert (status.state, status.rank) == (RunState.FAILED, 1)
    assert "rank 1" in status.why
    assert run.logs[1].end is None
    assert run.logs[0].end is not None
    assert status.at >= run.logs[1].at


class Events(list[tuple[str, dict[str, float], int]]):
    """A stand-in for the packages: what was logged, by where."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        events = self

        class SummaryWriter:
            def __init__(self, folder: str) -> None:
                self.folder = folder

            def add_scalar(self, name: str, value: float, step: int) -> None:
                events.append((self.folder, {name: value}, step))

            def close(self) -> None:
                events.ended.append(self.folder)

        class WandbRun:
            def log(self, numbers: dict[str, float], step: int) -> None:
                events.append(("wandb", numbers, step))

            def finish(self) -> None:
                events.ended.append("wandb")

        board, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
        board.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
        wandb.init = lambda **given: WandbRun()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monkeypatch.setattr(telemetry, "find_spec", lambda name: name)


def log_elsewhere(group: Any) -> tuple[Events, list[zb.hooks.StepReport]]:
    events, seen = Events(), []
    with pytest.MonkeyPatch.context() as patch:
        events.install(patch)
        hook = zb.hooks.Telemetry(seen.append, costs=zb.Costs.uniform(2), tensorboard="board", wandb="project")
        with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, hooks=[hook]) as pipe:
            pipe.step(*batch(4))
    return events, seen


def test_numbers_reach_tensorboard_and_wandb(world: Ranks) -> None:
    for rank, (events, (report,)) in enumerate(world.run(log_elsewhere, ranks=2)):
        folder = f"board/rank-{rank}"
        assert events.ended == [folder, "wandb"]
        (logged,) = [numbers for name, numbers, _ in events if name == "wandb"]
        assert {name: value for where, numbers, _ in events if where == folder for name, value in numbers.items()} == logged
        assert (logged["pipeline/loss"], logged["pipeline/seconds"]) == (report.loss, report.seconds)
        assert f"pipeline/drift/{rank}F" in logged
        assert f"pipeline/waits_for_rank/{1 - rank}" in logged


def test_what_telemetry_cannot_use_is_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "find_spec", lambda name: None)
        with raises(zb.InputError, "tensorboard", "wandb"):
            zb.hooks.Telemetry(tensorboard="name", wandb="name")
    shares = zb.Costs.uniform(2)
    for wrong, values in (
        ({}, ("on_step", "folder", "tensorboard", "wandb")),
        ({"on_step": print, "every": 0, "detail_every": True}, ("every", "detail_every")),
        ({"on_step": print, "costs": shares.to_dict()}, ("costs",)),
        ({"on_step": lambda: None, "peak_flops": "1", "folder": 2}, ("on_step", "()", "peak_flops", "'1'", "folder", 2)),
    ):
        with raises(zb.InputError, *values):
            zb.hooks.Telemetry(**wrong)


def test_a_disk_that_fails_is_logged_once_and_training_goes_on(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    schedule = zb.make("1f1b", 1, 2)
    report = zb.hooks.StepReport(0, 1.0, 0.5, 1.0, None)
    keeper = step_recorder.FolderKeeper(tmp_path, 1, 2, schedule, None)
    keeper._log.close()
    recorder = step_recorder.StepRecorder([keeper])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.put(lambda: step_recorder.Recorded(report, schedule, None, 0.0))
        recorder.close(None)
    (message,) = caplog.messages
    assert f"the log of rank 1 in '{tmp_path}'" in message
    assert len((tmp_path / log_name(1)).read_text().strip().splitlines()) == 1


class _Failing:
    """A keeper that cannot keep its first steps."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.heard: list[tuple[int, int]] = []

    def keep(self, steps: Sequence[Any], left_out: int) -> None:
        self.heard.append((len(steps), left_out))
        if len(self.heard) <= self.failures:
            raise OSError("no space")

    def close(self, failure: zb.PipelineError | None) -> None:
        pass


def test_each_keeper_hears_how_many_steps_it_has_missed() -> None:
    """Before the second write, three steps are refused. A keeper also misses those of writes that fail."""
    keepers = [_Failing(0), _Failing(1), _Failing(2)]
    recorder = step_recorder.StepRecorder(keepers)
    recorder.close(None)  # from here on, nothing but this test writes
    for refused in (0, 3, 0, 0):
        for number in range(2):
            recorder.put(lambda number=number: number)  # type: ignore[misc]
        recorder._write(refused)
    assert [[left_out for _, left_out in keeper.heard] for keeper in keepers] == [[0, 3, 0, 0], [0, 5, 0, 0], [0, 5, 7, 0]]
    assert [count for keeper in keepers for count, _ in keeper.heard] == [2] * 12


def test_rank_0_alone_writes_the_schedule(tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / str(rank)
        step_recorder.FolderKeeper(folder, rank, 2, zb.make("1f1b", 2, 4), None).close(None)
        assert (folder / HEADER).exists() == (rank == 0)


class _Slow:
    """A keeper that keeps its first steps only once the recorder is being closed."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.begins, self.goes_on = Event(), Event()

    def keep(self, steps: Any, left_out: int) -> None:
        self.begins.set()
        assert self.goes_on.wait(60)
        self.kept += steps

    def close(self, failure: zb.PipelineError | None) -> None:
        self.kept.append(-1)


def test_steps_that_come_while_others_are_written_are_kept_before_it_is_closed() -> None:
    keeper = _Slow()
    recorder = step_recorder.StepRecorder([keeper])
    recorder.put(lambda: 0, at_once=True)  # type: ignore[arg-type,return-value]
    assert keeper.begins.wait(60)
    recorder.put(lambda: 1)  # type: ignore[arg-type,return-value]
    closes = Thread(target=recorder.close, args=(None,))
    closes.start()
    while not recorder._ends:
        time.sleep(0.001)
    keeper.goes_on.set()
    closes.join()
    assert keeper.kept == [0, 1, -1]


@pytest.mark.long
def test_the_page_on_watching_records_a_run(tmp_path: Path) -> None:
    """With the lines of the page for a script of one's own in place of the program's."""
    lines, program = programs_of("docs/watch.md")
    before, after = re.split(r"    costs = .*\n    pipe\.attach\(.*\n", program)
    run_forked(f"{before}    y = torch.sin(x)\n{indent(lines, '    ')}{after}", tmp_path, 2)
    state = figures(WatchedRun(str(tmp_path / "runs/first")))
    assert state["status"]["state"] == "ended"
    assert state["planned"] is not None
    assert torch.tensor([loss for _, loss in state["series"]["loss"]]).diff().mean() < 0


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `num_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("failure", [None, zb.PipelineError("rank 0 failed " + "x" * 3000, rank=0, op="run 0F1")])
def test_a_run_that_ends_on_a_full_disk_has_ended(tmp_path: Path, failure: zb.PipelineError | None) -> None:
    keeper = step_recorder.FolderKeeper(tmp_path, 0, 1, zb.make("1f1b", 1, 2), None)
    steps = [
        step_recorder.Recorded(zb.hooks.StepReport(number, 1.0, 0.5, 1.0, None), zb.make("1f1b", 1, 2), None, time.time())
        for number in range(2)
    ]
    keeper.keep(steps[:1], 0)
    log = tmp_path / log_name(0)
    size = log.stat().st_size
    run = WatchedRun(str(tmp_path))
    with full_disk(size + 5):
        with pytest.raises(OSError, match="large"):
            keeper.keep(steps[1:], 0)
        assert log.stat().st_size == size, "no part of a line"
        run.refresh()
        assert run.status().state is RunState.RUNS
        keeper.close(failure)
    for read in (run, WatchedRun(str(tmp_path))):
        read.refresh()
        status = read.status()
        assert read.step == 0
        assert figures(read)["unreadable_lines"] == {}
        if failure is None:
            assert status.state is RunState.CLOSED
        else:
            assert (status.state, status.rank, status.op) == (RunState.FAILED, 0, "run 0F1")
            assert str(failure).startswith(status.why)
    step_recorder.FolderKeeper(tmp_path, 0, 1, zb.make("1f1b", 1, 2), None).close(None)
    assert WatchedRun(str(tmp_path)).status().state is RunState.CLOSED


def attached_where_nothing_can_be_written(group: Any, folder: Path) -> float:
    """The loss of a step after the folders of several hooks were refused."""
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        (folder / "file").touch()
        for wrong in (f"{folder}/a\0b", folder / "file" / "run", "/proc/run", f"{folder}/{'x' * 300}"):
            with pytest.raises(zb.InputError):
                pipe.attach(zb.hooks.Telemetry(folder=wrong))
        with full_disk(0), pytest.raises(zb.InputError):
            pipe.attach(zb.hooks.Telemetry(folder=folder / "full"))
        pipe.attach(zb.hooks.Telemetry(folder=folder / "run"))
        return pipe.step(*batch(4)).item()


def test_a_folder_that_cannot_be_written_leaves_the_pipeline_open(world: Ranks, tmp_path: Path) -> None:
    losses = world.run(attached_where_nothing_can_be_written, tmp_path, ranks=2)
    assert losses[0] == losses[1]
    assert WatchedRun(str(tmp_path / "run")).status().state is RunState.CLOSED


def test_telemetry_writes_through_no_link_in_its_folder(tmp_path: Path) -> None:
    schedule = zb.make("1f1b", 1, 2)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / HEADER).symlink_to(precious)
    link = folder / log_name(0)
    for target in (precious, tmp_path / "missing"):
        link.symlink_to(target)
        with raises(zb.InputError, folder=str(folder)):
            step_recorder.FolderKeeper(folder, 0, 1, schedule, None)
        link.unlink()
    for make in (lambda: link.hardlink_to(precious), lambda: os.mkfifo(link)):
        make()
        with raises(zb.InputError, file=str(link)):
            step_recorder.FolderKeeper(folder, 0, 1, schedule, None)
        link.unlink()
    linked = tmp_path / "latest"
    linked.symlink_to(folder)
    step_recorder.FolderKeeper(linked, 0, 1, schedule, None).close(None)
    assert precious.read_text() == "mine"
    assert not (tmp_path / "missing").exists()
    assert WatchedRun(str(linked)).status().state is RunState.CLOSED
