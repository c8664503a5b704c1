"""Pictures of timelines: SVG and the palette."""

import re
from itertools import combinations, pairwise
from math import dist
from xml.etree import ElementTree

import pytest

from tests.pure.shapes import shape
from tests.refusals import Stated, raises, states
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.export.heading import BETWEEN
from zerobubble.export.palette import LATER_STAGES, LEAST_CONTRAST, NUMBERS, SOME_NUMBERS, contrast, ink, shade
from zerobubble.export.svg import LEFT, ROW, STYLE, timeline_svg, without_tooltips
from zerobubble.kinds import KINDS, Kind
from zerobubble.rules import complete_sets
from zerobubble.schedules import SCHEDULES, make
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.units import show_bytes, show_ms, ticks

NS = {"s": "http://www.w3.org/2000/svg"}
PASSES = f".//{{{NS['s']}}}g[@stroke-width]/{{{NS['s']}}}path"
"""The passes of a picture."""


def played(name: str, ranks: int = 4, microbatches: int = 6, times: tuple[float, float, float] = (3, 3, 2)) -> Timeline:
    schedule = make(name, *shape(name, ranks, microbatches))
    return simulate(schedule, Costs.uniform(schedule.num_stages, times, 0.2, held=0.5))


Box = tuple[float, float, float, float]
"""Left, right, top and bottom."""


def boxes(picture: str) -> dict[tuple[float, str], Box]:
    """The boxes of passes by the middle of their row and their tooltip: lines of the width of their group."""
    found = {}
    for group in ElementTree.fromstring(picture).iterfind(".//s:g[@stroke-width]", NS):
        assert (group.get("class") or "").startswith("pass ")
        middle, height = float((group.get("transform") or "").split()[1].strip(")")), float(group.get("stroke-width", ""))
        for path in group.iterfind("s:path", NS):
            left, width = map(float, re.fullmatch(r"M([\d.]+) 0h([\d.]+)", path.get("d", "")).groups())  # type: ignore[union-attr]
            found[middle, path.findtext("s:title", "", NS)] = (left, left + width, middle - height / 2, middle + height / 2)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_box_per_pass_inside_the_axis_and_none_on_another(name: str) -> None:
    timelines = played(name), played("1f1b")
    picture = timeline_svg(*timelines, width=1000, memory=True)
    drawn = boxes(picture)
    assert len(drawn) == sum(1 for timeline in timelines for _ in timeline.spans())
    corners = list(drawn.values())
    assert all(LEFT <= left < right <= 1000 for left, right, _, _ in corners)
    assert len({top for _, _, top, bottom in corners if bottom == top + ROW}) == sum(timeline.num_ranks for timeline in timelines)
    for (left, right, top, bottom), (other_left, other_right, other_top, other_bottom) in combinations(corners, 2):
        apart = right <= other_left + 0.02 or other_right <= left + 0.02
        assert apart or bottom < other_top or other_bottom < top


def legend(picture: str) -> dict[str, tuple[list[str], float, float]]:
    """The classes of the swatches of each entry of a legend, and its left and right edge."""
    found: dict[str, tuple[list[str], float, float]] = {}
    marks: list[str] = []
    left: float | None = None
    for element in ElementTree.fromstring(picture):
        if element.get("textLength"):
            start = float(element.get("x", ""))
            found[element.text or ""] = (marks, start if left is None else left, start + float(element.get("textLength", "")))
            marks, left = [], None
        elif element.get("transform", "").startswith("translate(") and not element.get("stroke-width"):
            marks = [*marks, element[0].get("class", "")]
            left = float(element.get("transform", "")[10:].split()[0]) if left is None else left
    return found


@pytest.mark.parametrize("names", [("1f1b",), ("1f1b", "zb-v"), ("hanayo",), ("dualpipe-v", "zb-h1")])
def test_the_legend_has_the_shades_drawn_and_says_what_they_mean(names: tuple[str, ...]) -> None:
    picture = timeline_svg(*map(played, names))
    groups = ElementTree.fromstring(picture).iterfind(".//s:g[@stroke-width]", NS)
    drawn = {(group.get("class") or "").removeprefix("pass ") for group in groups}
    marks = [mark for marks, _, _ in legend(picture).values() for mark in marks if mark]
    assert sorted(marks) == sorted(drawn)
    assert (LATER_STAGES in legend(picture)) == any(not name.endswith("0") for name in drawn)
    assert legend(timeline_svg(*map(played, names), memory=True)).keys() - legend(picture).keys() == {"activations"}


