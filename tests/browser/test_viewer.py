"""The viewer in a real browser, wide and narrow: every control, pointer, touch and keys, bubbles and their reasons, and no errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from tests.browser.chromium import Browser
from tests.browser.picture import Picture
from zerobubble import Costs, Limits, make, simulate
from zerobubble.explain import attribute, critical_path
from zerobubble.export.palette import COPY_COLORS, contrast
from zerobubble.offload import HostLink, plan_offloads, play_offloads
from zerobubble.timeline import Copying
from zerobubble.view import Viewed, comparison_html

COSTS = Costs.uniform(4, times=(10, 10, 8), comm=2)
MICROBATCH = COSTS.held_after_f[0]
WIDTHS = [1280, 390]


def viewed(name: str) -> Viewed:
    timeline = simulate(make(name, 4, 8), COSTS)
    layers = {"parameters": [MICROBATCH] * 4, "optimizer state": [2 * MICROBATCH] * 4}
    return Viewed(timeline, COSTS, limits=[6 * MICROBATCH] * 4, constant_bytes=layers, microbatch_bytes=[MICROBATCH] * 4)


VIEWED = [viewed("1f1b"), viewed("zb-h1")]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Picture]:
    width = request.param
    html = comparison_html("Two", ["makespan"], [["a"], ["b"]], VIEWED, "A note.")
    yield Picture(browser, tmp_path, html, VIEWED, width, touch=width < 500)
    assert browser.errors == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"


wide_and_narrow = pytest.mark.parametrize("opened", WIDTHS, indirect=True)
wide = pytest.mark.parametrize("opened", WIDTHS[:1], indirect=True)
narrow = pytest.mark.parametrize("opened", WIDTHS[1:], indirect=True)


def pixels(browser: Browser, canvas: str) -> str:
    return str(browser.run(f"document.querySelector('canvas.{canvas}').toDataURL()"))


def test_passes_too_narrow_for_their_numbers_say_how_to_see_them(browser: Browser, tmp_path: Path) -> None:
    viewed = [Viewed(simulate(make("1f1b", 32, 64), costs := Costs.uniform(32, times=(10, 10, 8))), costs)]
    Picture(browser, tmp_path, comparison_html("One", ["makespan"], [["a"]], viewed, ""), viewed)
    hint = "getComputedStyle(document.querySelector('.legend .narrow')).visibility"
    shown = [browser.run(hint)]
    for _ in range(8):
        browser.click("#zoom-in")
    shown.append(browser.run(hint))
    assert shown == ["visible", "hidden"]
    assert browser.errors == []


@pytest.mark.sweep
@wide_and_narrow
def test_every_button_changes_the_picture_and_says_so(opened: Picture) -> None:
    browser = opened.browser
    for toggle in ("messages", "critical", "lanes", "memory", "textures"):
        before = pixels(browser, "base") + pixels(browser, "over")
        browser.click(f"#{toggle}")
        assert browser.run(f"document.getElementById('{toggle}').getAttribute('aria-pressed')") == "true"
        assert pixels(browser, "base") + pixels(browser, "over") != before, toggle
        browser.click(f"#{toggle}")
        assert pixels(browser, "base") + pixels(browser, "over") == before, toggle
    for button, back in (("zoom-in", "zoom-all"), ("taller", "lower"), ("dark", "dark")):
        before = pixels(browser, "base")
        browser.click(f"#{button}")
        assert pixels(browser, "base") != before, button
        browser.click(f"#{back}")
        assert pixels(browser, "base") == before, back
    assert browser.run("document.documentElement.dataset.theme") == "light"


DRAWN = """(() => {
  const [texts, before] = [[], CanvasRenderingContext2D.prototype.fillText];
  CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
    if (parseFloat(this.font) <= 11) texts.push(text);
    before.call(this, text, ...at);
  };
  document.getElementById("dark").click();
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {
    CanvasRenderingContext2D.prototype.fillText = before;
    done(texts);
  })));
})()"""
"""The names of passes that are drawn anew in the other theme; other texts are larger."""


@wide
def test_all_passes_in_view_have_names_of_one_form(opened: Picture) -> None:
    """1F1B has passes of 10 and of 18 ms, of which only the longer ones would have space for stage, kind and microbatch."""
    forms = []
    for _ in range(8):
        names = opened.browser.run(DRAWN)
        assert names
        forms.append({bool(re.fullmatch(r"\d[A-Z]+\d", name)) for name in names})
        opened.browser.click("#zoom-in")
    assert {len(form) for form in forms} == {1}
    assert set.union(*forms) == {False, True}


COLORS = """((x, y) => {
  const hex = (pixel) => "#" + [...pixel].slice(0, 3).map((value) => value.toString(16).padStart(2, "0")).join("");
  const shown = (element) => {
    const g = new OffscreenCanvas(1, 1).getContext("2d");
    g.fillStyle = getComputedStyle(element).backgroundColor;
    g.fillRect(0, 0, 1, 1);
    return hex(g.getImageData(0, 0, 1, 1).data);
  };
  const canvas = document.querySelector("canvas.base");
  const { left, top } = canvas.getBoundingClientRect();
  const drawn = hex(canvas.getContext("2d").getImageData(x - left, y - top, 1, 1).data);
  return [drawn, shown(document.body), ...[...document.querySelectorAll(".legend i.waiting")].map(shown)];
})"""
"""The color of a point of the picture, that of the paper, and those of the legend for what ranks wait for."""


@wide
def test_the_legend_has_the_colors_of_the_picture_in_both_themes(opened: Picture) -> None:
    """Rank 3 of 1F1B waits for a pass until 30 ms, and for its message until 36 ms."""
    for dark in (False, True):
        opened.browser.media(dark)
        opened.browser.settle()
        for waiting, time in enumerate((15e6, 35.5e6)):
            x, y = opened.place(0, 3, time)
            drawn, paper, *legend = opened.browser.run(f"{COLORS}({x}, {y})")
            assert list(bytes.fromhex(drawn[1:])) == pytest.approx(list(bytes.fromhex(legend[waiting][1:])), abs=2)
            assert not dark or contrast(drawn, paper) >= 3
    opened.browser.media()


@wide
def test_a_bubble_shows_its_reason_its_cause_and_what_would_remove_it(opened: Picture) -> None:
    timeline = VIEWED[1].timeline
    assert attribute(make("zb-h1", 4, 8), COSTS).overall.dependency > 0
    row = timeline.rows[1]
    at = next(place for place in range(4, len(row)) if row[place].start > row[place - 1].end and str(row[place].why.cause) == "message")
    opened.point_at(1, 1, (row[at - 1].end + row[at].start) / 2)
    gap = (row[at].start - row[at - 1].end) / 1e6
    assert f"Bubble on rank 1\nfrom\t{row[at - 1].end / 1e6:.3f} ms\nfor\t{gap:.3f} ms" in opened.tip
    cause = row[at].why.op
    assert f"while the message of {cause} is in transit" in opened.tip
    assert "What would remove it: " in opened.tip
    opened.browser.run("document.querySelector('canvas.over').focus()")
    opened.point_at(1, 1, (row[at - 1].end + row[at].start) / 2)
    opened.browser.key("Enter")
    assert f"{cause} on rank" in opened.tip


@wide
def test_an_own_pass_that_could_run_in_a_bubble_is_named(opened: Picture) -> None:
    opened.point_at(0, 0, VIEWED[0].timeline.rows[0][4].start - 5_000_000)
    assert "0F4 of this rank is ready: run here it would fill 10.000 ms" in opened.tip
    assert "It costs memory" in opened.tip
    opened.point_at(0, 3, VIEWED[0].timeline.end - 1_000_000)
    assert "rank 3 has done all its passes" in opened.tip


@wide
def test_a_pass_shows_what_it_waited_for_and_whom_it_delays(opened: Picture) -> None:
    opened.point_at_pass(0, "1F0")
    assert "waited for the message of 0F0, on rank 0" in opened.tip
    assert "delays 2F0 on rank 2" in opened.tip
    assert "1BW0 on rank 1 uses its result" in opened.tip


@pytest.mark.long
@wide
def test_keys_go_through_passes_and_bubbles_zoom_move_and_leave(opened: Picture) -> None:
    browser = opened.browser
    browser.run("document.querySelector('canvas.over').focus()")
    seen = []
    for _ in range(12):
        browser.key("ArrowRight")
        seen.append(opened.tip.splitlines()[0])
    assert seen[0] == "forward of stage 0, microbatch 0"
    assert "Bubble on rank 0" in seen
    assert len(set(seen)) > 7
    browser.key("ArrowLeft")
    assert opened.tip.splitlines()[0] == seen[-2]
    browser.key("ArrowDown")
    assert "rank 1" in opened.tip
    whole = opened.boxes
    for _ in range(5):
        browser.key("+")
    assert opened.boxes < whole
    for key in ("PageDown", "End", "Home", "-", "0"):
        before = pixels(browser, "base")
        browser.key(key)
        assert pixels(browser, "base") != before or key == "Home", key
    assert opened.boxes == whole
    browser.key("Escape")
    assert opened.tip == ""


@wide
def test_memory_is_reported_with_its_layers_and_its_limit(opened: Picture) -> None:
    opened.browser.click("#memory")
    x, y = opened.place(0, 0, 60_000_000)
    opened.browser.point(x, y + opened.row)
    held = next(size for time, size in reversed(VIEWED[0].timeline.memory[0]) if time <= 60_000_000)
    assert f"activations\t{held / MICROBATCH:g} microbatches" in opened.tip
    assert "parameters\t1 microbatches" in opened.tip
    assert "optimizer state\t2 microbatches" in opened.tip
    assert "limit of activations\t6 microbatches" in opened.tip


@wide
def test_dragging_moves_and_play_runs_to_the_end(opened: Picture) -> None:
    browser = opened.browser
    browser.click("#zoom-in")
    browser.click("#zoom-in")
    before = pixels(browser, "base")
    x, y = opened.place(0, 1, VIEWED[0].timeline.end / 2)
    browser.drag((x, y), (x - 150, y))
    assert pixels(browser, "base") != before
    browser.click("#play")
    # It is looked at and stopped in one go: it plays for twelve seconds, in which a busy machine may not come to a second call.
    browser.until("document.getElementById('clock').textContent.includes('of 4') && (document.getElementById('play').click(), true)")
    assert browser.run("document.getElementById('play').getAttribute('aria-label')") == "play"
    browser.run("const s = document.getElementById('moment'); s.value = 0; s.dispatchEvent(new Event('input'))")
    assert browser.run("document.getElementById('clock').textContent") == ""


@narrow
def test_a_finger_taps_moves_and_pinches(opened: Picture) -> None:
    browser = opened.browser
    x, y = opened.place_of(0, "3BW0")
    browser.touch("touchStart", (x, y))
    browser.touch("touchEnd")
    assert "3BW0 on rank 3" in opened.tip
    whole = opened.boxes
    browser.touch("touchStart", (150, y), (250, y))
    browser.touch("touchMove", (60, y), (340, y))
    browser.touch("touchEnd")
    assert 0 < opened.boxes < whole
    before = pixels(browser, "base")
    browser.touch("touchStart", (200, y))
    browser.touch("touchMove", (120, y))
    browser.touch("touchMove", (90, y))
    browser.touch("touchEnd")
    assert pixels(browser, "base") != before


@wide
def test_the_critical_path_is_that_of_the_simulation(opened: Picture) -> None:
    path = critical_path(VIEWED[1].timeline)
    opened.point_at_pass(1, str(path[-1].op))
    opened.browser.run("document.querySelector('canvas.over').focus()")
    opened.point_at_pass(1, str(path[-1].op))
    for span in reversed(path[:-1]):
        opened.browser.key("Enter")
        assert f"pass\t{span.op} on rank" in opened.tip


def test_copies_are_drawn_below_their_rank_and_reported(browser: Browser, tmp_path: Path) -> None:
    schedule, costs, link = make("1f1b", 3, 6), Costs.uniform(3, times=(10, 10, 10)), HostLink(5e7, 5e7)
    plans = plan_offloads(schedule, costs, Limits((2 * MICROBATCH,) * 3), link)
    timeline = play_offloads(schedule, costs, plans, link)
    seen = [Viewed(timeline, costs, limits=[2 * MICROBATCH] * 3)]
    page = Picture(browser, tmp_path, comparison_html("Copies", ["makespan"], [["a"]], seen, "A note."), seen)
    for theme in ("light", "dark"):
        assert browser.run("document.documentElement.dataset.theme") == theme
        for copy in timeline.copies[0]:
            x, y = page.place(0, 0, (copy.start + copy.end) / 2, share=1)
            down = 2.5 if copy.copying is Copying.TO_HOST else 5.5
            assert color_at(browser, x, y + down) == COPY_COLORS[copy.copying]
        browser.click("#dark")
    legend = str(browser.run("document.querySelector('.legend').innerText"))
    assert "copy to host" in legend
    assert "copy from host" in legend
    page.point_at_pass(0, "0F1")
    assert "what the forward saved goes to the host from 20.000 ms to 40.000 ms" in page.tip
    assert "what the forward saved comes back from the host from 70.000 ms to 90.000 ms" in page.tip
    page.point_at_pass(0, "0F2")
    assert "waited for a copy" in page.tip
    page.point_at(0, 0, 30_000_000)
    assert "20.000 ms until a copy" in page.tip
    assert "A faster link to the host" in page.tip
    assert browser.errors == []


def color_at(browser: Browser, x: float, y: float) -> str:
    """The color of the picture at a place in the window."""
    pixel = browser.run(
        "(() => { const canvas = document.querySelector('canvas.base'), box = canvas.getBoundingClientRect();"
        f" return [...canvas.getContext('2d').getImageData({x} - box.left, {y} - box.top, 1, 1).data]; }})()"
    )
    return "#" + "".join(f"{part:02x}" for part in pixel[:3])


@pytest.mark.long
def test_sixty_four_ranks_and_512_microbatches_fit_and_answer(browser: Browser, tmp_path: Path) -> None:
    timeline = simulate(make("1f1b", 64, 512), Costs.uniform(64, comm=0.1))
    html = comparison_html("Large", [], [[]], [Viewed(timeline)], "")
    assert len(html) < 300_000
    picture = Picture(browser, tmp_path, html, [Viewed(timeline)])
    assert (picture.boxes, picture.data("dense")) == (0, "64")
    picture.point_at_pass(0, "40F300")
    assert "40F300 on rank 40" in picture.tip
    for _ in range(9):
        browser.click("#zoom-in")
    assert 64 < picture.boxes < 2000
    assert browser.errors == []


def test_a_notebook_has_the_viewer_in_a_frame(browser: Browser, tmp_path: Path) -> None:
    html = make("1f1b", 2, 4)._repr_html_()
    assert html is not None
    document = re.search('srcdoc="([^"]*)"', html)
    assert document
    (tmp_path / "frame.html").write_text(unescape(document[1]), encoding="utf-8")
    browser.open(tmp_path / "frame.html")
    assert browser.run("document.querySelectorAll('#viewer canvas').length") == 2
    assert browser.errors == []
