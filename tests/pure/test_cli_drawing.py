"""Overlapped passes in the terminal: one box where both names fit, side by side otherwise, and always both colors."""

from __future__ import annotations

import re
from itertools import groupby, pairwise

import pytest

from zerobubble.cli.outputs.drawing import MOST_ROWS, draw, draw_in_bands
from zerobubble.costs import Costs
from zerobubble.export.palette import shade
from zerobubble.ir import Kind
from zerobubble.schedules import make
from zerobubble.simulation import simulate

SCHEDULE = make("dualpipe-v", 2, 4)
TIMELINE = simulate(SCHEDULE, Costs.uniform(SCHEDULE.num_stages))


def test_one_box_with_both_names_where_there_is_room() -> None:
    lines = draw(TIMELINE, 150, colored=False).plain.splitlines()[:2]
    assert re.findall(r"\w+&\w+", lines[0]) == ["F3&bw1", "f2&BW0", "f3&BW1"]
    assert re.findall(r"\w+&\w+", lines[1]) == ["f2&BW0", "F3&bw1", "f3&BW1"]


def test_side_by_side_where_there_is_none() -> None:
    row = draw(TIMELINE, 40, colored=False).plain.splitlines()[0]
    assert "&" not in row
    assert "F3bw" in row


@pytest.mark.parametrize("colored", [True, False])
@pytest.mark.parametrize("width", [40, 60, 80, 150])
def test_every_row_ends_where_the_axis_does(width: int, colored: bool) -> None:
    rows = draw(TIMELINE, width, colored).plain.splitlines()[:2]
    assert [len(row) for row in rows] == [width, width]


def test_each_of_the_two_has_its_color() -> None:
    row = draw(TIMELINE, 150, colored=True).split("\n")[0]
    fills = re.findall(r"on (#\w+)", " ".join(str(span.style) for span in row.spans))
    neighbors = set(pairwise(fill for fill, _ in groupby(fills)))
    for stage in (0, 1):
        assert (shade(Kind.F, stage, 2), shade(Kind.BW, 1 - stage, 2)) in neighbors


@pytest.mark.parametrize("colored", [True, False])
@pytest.mark.parametrize("width", [80, 120])
def test_a_picture_too_dense_for_a_line_continues_below(width: int, colored: bool) -> None:
    schedule = make("zb-v", 4, 16)
    bands = draw_in_bands(simulate(schedule, Costs.uniform(schedule.num_stages)), width, colored).plain.split("\n\n")
    assert 1 < len(bands) <= MOST_ROWS // 4
    assert {len(row) for band in bands for row in band.splitlines()[:4]} == {width}
    if not colored:
        joined = "".join(band.splitlines()[0][7:] for band in bands)
        assert set(re.findall(r"[FBWfbw]\d+", joined)) == {f"{kind}{each}" for kind in "FBWfbw" for each in range(16)}


def test_no_more_bands_than_needed_or_useful() -> None:
    for microbatches, width in ((4, 120), (400, 80)):
        timeline = simulate(make("1f1b", 4, microbatches), Costs.uniform(4))
        assert draw_in_bands(timeline, width, colored=True) == draw(timeline, width, colored=True)
