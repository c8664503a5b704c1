"""`zerobubble watch` in a real browser: the page shows a run folder, follows it while it grows, and says why a run ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import Browser
from tests.browser.watching import watching
from tests.run_folders import COSTS, SCHEDULE, Recorded
from zerobubble import simulate
from zerobubble.units import show_percent

PASSES = sum(map(len, SCHEDULE.rows))
TEXT = "document.querySelector('main').innerText"


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_follows_a_run_to_its_end(browser: Browser, tmp_path: Path, width: int) -> None:
    run = Recorded(tmp_path / "run", slow=1.5)
    for number in range(12):
        run.step(number, loss=1 / (1 + number))
    run.details(11)
    with watching(run.folder) as address:
        browser.visit(address, address, width)
        browser.settle()
        assert int(browser.run("document.querySelector('.stage').dataset.boxes")) == 2 * PASSES
        assert "running" in browser.run("document.getElementById('status').innerText")
        text = browser.run(TEXT)
        assert show_percent(simulate(SCHEDULE, COSTS).bubble_makespan) in text
        assert "+50.0 %" in text
        assert browser.run("document.querySelectorAll('.chart path.run').length") == 5
        stages = "[...document.querySelectorAll('.chart path.run')].slice(-2)"
        for look in ("stroke", "stroke-dasharray"):
            assert len(set(browser.run(f"{stages}.map((e) => e.getAttribute('{look}'))"))) == 2
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        run.step(12)
        run.details(12, slot=1)
        browser.until("document.documentElement.dataset.step === '12'")
        assert browser.run("document.querySelectorAll('.chart svg').length") == 4
        run.end(0, {"message": "rank 1 is gone", "rank": 1, "op": None})
        browser.until("document.title.endsWith('failed')")
        assert "rank 1 is gone" in browser.run("document.querySelector('.run.caution').innerText")
        assert browser.errors == []


@pytest.mark.long
def test_two_runs_are_compared(browser: Browser, tmp_path: Path) -> None:
    runs = [Recorded(tmp_path / name, slow=slow) for name, slow in (("first", 1.0), ("second", 1.25))]
    for run in runs:
        for number in range(5):
            run.step(number)
        run.details(4)
    with watching(*(run.folder for run in runs)) as address:
        browser.visit(address, address)
        browser.settle()
        assert int(browser.run("document.querySelector('.stage').dataset.boxes")) == 4 * PASSES
        rows = browser.run("[...document.querySelectorAll('#cards tbody tr')].map((row) => row.innerText)")
        assert [run.folder.name in row for run, row in zip(runs, rows, strict=True)] == [True, True]
        assert browser.errors == []
