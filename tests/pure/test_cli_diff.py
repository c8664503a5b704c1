"""`zerobubble diff`: plan and run from files, in words, as JSON, as a page and as a trace."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.packed import page_data, unpacked
from tests.refusals import states
from zerobubble import Costs, Timeline, diff, make, plan, simulate
from zerobubble.cli import main
from zerobubble.explain import PARTS, WaitsFor, gaps
from zerobubble.export import dumps
from zerobubble.io import save_plan
from zerobubble.timeline import Doing, Mark

SCHEDULE = make("zb-h1", 2, 4)
COSTS = Costs.from_ms((3, 3), (3, 3), (2, 2), 0.5)
SLOW = Costs.from_ms((3, 3), (3, 5), (2, 2), 1.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = simulate(SCHEDULE, SLOW)
    marks = ((Mark(Doing.OPTIMIZER, run.end, run.end + 1_000_000),), ())
    Path("run.json").write_text(dumps(Timeline("zb-h1", run.rows, run.memory, "measured", marks)))
    Path("mine.txt").write_text(SCHEDULE.to_text())
    Path("costs.json").write_text(dumps(COSTS))
    return tmp_path


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["diff", *args])


def test_a_difference_in_words_and_as_a_table(folder: Path) -> None:
    done = invoke("mine.txt", "run.json", "--costs", "costs.json")
    assert done.exit_code == 0, done.output
    expected = str(diff(SCHEDULE, COSTS, simulate(SCHEDULE, SLOW))).split()
    assert done.output.split()[: len(expected)] == expected
    states(" ".join(done.output.split()), "stage 1", "1.67x")
    last = next(line for line in done.output.splitlines() if line.split()[:1] == ["1"])
    rank, *parts, total = last.split()
    assert rank == "1"
    assert sum(map(float, parts)) == pytest.approx(float(total), abs=0.06)


def test_no_heading_of_the_table_is_cut(folder: Path) -> None:
    text = invoke("mine.txt", "run.json", "--costs", "costs.json").output
    states(text, *(word for part in PARTS for word in part.split()))


def test_a_plan_file_brings_its_costs(folder: Path) -> None:
    solved = plan(COSTS, 4, placements=SCHEDULE.placement, evaluations=20)
    assert solved.schedule is not None
    save_plan(solved, "plan.json")
    run = simulate(solved.schedule, SLOW)
    Path("run.json").write_text(dumps(run))
    done = invoke("plan.json", "run.json", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == diff(solved.schedule, COSTS, run).to_dict()


def test_plan_and_run_on_one_axis(folder: Path) -> None:
    done = invoke("mine.txt", "run.json", "--costs", "costs.json", "--html", "diff.html", "--trace", "trace.json")
    assert done.exit_code == 0, done.output
    page = Path("diff.html").read_text()
    for waiting in ("for a pass of another rank", "for a message", "for the host"):
        assert waiting in page
    data = page_data(page)
    planned, run = simulate(SCHEDULE, COSTS), simulate(SCHEDULE, SLOW)
    for drawn, timeline in zip(data["timelines"], (planned, run), strict=True):
        found = gaps(SCHEDULE, COSTS, timeline)
        assert drawn["gaps"]["first"] == list(accumulate(map(len, found), initial=0))
        columns = {name: unpacked(drawn["gaps"][name]) for name in ("start", "time", "what")}
        read = list(zip(*columns.values(), strict=True))
        assert read == [(gap.start, gap.end - gap.start, list(WaitsFor).index(gap.waits_for)) for row in found for gap in row]
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    idle = [event for event in events if event.get("cat") == "idle"]
    assert len(idle) == sum(len(row) for timeline in (planned, run) for row in gaps(SCHEDULE, COSTS, timeline))
    (step,) = [event for event in events if event["name"] == "optimizer"]
    assert (step["pid"], step["dur"]) == (2, 1000)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("mine.txt", "run.json"), "mine.txt has no costs"),
        (
            ("mine.txt", "costs.json", "--costs", "costs.json"),
            "costs.json holds costs of stages, not a timeline",
        ),
        (("mine.txt", "mine.txt", "--costs", "costs.json"), "mine.txt holds a schedule, not a timeline"),
        (("other.txt", "run.json", "--costs", "costs.json"), "rank 0 of the plan runs 0BW0 at place 2, the run ran 0B0"),
        (("none.txt", "run.json"), "cannot read none.txt"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, args: tuple[str, ...], sentence: str) -> None:
    Path("other.txt").write_text(make("1f1b", 2, 4).to_text())
    done = invoke(*args)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stdout == ""
