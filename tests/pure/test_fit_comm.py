"""The time of messages fitted to a timeline is the one it was made with."""

from __future__ import annotations

from itertools import pairwise

import pytest

import zerobubble as zb
from tests.pure.test_fit import spans
from tests.refusals import raises
from zerobubble.fit import fit_comm, late_messages
from zerobubble.timeline import Span, Timeline


def varied(num_stages: int) -> zb.Costs:
    comm = tuple(300 + 70 * link for link in range(num_stages - 1))
    return zb.Costs((900,) * num_stages, (1100,) * num_stages, (800,) * num_stages, comm, (1,) * num_stages, (1,) * num_stages)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "v-half"])
def test_a_simulated_run_shows_its_messages(name: str) -> None:
    schedule = zb.make(name, 4, 8)
    costs = varied(schedule.num_stages)
    links = zip(pairwise(schedule.placement.routes[0]), costs.comm, strict=True)
    assert fit_comm(zb.simulate(schedule, costs)) == tuple(comm * (here != there) for (here, there), comm in links)


def shifted(timeline: Timeline, *by: int) -> Timeline:
    """Every rank on a clock of its own."""
    rows = tuple(
        tuple(Span(span.op, span.start + late, span.end + late) for span in row) for row, late in zip(timeline.rows, by, strict=True)
    )
    return Timeline(timeline.name, rows, (), "measured")


def test_what_clocks_are_apart_cancels() -> None:
    schedule = zb.make("1f1b", 3, 1)
    costs = varied(3)
    assert fit_comm(shifted(zb.simulate(schedule, costs), 0, 250, -120)) == costs.comm


def test_only_messages_that_were_waited_for_count() -> None:
    """Rank 1 is busy when F1 arrives, and starts it 35 ns late."""
    here, there = spans(("0F0", 10), ("0F1", 10), ("0BW0", 10), ("0BW1", 10)), spans(("1F0", 45), ("1F1", 10), ("1BW0", 10), ("1BW1", 10))
    there = tuple(Span(span.op, span.start + 13, span.end + 13) for span in there)
    here = (*here[:2], Span(here[2].op, 83, 93), Span(here[3].op, 95, 99))
    assert fit_comm(Timeline("t", (here, there), (), "measured")) == (4,)  # F 3 after its message, B 5


def test_a_link_nobody_waited_for_is_refused() -> None:
    """Two routes, and each rank busy on one whenever something comes on the other."""
    here = spans(("0F0", 10), ("0F2", 20), ("1F1", 15), ("1BW1", 10), ("0BW0", 10))
    there = spans(("0F1", 12), ("1F0", 8), ("1BW0", 11), ("1F2", 39), ("0BW1", 5))
    with raises(zb.InputError, "stages 0", 1):
        fit_comm(Timeline("t", (here, there), (), "measured"))


def test_late_messages_show_of_links_that_somebody_waited_for() -> None:
    """With passes of 3 ms, 1F1B waits for every message of 2 ms in its steady state, and for none that takes no time."""
    schedule = zb.make("1f1b", 4, 16)
    slow = zb.Costs.from_ms([3.0] * 4, [3.0] * 4, [0.0] * 4, [0.0, 2.0, 0.0])
    assert late_messages(zb.simulate(schedule, slow), 0.2) == (None, 2_000_000, None)


def test_messages_nobody_waited_for_came_before_those_somebody_waited_for() -> None:
    """Of ten activations three are late, by 8, 6 and 4 ms: all but one were there within 6 ms, all but two within 4."""
    ms = 1_000_000
    sent = [Span(zb.Op(zb.Kind.F, 0, j), 10 * j * ms, (10 * j + 10) * ms) for j in range(10)]
    late = {2: 8, 5: 4, 8: 6}
    begins = [(10 * j + 10 + late.get(j, 0)) * ms for j in range(10)]
    taken = [Span(zb.Op(zb.Kind.F, 1, j), begin, begin + ms) for j, begin in enumerate(begins)]
    back = [Span(zb.Op(zb.Kind.BW, 1, j), (200 + j) * ms, (201 + j) * ms) for j in range(10)]
    last = [Span(zb.Op(zb.Kind.BW, 0, j), (300 + j) * ms, (301 + j) * ms) for j in range(10)]
    timeline = Timeline("t", ((*sent, *last), (*taken, *back)), (), "measured")
    assert late_messages(timeline, 0.1) == (6 * ms,)
    assert late_messages(timeline, 0.2) == (4 * ms,)
    assert late_messages(timeline, 0.3) == (None,)


def test_a_rank_waited_if_its_gap_is_longer_than_between_passes() -> None:
    """Rank 1 is idle from the arrival at 10 ns on, and starts `gap` ns later: up to 50 us is overhead, not waiting."""
    for gap, found in ((50_000, None), (50_001, 50_001)):
        here = (Span(zb.Op.parse("0F0"), 0, 10), Span(zb.Op.parse("0BW0"), 10**6, 10**6 + 1))
        there = (Span(zb.Op.parse("1F0"), 10 + gap, 20 + gap), Span(zb.Op.parse("1BW0"), 20 + gap, 10**6))
        assert late_messages(Timeline("t", (here, there), (), "measured"), 0.0) == (found,)
