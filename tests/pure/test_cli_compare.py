"""The commands that compare schedules side by side, compare and table, and what check reports about a file."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.nearest import ROOT
from tests.pure.shapes import TRAINING
from tests.pure.test_cli import PAPER, refused, run
from tests.pure.test_export_pictures import PASSES
from tests.refusals import states
from zerobubble import Costs, Placement, lower, make, plan
from zerobubble.export.document import dumps
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.program import Send
from zerobubble.schedules import SCHEDULES

SHAPE = ["--ranks", "4", "--microbatches", "8"]
CAUSES = ("dependency", "comm", "imbalance", "memory", "reduction")


def compared(*args: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("compare", *args, "--json").stdout)
    return found


def test_compare_gives_the_papers_bubbles() -> None:
    figures = compared("1f1b", "zb-h1", "zb-h2", *PAPER)
    assert [(f["name"], round(f["bubble_span"], 4)) for f in figures] == [("1f1b", 0.2431), ("zb-h1", 0.1585), ("zb-h2", 0.1083)]


def test_costs_of_another_placement_are_refused_with_their_times_per_rank(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(dumps(replace(Costs.uniform(4, times=(10, 10, 8)), placement=Placement.linear(4))))
    result = run("compare", "1f1b", "zb-v", "-m", "8", "--costs", str(tmp_path / "costs.json"))
    assert result.exit_code == 2
    states(result.stderr, "zb-v", 8, 4, "--times 10,10,8")


def test_measured_costs_bring_their_ranks_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`zerobubble (compare [^`]*--costs costs.json[^`]*)`", page)
    costs = replace(Costs.uniform(4, times=(10, 10, 8)), placement=Placement.linear(4))
    Path("costs.json").write_text(dumps(costs))
    assert {f["num_stages"] for f in compared(*shlex.split(command)[1:])} == {4}
    assert run("show", "zb-h1", "-m", "8", "--costs", "costs.json").exit_code == 0
    Path("plan.json").write_text(dumps(plan(costs, 8, evaluations=20)))
    assert {f["num_stages"] for f in compared("1f1b", "--costs", "plan.json")} == {4}


def test_every_schedule_does_the_same_work_whatever_its_stages() -> None:
    names = [name for name in TRAINING if SCHEDULES[name].allows(4, 8)]
    figures = compared(*names, *SHAPE, "--times", "3,2,1", "--comm", "0.25")
    assert [f["name"] for f in figures] == names
    for f in figures:
        assert f["makespan_ms"] * (1 - f["bubble_makespan"]) == pytest.approx(8 * 6), f["name"]
        assert sum(f["idle_ms"].values()) == pytest.approx(4 * f["makespan_ms"] - 4 * 8 * 6), f["name"]
        assert {cause: pytest.approx(sum(rank[cause] for rank in f["idle_ms_per_rank"])) for cause in CAUSES} == f["idle_ms"]
        assert len(f["peak_microbatches_per_rank"]) == 4


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe"])
def test_messages_are_those_of_the_program(name: str) -> None:
    sends = sum(isinstance(action, Send) for row in lower(make(name, 4, 8)).rows for action in row)
    (figures,) = compared(name, *SHAPE, "--message-bytes", "1000")
    assert (figures["messages"], figures["sent_bytes"]) == (sends, 1000 * sends)
    assert "sent_bytes" not in compared(name, *SHAPE)[0]


def test_stages_per_rank_count_for_those_that_leave_them_open() -> None:
    figures = compared("1f1b", "interleaved-1f1b", "zb-v", *SHAPE, "--stages-per-rank", "3")
    assert [f["num_stages"] for f in figures] == [4, 12, 8]


def test_memory_is_reported_in_microbatches_and_follows_held() -> None:
    whole, half = (compared("zb-h1", "zb-v", *SHAPE, "--held", held) for held in ("1", "0.5"))
    assert [f["peak_microbatches_per_rank"] for f in whole] == [[4] * 4, [4] * 4]
    assert half[0]["peak_microbatches_per_rank"] == [4, 3.5, 3, 2.5]


def test_the_tables_mark_the_best() -> None:
    lines = run("compare", "gpipe", "1f1b", "zb-h2", *SHAPE).stdout.splitlines()
    times, idle = ([line.split() for line in lines if line.startswith(("gpipe ", "1f1b ", "zb-h2 "))][k : k + 3] for k in (0, 3))
    assert times[0] == ["gpipe", "33", "ms", "27.27", "%", "33", "ms", "27.27", "%", "8", "48"]
    assert times[1] == ["1f1b", "33", "ms", "27.27", "%", "33", "ms", "27.27", "%", "1", "to", "4*", "48"]
    assert times[2] == ["zb-h2", "24", "ms*", "0.00", "%*", "27", "ms*", "11.11", "%*", "7", "48"]
    assert idle == [
        ["gpipe", "27.27", "%", "0.00", "%", "0.00", "%", "0.00", "%*"],
        ["1f1b", "18.18", "%", "0.00", "%", "0.00", "%", "9.09", "%"],
        ["zb-h2", "11.11", "%*", "0.00", "%", "0.00", "%", "0.00", "%*"],
    ]


def test_all_are_drawn_on_one_time_axis() -> None:
    output = run("compare", "1f1b", "zb-h2", *SHAPE, "--width", "106").stdout
    drawn = [line for line in output.splitlines() if line.startswith("rank ")]
    assert len(drawn) == 8
    assert {len(line) for line in drawn[:4]} == {106}
    assert {len(line) for line in drawn[4:]} == {len("rank 0 ") + round(99 * 27 / 33)}
    axes = [line for line in output.splitlines() if line.strip().startswith("0 ")]
    assert len(axes) == 2
    assert len(set(axes)) == 1
    assert "BW backward" in output
    assert "W weight gradient" in output


def test_a_file_is_compared_by_its_own_shape_and_called_by_its_name(tmp_path: Path) -> None:
    schedule = make("zb-h1", 3, 5)
    for suffix, text in (("txt", schedule.to_text()), ("json", dumps(schedule)), ("csv", to_torch_csv(schedule))):
        file = tmp_path / f"mine.{suffix}"
        file.write_text(text)
        own, known = compared(str(file), "zb-h1")
        assert own.pop("name") == file.name
        assert known.pop("name") == "zb-h1"
        assert own == known
    states(refused("compare", str(file), "zb-h1", "--ranks", "4"), "mine.csv", 3, 5, 4)
    other = tmp_path / "other.txt"
    other.write_text(make("zb-h1", 3, 6).to_text())
    states(refused("compare", str(file), str(other)), "other.txt", 3, 6, 5)


def test_a_schedule_may_come_from_stdin() -> None:
    result = run("compare", "-", "gpipe", "--json", stdin=make("1f1b", 2, 3).to_text())
    assert [f["name"] for f in json.loads(result.stdout)] == ["1f1b", "gpipe"]


def test_costs_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(dumps(Costs.from_ms((1, 1, 1, 3), (1, 1, 1, 1), (1, 1, 1, 1), 0.5, (100, 10, 10, 10), (50, 5, 5, 5))))
    gpipe, zb = compared("gpipe", "zb-h1", *SHAPE, "--costs", str(file))
    assert (gpipe["peak_bytes_per_rank"], zb["peak_bytes_per_rank"][0]) == ([800, 80, 80, 80], 400)
    assert gpipe["idle_ms"]["imbalance"] > 0
    assert "400 B" in run("compare", "zb-h1", *SHAPE, "--costs", str(file)).stdout
    states(refused("compare", "gpipe", "zb-v", *SHAPE, "--costs", str(file)), "zb-v", 8, 4)
    assert "--costs and --comm contradict" in refused("compare", "gpipe", *SHAPE, "--costs", str(file), "--comm", "1")
    file.write_text(make("gpipe", 2, 2).to_text())
    states(refused("compare", "gpipe", *SHAPE, "--costs", str(file)), file, "schedule", "costs")
    file.write_text(dumps(make("gpipe", 2, 2)))
    states(refused("compare", "gpipe", *SHAPE, "--costs", str(file)), file, "schedule", "costs")


def test_compare_writes_pictures_and_pages(tmp_path: Path) -> None:
    svg, page = tmp_path / "both.svg", tmp_path / "both.html"
    assert run("compare", "1f1b", "zb-h1", *SHAPE, "--svg", str(svg), "--html", str(page)).exit_code == 0
    assert len(ElementTree.parse(svg).findall(PASSES)) == 4 * 8 * (2 + 3)
    html = page.read_text()
    first, second = (each["makespan_ms"] for each in compared("1f1b", "zb-h1", *SHAPE))
    (row,) = re.findall(r'<th scope="row">zb-h1</th>.*?</tr>', html, re.DOTALL)
    assert ">27 ms*</td>" in row
    assert row.count(f">{100 * (second / first - 1):+.2f} %".replace("-", "\N{MINUS SIGN}")) == 2, "of period and makespan"
    titles = re.findall(r'<th scope="col">(.*?)</th>', html)
    assert titles[1:3] == ["period against 1f1b", "makespan against 1f1b"]
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("compare", "NAMES"),
        ("compare zb-h9 --ranks 2 --microbatches 2", "'zb-h1', 'zb-h2' or 'zb-v'"),
        ("compare gpipe 1f1b", "gpipe needs --ranks P and --microbatches M"),
        ("compare gpipe dualpipe --ranks 3 --microbatches 8", "dualpipe needs an even number of ranks, got 3"),
        ("compare gpipe 1f1b --ranks 2 --microbatches 2 --stages-per-rank 2", "has no effect: none of gpipe, 1f1b leaves it open"),
        ("compare gpipe missing.csv --ranks 2 --microbatches 2", "cannot read missing.csv"),
        ("compare gpipe --ranks 2 --microbatches 2 --message-bytes -1", "--message-bytes"),
        ("compare gpipe --ranks 2 --microbatches 2 --times 1,1", "F,B,W"),
        ("compare gpipe --ranks 2 --microbatches 2 --html /no/such/folder/a.html", "cannot write /no/such/folder/a.html"),
        ("table", "table needs --ranks P and --microbatches M"),
        ("table --ranks 2", "table needs --microbatches M"),
        ("table --ranks 0 --microbatches 2", "at least 1 rank, got 0"),
        ("table --ranks 99999 --microbatches 99999", "at most 2,000,000"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(args: str, said: str) -> None:
    assert said in refused(*args.split())


def test_table_shows_closed_forms_and_simulation_agreeing() -> None:
    rows = json.loads(run("table", *SHAPE, "--json").stdout)
    assert [row["name"] for row in rows] == [name for name in TRAINING if SCHEDULES[name].allows(4, 8)]
    assert len([row for row in rows if row["bubble"]["agrees"]]) > 20
    for row in [row for row in rows if row["bubble"]["formula"]]:
        assert row["bubble"]["agrees"], row["name"]
        assert row["peak_microbatches"]["agrees"], row["name"]
        assert row["bubble"]["closed"] == row["bubble"]["simulated"]
    assert {row["name"]: row["bubble"]["simulated"] for row in rows}["zb-h1"] == 3


def test_table_marks_where_a_form_does_not_hold() -> None:
    rows = {row["name"]: row for row in json.loads(run("table", *PAPER, "--json").stdout)}
    assert (rows["zb-h2"]["bubble"]["holds"], rows["zb-h2"]["bubble"]["agrees"]) == (True, True)
    assert rows["zb-h2"]["bubble"]["closed"] == pytest.approx(7 * (18.522 + 18.086 - 2 * 9.337 + 2 * 0.601))
    assert (rows["zb-v"]["bubble"]["holds"], rows["zb-v"]["bubble"]["agrees"]) == (False, False)
    text = {line.split()[0]: line.split() for line in run("table", *PAPER).stdout.splitlines()[:25] if line}
    assert text["zb-h1"] == ["zb-h1", "207.725", "207.725", "ok", "15.85", "%", "8", "8", "ok"]
    assert text["zb-v"][3:] == [f"{100 * rows['zb-v']['bubble_span']:.2f}", "%", "8", "8", "ok"]


def test_table_shows_what_is_left_out_and_why() -> None:
    states(run("table", "--ranks", "3", "--microbatches", "8").stdout, 3, "ranks")


def test_check_shows_which_schedule_a_file_holds() -> None:
    schedule = make("zb-h1", 4, 8)
    csv = to_torch_csv(schedule)
    states(run("check", "-", stdin=csv).stdout.splitlines()[1], "zb-h1")
    data = json.loads(run("check", "-", "--json", stdin=csv).stdout)["recognition"]
    assert "interleaved-zb" in data.pop("also")
    assert data == {"exact": True, "name": "zb-h1", "share": 1.0, "difference": "", "relabeled": False}
    swapped = csv.replace("2F3,2I2", "2I2,2F3")
    assert run("check", "-", stdin=swapped).stdout.splitlines()[1].endswith("rank 2, position 5: runs 2B2 where zb-h1 runs 2F3")


def test_a_file_too_long_to_be_compared_is_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["zerobubble.cli.check"], "MOST_RECOGNIZED", 47)
    states(run("check", "-", stdin=make("gpipe", 3, 8).to_text()).stdout.splitlines()[1], 47, "passes")


def marked(text: str) -> list[str]:
    result = run("check", "-", stdin=text)
    assert result.exit_code == 1
    return result.stdout.splitlines()


def test_check_marks_the_pass_in_a_csv() -> None:
    assert marked("0F0,0F1,0B0,0B1\n1F0, 1F1 ,,1B1,1I0,1B0\n") == [
        "stage 1, microbatch 0 on rank 1 has 1BW0 and 1B0: BW is B and W in one, so keep either BW or the pair",
        "  line 2 | 1F0, 1F1 ,,1B1,1I0,1B0",
        "         | ^^^            ^^^ ^^^",
    ]


def test_check_marks_the_pass_in_the_text_form_and_shows_what_is_around() -> None:
    text = make("gpipe", 2, 8).to_text().replace("1BW6 1BW7", "1BW7 1BW7")
    assert marked(text + "# the end\n") == [
        "rank 1 runs 1BW7 at position 15, but it already ran at rank 1 position 14: remove one",
        "  line 6 | … 1BW3 1BW4 1BW5 1BW7 1BW7",
        "         |                       ^^^^",
        "stage 1, microbatch 6 on rank 1 lacks 1BW6, so no gradient flows back: add it to the row",
        "  line 6 | … 1F2 1F3 1F4 1F5 1F6 1F7 1BW0 1BW1 1BW2 …",
        "         |                   ^^^",
    ]


def test_check_marks_the_end_of_a_row_that_lacks_everything() -> None:
    lines = marked("0F0,0F1,0B0,0B1\n1F0,1B0\n")
    assert lines == [
        "stage 1, microbatch 1 on rank 1 lacks 1F1 and 1BW1, so nothing is computed: add it to the row",
        "  line 2 | 1F0,1B0",
        "         |         ^",
    ]


def test_check_shows_the_row_of_a_json_file_in_the_text_form() -> None:
    text = dumps(make("1f1b", 2, 2)).replace('"0F0", "0F1"', '"0F9", "0F1"')
    assert marked(text)[:3] == [
        "rank 0 runs 0F9 at position 0, but there are only microbatches 0 to 1: declare more or remove the pass",
        "  rank 0 | 0F9 0F1 0BW0 0BW1",
        "         | ^^^",
    ]


def test_check_marks_passes_that_overlap() -> None:
    schedule = make("dualpipe-v", 2, 8)
    text = schedule.to_text()
    line = next(line for line in text.splitlines() if "&" in line)
    step = next(word for word in line.split() if "&" in word)
    first, _, second = step.partition("&")
    found = marked(text.replace(step, f"{first}&{first}"))
    at = next(k for k, sentence in enumerate(found) if f"runs {first}" in sentence and "already ran" in sentence)
    excerpt, carets = found[at + 1], found[at + 2]
    assert excerpt[carets.index("^") : carets.rindex("^") + 1] == first
    assert excerpt[: carets.index("^")].endswith(f"{first}&")
    assert second


def test_check_has_no_row_for_a_fault_of_the_whole() -> None:
    text = make("1f1b", 2, 2).to_text().replace("microbatches 2", "microbatches 99")
    assert marked(text) == ["the number of microbatches is 99, but the rows have only 8 passes: correct it or add the passes"]


def test_check_shows_the_first_faults_and_counts_the_rest() -> None:
    text = "\n".join(line[:7] if line.startswith("rank 1") else line for line in make("gpipe", 2, 32).to_text().split("\n"))
    lines = marked(text)
    assert sum(line.startswith("stage 1, microbatch ") for line in lines) == 20
    states(lines[-1], 12, "--json")
    assert len(json.loads(run("check", "-", "--json", stdin=text).stdout)["faults"]) == 32