def test_the_entries_of_a_legend_are_equally_far_apart() -> None:
    entries = list(legend(timeline_svg(played("1f1b"), played("zb-v"), memory=True)).values())
    gaps = [left - right for (_, _, right), (_, left, _) in pairwise(entries)]
    assert gaps == pytest.approx([BETWEEN] * (len(entries) - 1), abs=0.11)


def boxed_numbers(picture: str) -> list[str]:
    """The numbers in boxes."""
    return [text.text or "" for text in ElementTree.fromstring(picture).iterfind(".//s:g[@stroke-width]/s:text", NS)]


def test_a_legend_says_what_the_numbers_are_where_passes_have_them() -> None:
    for microbatches in (8, 400):
        picture = timeline_svg(played("1f1b", 4, microbatches))
        entries = legend(picture)
        assert (NUMBERS in entries) == (microbatches == 8)
        assert bool(boxed_numbers(picture)) == (microbatches == 8)
    short = timeline_svg(simulate(make("zb-h1", 4, 8), Costs.uniform(4, times=(20, 20, 1))))
    assert SOME_NUMBERS in legend(short)
    assert 0 < len(boxed_numbers(short)) < len(boxes(short))


def test_two_overlapped_passes_share_the_height_of_one() -> None:
    schedule = make("dualpipe-v", 2, 4)
    timeline = simulate(schedule, Costs.uniform(schedule.num_stages))
    named = {title.partition(";")[0]: box for (_, title), box in boxes(timeline_svg(timeline)).items()}
    ops = [span.op for _, span in timeline.spans()]
    drawn = {op: named.pop(f"{op.kind}{op.microbatch} of stage {op.stage}") for op in ops}
    assert not named
    assert schedule.overlaps
    for first, second in schedule.overlaps:
        (left, right, top, middle), (*sides, below, bottom) = drawn.pop(first), drawn.pop(second)
        assert [left, right] == sides
        assert 0 < below - middle <= 2
        assert bottom - top == ROW
    assert {bottom - top for _, _, top, bottom in drawn.values()} == {ROW}


def test_timelines_share_one_axis() -> None:
    short, long = played("zb-h1"), played("1f1b")
    alone = [left for left, *_ in boxes(timeline_svg(long)).values()]
    together = [left for left, *_ in boxes(timeline_svg(short, long)).values()]
    assert together[-len(alone) :] == alone


def test_a_box_shows_pass_times_and_reason() -> None:
    picture = ElementTree.fromstring(timeline_svg(played("zb-h1", 2, 2)))
    seen = [title.text for title in picture.iterfind(".//s:path/s:title", NS)]
    states(seen[0], "F0", "stage 0", "0", "3 ms")
    assert "F0 of stage 1; 3.2 to 6.2 ms; after the message of 0F0" in seen
    assert without_tooltips(timeline_svg(played("zb-h1", 2, 2))).count("<title>") == 1, "that of the picture"


def test_a_large_picture_takes_less_than_a_hundred_bytes_a_pass() -> None:
    timeline = simulate(make("interleaved-zb", 8, 24, 4), Costs.uniform(32, (10, 10, 8), 0.5, stages_per_rank=4))
    drawn = timeline_svg(timeline)
    assert len(boxes(drawn)) == 8 * 24 * 4 * 3
    assert len(drawn) / len(boxes(drawn)) < 100


def test_names_are_escaped_and_nothing_is_fetched() -> None:
    timeline = played("1f1b", 2, 2)
    picture = timeline_svg(Timeline("<b>&", timeline.rows, timeline.memory), title="a < b & c")
    assert ElementTree.fromstring(picture).findtext("s:title", namespaces=NS) == "a < b & c"
    assert "http" not in picture.replace(NS["s"], "")


def test_a_picture_without_a_title_names_schedule_ranks_microbatches_and_times() -> None:
    drawn = timeline_svg(played("1f1b", 2, 4), played("zb-v", 2, 4))
    assert ">1f1b, zb-v on 2 ranks, 4 microbatches</text>" in drawn
    label = ElementTree.fromstring(drawn).findtext("s:title", "", NS)
    states(label, "1f1b, zb-v on 2 ranks, 4 microbatches", "1f1b, simulated: makespan", "zb-v, simulated: makespan")


