"""The report in a real browser: its scripts run without an error, draw every pass and every loss, and answer pointer and keys."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.browser.chromium import Browser
from tests.browser.picture import Picture
from zerobubble.cli import main
from zerobubble.costs import Costs
from zerobubble.schedules import make
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.view import Report, Viewed, report_html


@pytest.mark.long
def test_the_page_draws_every_pass_and_answers_pointer_and_keys(browser: Browser, tmp_path: Path) -> None:
    schedule = make("zb-v", 4, 8)
    plan = simulate(schedule, Costs.uniform(schedule.num_stages, comm=0.1, stages_per_rank=2))
    report = Report("A run", timelines=[plan, Timeline(plan.name, plan.rows, source="measured")], losses={"a": [3.0, 2.0], "b": [3.0, 2.0]})
    picture = Picture(browser, tmp_path, report_html(report), [Viewed(timeline) for timeline in report.timelines])
    passes = 2 * sum(1 for _ in plan.spans())
    assert picture.boxes == passes
    picture.point_at_pass(0, "0F0")
    assert "forward of stage 0, microbatch 0" in picture.tip
    assert "started at once" in picture.tip
    browser.run("document.querySelector('canvas.over').focus()")
    browser.key("ArrowRight")
    assert "forward of stage 0, microbatch 1" in picture.tip
    browser.key("ArrowDown")
    assert "rank 1" in picture.tip
    for _ in range(9):
        browser.click("#zoom-in")
    assert 0 < picture.boxes < passes
    assert browser.run("document.querySelectorAll('#losses path.run').length") == 2
    assert browser.errors == []


def test_each_of_two_overlapped_passes_answers_on_its_half(browser: Browser, tmp_path: Path) -> None:
    schedule = make("dualpipe-v", 2, 4)
    plan = simulate(schedule, Costs.uniform(schedule.num_stages))
    first, second = next(step for step in schedule.steps[0] if len(step) > 1)
    picture = Picture(browser, tmp_path, report_html(Report("Overlapped", timelines=[plan])), [Viewed(plan)])
    for op, other in ((first, second), (second, first)):
        picture.point_at_pass(0, str(op))
        assert f"{op} on rank 0" in picture.tip
        assert f"overlapped with\t{other}" in picture.tip
        assert "idle before\t0.000 ms" in picture.tip
    assert browser.errors == []


def test_all_boxes_of_a_large_run_are_drawn(browser: Browser, tmp_path: Path) -> None:
    schedule = make("interleaved-1f1b", 8, 64)
    plan = simulate(schedule, Costs.uniform(schedule.num_stages, stages_per_rank=2))
    picture = Picture(browser, tmp_path, report_html(Report("Large", timelines=[plan, plan])), [Viewed(plan), Viewed(plan)])
    assert picture.boxes == 2 * 8 * 64 * 2 * 2
    assert browser.errors == []


def test_commands_of_a_page_are_copied(browser: Browser, tmp_path: Path) -> None:
    command = [
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "4",
        "--placement",
        "linear",
        "--budget",
        "0",
        "--html",
        str(tmp_path / "plan.html"),
    ]
    assert CliRunner().invoke(main, command).exit_code == 0
    browser.open(tmp_path / "plan.html")
    browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    assert browser.run("document.querySelectorAll('pre').length === document.querySelectorAll('pre + button').length")
    browser.click("pre + button")
    browser.until("document.querySelector('pre + button').textContent === 'copied'")
    assert browser.run("window.copied === document.querySelector('pre').textContent")
    browser.run("navigator.clipboard.writeText = () => Promise.reject()")
    browser.click("pre + button")
    browser.until("document.querySelector('pre + button').textContent === 'selected'")
    assert browser.run("getSelection().toString() === document.querySelector('pre').textContent")
    assert browser.errors == []


def test_the_table_of_a_plan_fits_the_page(browser: Browser, tmp_path: Path) -> None:
    command = ["plan", "--ranks", "4", "--microbatches", "8", "--times", "10,11,8", "--comm", "0.5", "--memory", "4"]
    command += ["--placement", "linear,vee,wave-4", "--evaluations", "20", "--html", str(tmp_path / "plan.html")]
    assert CliRunner().invoke(main, command).exit_code == 0
    browser.open(tmp_path / "plan.html")
    table = "document.querySelector('.scroll:has(table)')"
    assert browser.run(f"{table}.querySelectorAll('th[scope=col]').length") >= 10
    assert browser.run(f"{table}.scrollWidth <= {table}.clientWidth")
    assert browser.run("document.querySelector('#reasons + ul li').getBoundingClientRect().left > document.querySelector('h1').offsetLeft")
