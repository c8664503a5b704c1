"""The page of a building block in the viewer: four steps on one axis of slots, with the reasons for idle time in each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import Browser
from tests.browser.picture import Picture
from zerobubble.blocks import four_steps, known_block
from zerobubble.costs import NS_PER_MS
from zerobubble.view import Viewed
from zerobubble.view.block_page import block_html


@pytest.mark.long
def test_the_steps_are_in_the_viewer_in_slots(browser: Browser, tmp_path: Path) -> None:
    block = known_block("v-half", 4)
    steps = four_steps(block, 8)
    viewed = [Viewed(layout.timeline) for layout in steps]
    picture = Picture(browser, tmp_path, block_html(block, steps), viewed)
    assert picture.boxes == sum(len(row) for layout in steps for row in layout.rows)
    repeated, reordered = steps.repeated.timeline.rows[0], steps.reordered.timeline
    at = next(n for n in range(1, len(repeated)) if repeated[n].start > repeated[n - 1].end)
    picture.point_at(1, 0, (repeated[at - 1].end + repeated[at].start) / 2)
    slots = (repeated[at].start - repeated[at - 1].end) // NS_PER_MS
    assert f"for\t{slots} slot" in picture.tip
    assert "What would remove it: " in picture.tip
    last = reordered.rows[0][-1]
    picture.point_at_pass(3, str(last.op))
    assert f"starts\t{last.start // NS_PER_MS} slots" in picture.tip
    assert "takes\t1 slot\n" in picture.tip
    browser.click("#critical")
    browser.click("#memory")
    assert "stage activations" in memory_tip(picture)
    results = browser.run("document.querySelector('canvas.over').getAttribute('aria-label')")
    assert f"Reordered, simulated, warm-up and cool-down filled within the peak: makespan {reordered.makespan // NS_PER_MS}" in results
    assert "Repeated, laid out, a copy every 6 slots" in results
    assert browser.errors == []


@pytest.mark.long
def test_idle_time_that_the_block_asks_for_says_so(browser: Browser, tmp_path: Path) -> None:
    """Of a block whose W could run as soon as its B is done, but has a slot later."""
    block = known_block("v-half", 4)
    steps = four_steps(block, 8)
    picture = Picture(browser, tmp_path, block_html(block, steps), [Viewed(layout.timeline) for layout in steps])
    row = steps.block.timeline.rows[0]
    w = next(n for n in range(1, len(row)) if row[n].op.kind == "W" and row[n].start > row[n - 1].end)
    picture.point_at(0, 0, (row[w - 1].end + row[w].start) / 2)
    assert f"{row[w].op} could run" in picture.tip
    assert "What would remove it: Squeeze" in picture.tip
    assert browser.errors == []


def memory_tip(picture: Picture) -> str:
    x, y = picture.place(0, 0, picture.timelines[0].end / 2)
    picture.browser.point(x, y + picture.row)
    return picture.tip