def test_an_empty_timeline_is_still_a_picture() -> None:
    assert boxes(timeline_svg(Timeline("idle", ((), ())))) == {}


@pytest.mark.parametrize(("timelines", "options", "stated"), [((), {}, ("picture", "none")), (("1f1b",), {"width": 100}, ("width", 640))])
def test_unusable_requests_are_refused(timelines: tuple[str, ...], options: dict[str, int], stated: Stated) -> None:
    with raises(InputError, *stated):
        timeline_svg(*map(played, timelines), **options)  # type: ignore[arg-type]


def test_texts_and_idle_time_are_seen_on_both_papers() -> None:
    light, dark = STYLE.split("@media")
    for rules in (light, dark):
        colors = dict(re.findall(r"\.(\w+){(?:fill|stroke):(#\w+)", rules))
        paper = "#ffffff" if colors["paper"] == "#fff" else colors["paper"]
        assert all(contrast(colors[name], paper) >= LEAST_CONTRAST for name in ("ink", "soft"))
    assert contrast(colors["hatch"], paper) > 2


def test_memory_cannot_be_drawn_where_there_is_none() -> None:
    with raises(InputError, "timeline", "simulate", "memory"):
        timeline_svg(Timeline("measured", played("1f1b").rows), memory=True)


def lab(color: str, matrix: tuple[tuple[float, float, float], ...]) -> tuple[float, float, float]:
    """CIELAB of `color` as someone with the deficiency of `matrix` sees it (Machado, Oliveira and Fernandes 2009)."""
    linear = [(int(color[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5)]
    red, green, blue = (min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in matrix)
    xyz = (
        0.434 * red + 0.376 * green + 0.190 * blue,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        0.018 * red + 0.109 * green + 0.873 * blue,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


DEFICIENCIES = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def test_only_kinds_of_which_a_stage_has_one_share_a_color() -> None:
    alike = {frozenset({one, other}) for one, other in combinations(KINDS, 2) if KINDS[one].color == KINDS[other].color}
    assert alike == {frozenset({Kind.S, Kind.SL}), frozenset({Kind.T, Kind.TX})}
    assert not any(pair <= kinds for pair in alike for kinds in complete_sets())


@pytest.mark.parametrize("name", DEFICIENCIES)
def test_color_blind_readers_can_show_the_kinds_apart(name: str) -> None:
    for one, other in combinations(dict.fromkeys(traits.color for traits in KINDS.values()), 2):
        distance = dist(lab(one, DEFICIENCIES[name]), lab(other, DEFICIENCIES[name]))
        assert distance > 20, (one, other, distance)


def test_ink_is_readable_on_every_shade() -> None:
    for kind in KINDS:
        for stages in range(1, 17):
            for place in range(stages):
                paper = shade(kind, place, stages)
                assert contrast(paper, ink(paper)) >= 4.5, paper


def test_numbers_read_well() -> None:
    assert [show_ms(ns) for ns in (0, 18_522_345, 1_234_567_891)] == ["0 ms", "18.52 ms", "1,235 ms"]
    assert [show_bytes(count) for count in (0, 999, 999_600, 1_250_000_000)] == ["0 B", "999 B", "1 MB", "1.25 GB"]
    assert ticks(27_000_000, 7) == tuple(range(0, 27_000_000, 5_000_000))
    assert ticks(0, 7) == (0,)


def test_the_kinds_differ_in_gray() -> None:
    """By a third in luminance at least, as contrast is counted."""
    for one, other in combinations(dict.fromkeys(traits.color for traits in KINDS.values()), 2):
        assert contrast(one, other) > 1.3, (one, other)


def test_a_caption_has_the_span_only_if_it_is_shorter_and_may_be_given() -> None:
    drawn = [simulate(make(name, 4, 8), Costs.uniform(4)) for name in ("1f1b", "zb-h2")]
    assert ["; span " in timeline_svg(each) for each in drawn] == [each.span < each.makespan for each in drawn] == [False, True]
    assert ">own words<" in timeline_svg(played("zb-v"), captions=["own words"])
    with raises(InputError, "captions", "2", "1"):
        timeline_svg(played("zb-v"), captions=["a", "b"])
