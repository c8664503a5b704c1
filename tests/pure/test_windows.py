"""Idle windows of schedules: all of the idle time before last passes, and never more memory than is free."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.refusals import raises, states
from zerobubble.cli import main
from zerobubble.export.svg import timeline_svg

PICTURE = Path(__file__).parents[2] / "docs/windows.svg"

NAMES = ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "chimera", "interleaved-1f1b"]


@pytest.mark.parametrize("name", NAMES)
def test_windows_are_all_idle_time_before_the_last_pass(name: str) -> None:
    schedule = zb.make(name, 4, 8)
    costs = zb.Costs.uniform(schedule.num_stages, times=(10, 11, 7), comm=0.5)
    timeline = zb.simulate(schedule, costs)
    for rank, own in enumerate(zb.explain.windows(schedule, costs)):
        figures = timeline.ranks[rank]
        assert sum(window.duration for window in own) == figures.lead + figures.gaps
        starts = [min(span.start for span in timeline.rows[rank] if span.op in step) for step in schedule.steps[rank]]
        assert all(window.end == starts[window.step] - timeline.start for window in own)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_free_in_a_window_is_what_the_rank_does_not_hold(name: str) -> None:
    schedule = zb.make(name, 4, 8)
    costs = zb.Costs.uniform(schedule.num_stages, times=(10, 11, 7), comm=0.5)
    peaks = zb.simulation.peak_memory(schedule, costs)
    timeline = zb.simulate(schedule, costs)
    room = zb.Limits(tuple(peak + 1000 for peak in peaks))
    for rank, (own, roomier) in enumerate(zip(zb.explain.windows(schedule, costs), zb.explain.windows(schedule, costs, room), strict=True)):
        for window, wider in zip(own, roomier, strict=True):
            held = [now for time, now in timeline.memory[rank] if time <= window.start + timeline.start]
            within = [now for time, now in timeline.memory[rank] if window.start < time - timeline.start < window.end]
            assert window.free == peaks[rank] - (held[-1] if held else 0)
            assert wider == window._replace(free=window.free + 1000)
            assert not within, "nothing is taken or given back in it"


def test_a_schedule_beyond_the_limits_has_no_windows() -> None:
    with raises(zb.InputError, "rank 0", 2000000, 1500000, 500000):
        zb.explain.windows(zb.make("1f1b", 2, 2), zb.Costs.uniform(2), zb.Limits((500_000, 2_000_000)))


def test_the_picture_of_the_page_is_what_its_command_draws(tmp_path: Path) -> None:
    drawn = tmp_path / "windows.svg"
    asked = ["show", "1f1b", "--ranks", "4", "--microbatches", "8", "--windows"]
    result = CliRunner().invoke(main, [*asked, "--svg", str(drawn)])
    assert result.exit_code == 0, result.output
    states(result.stdout, "rank 0", 4, "9 ms", "6 ms", "step 4", 0)
    assert drawn.read_text(encoding="utf-8") == PICTURE.read_text(encoding="utf-8"), "docs/windows.svg is stale: draw it again"
    found = json.loads(CliRunner().invoke(main, [*asked, "--json"]).stdout)["windows"]
    assert found[3] == {"rank": 3, "windows": [{"step": 0, "start": 0.0, "end": 3.0, "free_bytes": 1_000_000}]}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--html", "page.html"), "pages do not show windows: write --svg, or leave out --windows"),
        (("--memory", "2", "--offload", "1"), "windows are not available with offload: leave out --offload or --windows"),
    ],
)
def test_what_windows_do_not_go_with(options: tuple[str, ...], why: str) -> None:
    result = CliRunner().invoke(main, ["show", "1f1b", "--ranks", "4", "--microbatches", "8", "--windows", *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr


def test_windows_are_drawn_into_one_timeline_of_their_ranks() -> None:
    schedule, costs = zb.make("1f1b", 2, 2), zb.Costs.uniform(2)
    timeline, found = zb.simulate(schedule, costs), zb.explain.windows(schedule, costs)
    assert timeline_svg(timeline, windows=found).count("window of ") == sum(map(len, found))
    for timelines, windows in (((timeline, timeline), found), ((timeline,), found[:1])):
        with raises(zb.InputError, "windows", "single", "timeline"):
            timeline_svg(*timelines, windows=windows)
