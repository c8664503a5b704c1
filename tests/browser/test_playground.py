"""The playground in a real browser, opened from a file: schedules answered beforehand, the same as the explorer's, without a server.

The page has at most 3 MB.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.accessibility import CONTRAST
from tests.browser.chromium import Browser
from zerobubble import Costs, make, simulate
from zerobubble.explorer.playground import playground_html
from zerobubble.units import show_ms

SHAPES = ((2, 2), (2, 4), (4, 8))


def choose(browser: Browser, name: str, value: str) -> None:
    browser.run(
        f"(() => {{ const e = document.getElementById('p-{name}'); e.value = '{value}'; delete document.documentElement.dataset.state;"
        "e.dispatchEvent(new Event('change')); })()"
    )
    browser.until("document.documentElement.dataset.state === 'ready'")


@pytest.mark.sweep
@pytest.mark.parametrize("width", [1280, 390])
def test_every_choice_is_drawn_from_the_file_alone(browser: Browser, tmp_path: Path, width: int) -> None:
    file = tmp_path / "playground.html"
    file.write_text(playground_html(("1f1b", "zb-v", "chimera"), SHAPES), encoding="utf-8")
    browser.open(file, width)
    for name, ranks, microbatches in (("zb-v", 4, 8), ("1f1b", 2, 4)):
        for field, value in (("schedule", name), ("ranks", ranks), ("microbatches", microbatches)):
            choose(browser, field, str(value))
        schedule = make(name, ranks, microbatches)
        timeline = simulate(schedule, Costs.uniform(schedule.num_stages, (10, 10, 8), 0.5, stages_per_rank=schedule.num_stages // ranks))
        assert show_ms(timeline.makespan) in browser.run("document.querySelector('.cards').innerText")
        browser.settle()
        assert int(browser.run("document.querySelector('.stage').dataset.boxes")) == sum(map(len, timeline.rows))
    assert browser.run("location.hash") == "#schedule=1f1b&ranks=2&microbatches=4"
    choose(browser, "schedule", "chimera")
    for button in browser.run("[...document.querySelectorAll('.bar button')].map((e) => e.id)"):
        browser.click(f"#{button}")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    assert browser.run(CONTRAST) == []
    assert browser.errors == []


@pytest.mark.long
def test_the_whole_playground_has_at_most_three_megabytes() -> None:
    assert len(playground_html().encode()) < 3_000_000
