"""`zerobubble watch` reads run folders as they grow, and accepts or refuses any file that a killed process leaves.

Figures of runs are those of their lines. Each state of a run is recognized. Memory is bounded, however many steps a run has.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.refusals import raises, states
from tests.run_folders import COSTS, SCHEDULE, Recorded, on_this_host
from zerobubble import Costs, InputError, simulate
from zerobubble.cli import main
from zerobubble.run_folder import HEADER, StepReport, drifts, log_name, to_line
from zerobubble.timeline import Timeline
from zerobubble.watch.app import WatchApp
from zerobubble.watch.figures import figures
from zerobubble.watch.page import page_parts, timeline_parts
from zerobubble.watch.run import RunState, WatchedRun
from zerobubble.watch.series import MOST_BINS, Series, mean_of


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """A run of 30 steps, whose stage 1 takes half as long again as planned."""
    run = Recorded(tmp_path / "run", slow=1.5)
    for number in range(30):
        run.step(number, loss=1 / (1 + number))
    return run


def test_the_state_is_printed_once(recorded: Recorded) -> None:
    recorded.details(26)
    done = CliRunner().invoke(main, ["watch", str(recorded.folder), "--json"])
    assert done.exit_code == 0, done.output
    (state,) = json.loads(done.output)
    assert (state["run"], state["schedule"], state["ranks"], state["step"]) == (str(recorded.folder), "zb-h1", 2, 29)
    assert state["status"]["state"] == "running"
    assert (state["loss"], state["step_seconds"], state["bubble"]) == (pytest.approx(1 / 30), 0.2, 0.25)
    plan = simulate(SCHEDULE, COSTS)
    assert state["planned"] == {"step_seconds": plan.makespan / 1e9, "bubble": plan.bubble_makespan}
    assert {row["passes"]: round(row["drift"], 6) for row in state["passes"]} == {
        **dict.fromkeys(("0F", "0B", "0W"), 0.0),
        **dict.fromkeys(("1F", "1B", "1W"), 0.5),
    }
    assert state["waits"] == [{"rank": rank, "waits_for": 1 - rank, "seconds": pytest.approx(0.01 * (rank + 1))} for rank in range(2)]
    peaks = [rank.peak_bytes for rank in plan.ranks]
    assert state["memory"] == [{"rank": rank, "measured": 4 * (rank + 1), "forecast": peaks[rank]} for rank in range(2)]
    assert state["details_step"] == 26
    assert state["series"]["stage 1"] == [[step, pytest.approx(0.042)] for step in range(30)]
    assert len(state["series"]["loss"]) == 30


def test_why_a_run_is_slower_than_its_plan(tmp_path: Path) -> None:
    """The sentence has the passes, their rank and who waits, and the time outside of passes if it is most of the excess."""
    recorded = Recorded(tmp_path / "run", slow=1.5)
    recorded.step(3)
    run = WatchedRun(str(recorded.folder))
    assert (run.difference, figures(run)["outcome"]) == (None, "")
    slow = simulate(SCHEDULE, Costs.from_ms((10, 30), (10, 10), (8, 8), 0.5))
    recorded.details(3, slow)
    run.refresh()
    assert run.difference is not None
    assert run.difference.cause is not None
    assert (run.difference.cause.part, run.difference.cause.rank) == ("passes", 1)
    state = figures(run)
    states(state["outcome"], "Step 3", "F", "stage 1", "rank 1", "30 ms", "10 ms", "rank 0 waits")
    assert "200 ms" not in state["outcome"]
    (why, cards) = [page_parts([run], [state])[part] for part in ("why", "cards")]
    states(cards, "1F", "rank 1", "1 step")
    assert state["outcome"] in why
    recorded.details(4, simulate(SCHEDULE, COSTS), slot=1)  # planned passes in a step of 200 ms
    run.refresh()
    outside = 200 - simulate(SCHEDULE, COSTS).makespan / 1e6
    states(figures(run)["outcome"], "Step 4", f"{outside:g} ms", "200 ms")
    short = simulate(SCHEDULE, COSTS).makespan / 1e9
    recorded.step(5, seconds=short / 2)  # the passes of step 4 took longer than other steps as a whole
    for seconds in (short + 0.1, short, 0.0):
        recorded.details(4, simulate(SCHEDULE, COSTS), slot=1, seconds=seconds)
        run.refresh()
        assert ("100 ms" in figures(run)["outcome"]) == (seconds > short)
        assert "-" not in figures(run)["outcome"].replace("zb-h1", "")


def test_a_run_without_costs_says_what_a_comparison_needs(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "run", costs=None)
    recorded.step(0)
    run = WatchedRun(str(recorded.folder))
    states(page_parts([run], [figures(run)])["why"], "costs=", "profile")


def test_a_run_is_called_by_its_folder_and_by_its_path_among_equal_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [Recorded(tmp_path / place / "run").folder for place in ("a", "b")]
    (alone,) = WatchApp([WatchedRun(str(paths[0]))]).states()
    assert (alone["title"], alone["run"]) == ("run", str(paths[0]))
    assert [state["title"] for state in WatchApp([WatchedRun(str(path)) for path in paths]).states()] == list(map(str, paths))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in (".", "missing", "file"):
        done = CliRunner().invoke(main, ["watch", str(tmp_path / name), "--json"])
        assert done.exit_code == 2
        assert len(done.stderr.splitlines()) == 1
        assert str(tmp_path / name) in done.stderr
    run = Recorded(tmp_path / "later")
    header = run.folder / HEADER
    data = json.loads(header.read_text())
    header.write_text(json.dumps(data | {"format": "zerobubble run 9"}))
    with raises(InputError, got="zerobubble run 9", expected="zerobubble run 1"):
        WatchedRun(str(run.folder))
    for damaged in ("{", "[]", json.dumps(data | {"schedule": 3}), json.dumps(data | {"costs": {}})):
        header.write_text(damaged)
        with raises(InputError, file=str(header)):
            WatchedRun(str(run.folder))


def test_a_last_line_counts_once_it_is_complete(recorded: Recorded) -> None:
    run, log = WatchedRun(str(recorded.folder)), recorded.folder / log_name(0)
    line = to_line({"at": time.time(), **StepReport(30, 0.3, 0.5, 0.1, None).to_dict()})
    for part in (line[:40], line[40:]):
        assert run.step == 29
        with log.open("a") as file:
            file.write(part)
        run.refresh()
    assert run.step == 30
    assert figures(run)["unreadable_lines"] == {}


def test_the_rest_of_a_killed_process_is_passed_over(recorded: Recorded) -> None:
    with (recorded.folder / log_name(1)).open("a") as file:
        file.write('{"at":17,"step"\n{"step": 5}\n[3]\n7\n')
    recorded.step(30)
    run = WatchedRun(str(recorded.folder))
    assert (run.step, figures(run)["unreadable_lines"]) == (30, {log_name(1): 4})


def test_a_continued_run_replaces_the_steps_that_it_repeats(recorded: Recorded) -> None:
    recorded.end(0)
    recorded.end(1)
    assert WatchedRun(str(recorded.folder)).status().state is RunState.CLOSED
    for rank in range(2):
        on_this_host(recorded, rank, os.getpid())
    for number in range(20, 25):
        recorded.step(number, loss=7.0)
    points = figures(WatchedRun(str(recorded.folder)))["series"]["loss"]
    assert [step for step, _ in points] == list(range(25))
    assert [loss for _, loss in points[20:]] == [7.0] * 5


def test_each_state_of_a_run_is_recognized(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")

    def status() -> tuple[RunState, int | None]:
        found = WatchedRun(str(run.folder)).status()
        return found.state, found.rank

    assert status() == (RunState.BEGINS, None)
    run.step(0, at=time.time() - 1000)
    assert status() == (RunState.SILENT, None)
    run.step(1)
    assert status() == (RunState.RUNS, None)
    on_this_host(run, 1, 4242)
    with (run.folder / log_name(1)).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert status() == (RunState.RUNS, None)
    assert status() == (RunState.GONE, 1)
    assert "4242" in WatchedRun(str(run.folder)).status().why
    run.end(0, {"message": "rank 1 is gone", "rank": 1, "op": "run 1F3"})
    assert WatchedRun(str(run.folder)).status()[2:] == ("rank 1 is gone", 1, "run 1F3")
    assert status() == (RunState.FAILED, 1)


def test_the_timeline_is_of_a_step_that_all_ranks_recorded(recorded: Recorded) -> None:
    plan = simulate(SCHEDULE, COSTS)
    recorded.details(10)
    recorded.details(20, slot=1, ranks=(0,))
    run = WatchedRun(str(recorded.folder))
    assert run.details is not None
    assert run.details_step == 10
    # Rank 1's counter was ahead by 1000 ns at the same wall-clock time.
    assert [span.start for span in run.details.rows[0]] == [span.start for span in plan.rows[0]]
    assert [span.start for span in run.details.rows[1]] == [span.start - 1000 for span in plan.rows[1]]
    recorded.details(20, slot=1)
    run.refresh()
    assert run.details_step == 20


def test_without_costs_drift_is_from_the_first_steps(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run", costs=None)
    for number in range(60):
        run.slow = 1.0 if number < 20 else 1.25
        run.step(number)
    state = figures(WatchedRun(str(run.folder)))
    assert state["planned"] is None
    assert {row["passes"]: round(row["drift"], 6) for row in state["passes"] if row["stage"] == 1} == {"1F": 0.25, "1B": 0.25, "1W": 0.25}


def test_runs_are_compared_on_one_axis(recorded: Recorded, tmp_path: Path) -> None:
    other = Recorded(tmp_path / "<other>", costs=None)
    other.step(0)
    for each in (recorded, other):
        each.details(0)
    runs = [WatchedRun(str(recorded.folder)), WatchedRun(str(other.folder))]
    parts = page_parts(runs, [figures(run) for run in runs])
    assert "<other>" not in "".join(parts[name] for name in ("status", "cards", "lead", "tables"))
    assert [len(chart["runs"]) for chart in parts["charts"][:3]] == [2, 2, 2]
    timelines = timeline_parts(runs)
    assert timelines is not None
    assert [line["source"] for line in timelines["timelines"]] == ["simulated", "measured", "measured"]


def test_drifts_leave_out_what_costs_do_not_know() -> None:
    assert drifts({"0F": 0.02, "7F": 1.0}, COSTS) == {"0F": 1.0}
    assert drifts({"0F": 0.02}, None) == {}


def test_losses_that_are_no_numbers_are_kept(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    run.step(0, loss=float("nan"))
    run.step(1, loss=float("inf"))
    state = figures(WatchedRun(str(run.folder)))
    assert (state["step"], state["loss"], state["series"]["loss"]) == (1, None, [])


def test_series_keep_any_number_of_steps_in_bounded_memory() -> None:
    series, other = Series(), Series()
    for step in range(100_000):
        series.add(step, step % 2)
    for step in range(10):
        other.add(step, 0.5)
    assert len(series.means()) <= MOST_BINS
    assert set(series.means()[:-1]) == {0.5}
    assert mean_of([series, other]).means()[:3] == [0.5] * 3
    wide = mean_of([other], 4)
    assert (wide.width, wide.means()) == (4, [0.5] * 3)
    series.rewind(50_000)
    assert max(series.points()) < 50_000


def test_a_wider_bin_has_the_mean_of_its_steps_not_of_its_bins() -> None:
    series = Series()
    for step, value in ((0, 1.0), (MOST_BINS, 2.0), (2, 4.0)):
        series.add(step, value)
    assert series.width == 2, "the bins of steps 0 and 1, and of 2 and 3"
    series.add(1, 3.0)
    assert mean_of([series], 4).means()[0] == pytest.approx((1.0 + 3.0 + 4.0) / 3)


def test_a_timeline_of_a_run_reads_as_any_other(recorded: Recorded) -> None:
    recorded.details(3)
    details = WatchedRun(str(recorded.folder)).details
    assert details is not None
    assert Timeline.from_dict(details.to_dict()) == details
