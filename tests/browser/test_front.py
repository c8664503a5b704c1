"""The front chart in a browser: points open their schedules by mouse, touch and keys, and outliers do not compress the scale."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.browser.chromium import Browser
from zerobubble.planning import Workload
from zerobubble.planning.pareto import Front, pareto
from zerobubble.units import counted
from zerobubble.view.front_page import front_html

LIMITS = [1, 1.5, 2, 3, 4, 6]
FOCUS = "document.querySelector('svg.front').focus()"
POINT = "document.querySelectorAll('svg.front .winner')"


@cache
def front() -> Front:
    return pareto(Workload.uniform(4, times=(10, 10, 8), comm=0.2), 8, LIMITS, placements=["linear", "vee"], seconds=0)


class Chart:
    def __init__(self, browser: Browser, folder: Path, width: int) -> None:
        self.browser = browser
        (folder / "front.html").write_text(front_html(front(), "A front"), encoding="utf-8")
        browser.open(folder / "front.html", width, touch=width < 500)

    def place(self, n: int) -> tuple[float, float]:
        """The middle of the point of a limit in the window; winners are drawn from the last to the first, below all others."""
        self.browser.settle()
        count = len(front().points)
        box = f"{POINT}[{count - 1 - n}].getBoundingClientRect()"
        x, y = self.browser.run(f"(() => {{ const b = {box}; return [b.left + b.width / 2, b.top + b.height / 2]; }})()")
        return x, y

    def text(self, name: str) -> str:
        return str(self.browser.run(f"document.getElementById('{name}').textContent"))

    @property
    def boxes(self) -> int:
        self.browser.settle()
        return int(self.browser.run("document.querySelector('.stage').dataset.boxes"))

    def shows(self, n: int) -> None:
        """The viewer shows the schedule of a limit, and says so."""
        point = front().points[n]
        solved = point.plan
        assert solved.timeline is not None
        name = f"{counted(point.memory, 'microbatch')}: {point.plan.choices[0].name}"
        self.browser.until(f"document.getElementById('opened').textContent === {name!r}")
        assert self.text("front-details").startswith(f"{name}, bubble {100 * (solved.bubble or 0):.2f} %"), "its figures are given once"
        assert self.boxes == sum(map(len, solved.timeline.rows))
        label = self.browser.run("document.querySelector('canvas.over').getAttribute('aria-label')")
        assert f"makespan {solved.timeline.makespan / 1e6:.4g} ms" in label


@pytest.fixture
def chart(browser: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Chart]:
    yield Chart(browser, tmp_path, request.param)
    assert browser.errors == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"


wide = pytest.mark.parametrize("chart", [1280], indirect=True)
narrow = pytest.mark.parametrize("chart", [390], indirect=True)


@pytest.mark.long
@wide
def test_a_point_that_is_clicked_opens_its_schedule(chart: Chart) -> None:
    bubbles = [point.plan.bubble or 0.0 for point in front().points]
    chart.shows(bubbles.index(min(bubbles)))
    for n in (0, 2):
        chart.browser.point(*chart.place(n))
        assert chart.text("front-details").startswith(f"{counted(LIMITS[n], 'microbatch')}: ")
        x, y = chart.place(n)
        chart.browser.drag((x, y), (x, y))
        chart.shows(n)


@wide
def test_the_front_is_gone_through_and_opened_by_keys(chart: Chart) -> None:
    chart.browser.run(FOCUS)
    chart.browser.key("Home")
    for limit in LIMITS[1:3]:
        chart.browser.key("ArrowRight")
        assert chart.text("front-details").startswith(f"{counted(limit, 'microbatch')}: ")
    winner = chart.text("front-details")
    chart.browser.key("ArrowUp")
    other = front().points[2].plan.choices[1].name
    assert f"microbatches: {other}, bubble" in chart.text("front-details")
    chart.browser.key("ArrowDown")
    assert chart.text("front-details") == winner
    chart.browser.key("Enter")
    chart.shows(2)
    chart.browser.key("Escape")
    assert chart.text("front-details") == ""


@pytest.mark.long
@wide
def test_buttons_keys_wheel_and_drags_zoom_and_move_it(chart: Chart) -> None:
    browser = chart.browser
    home = [chart.place(n) for n in range(len(LIMITS))]

    def apart() -> float:
        return chart.place(1)[0] - chart.place(0)[0]

    was = apart()
    browser.click("#front-in")
    assert apart() == pytest.approx(was / 0.6, rel=0.01)
    browser.run(FOCUS)
    for key in ("PageDown", "PageUp"):
        before = chart.place(2)
        browser.key(key)
        assert chart.place(2) != before, key
    here = chart.place(2)
    browser.drag((540, home[2][1]), (500, home[2][1]))
    assert chart.place(2)[0] == pytest.approx(here[0] - 40, abs=2)
    browser.click("#front-all")
    assert [chart.place(n) for n in range(len(LIMITS))] == home
    browser.run(FOCUS)
    for key, larger in (("+", True), ("-", False)):
        before = apart()
        browser.key(key)
        assert (apart() > before) == larger, key
    browser.key("0")
    browser.mouse("mouseWheel", *home[2], deltaX=0, deltaY=-100, modifiers=2)
    assert apart() > was
    assert chart.place(2) == pytest.approx(home[2], abs=2), "what is below the pointer stays there"


@wide
def test_no_part_of_the_page_is_far_from_the_one_before(chart: Chart) -> None:
    boxes = "document.querySelectorAll('main :is(header, .bar, .legend, .front, p, h2, .stage, .scroll)')"
    sides = chart.browser.run(f"[...{boxes}].map((e) => e.getBoundingClientRect()).map(({{ top, bottom }}) => [top, bottom])")
    gaps = [below[0] - above[1] for above, below in pairwise(sides)]
    assert max(gaps) < 60, gaps


@wide
def test_a_point_far_above_does_not_press_the_others_together(chart: Chart) -> None:
    """On an even axis the best half of this front would have a tenth of the height, or less."""
    bubbles = [point.plan.bubble or 0.0 for point in front().points]
    heights = [chart.place(n)[1] for n in range(len(LIMITS))]
    assert heights == sorted(heights), "a smaller bubble is further down"
    middle, last = len(bubbles) // 2, len(bubbles) - 1
    even = (bubbles[middle] - bubbles[last]) / (bubbles[0] - bubbles[last])
    drawn = (heights[last] - heights[middle]) / (heights[last] - heights[0])
    assert drawn > 2 * even


@pytest.mark.long
@narrow
def test_a_finger_opens_a_point_and_two_zoom(chart: Chart) -> None:
    browser = chart.browser
    x, y = chart.place(1)
    browser.touch("touchStart", (x, y))
    browser.touch("touchEnd")
    chart.shows(1)
    browser.run("document.querySelector('svg.front').scrollIntoView({ block: 'center' })")
    apart, y = chart.place(1)[0] - chart.place(0)[0], chart.place(1)[1]
    browser.touch("touchStart", (150, y), (220, y))
    browser.touch("touchMove", (120, y), (260, y))
    browser.touch("touchMove", (90, y), (300, y))
    browser.touch("touchEnd")
    assert chart.place(1)[0] - chart.place(0)[0] > 1.5 * apart
