"""The time of messages fitted to a timeline is the one it was made with."""

from __future__ import annotations

from itertools import pairwise

import pytest

import zerobubble as zb
from tests.pure.test_fit import spans
from zerobubble.fit import fit_comm
from zerobubble.timeline import Span, Timeline


def varied(num_stages: int) -> zb.Costs:
    comm = tuple(300 + 70 * link for link in range(num_stages - 1))
    return zb.Costs((900,) * num_stages, (1100,) * num_stages, (800,) * num_stages, comm, (1,) * num_stages, (1,) * num_stages)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "v-half"])
def test_a_simulated_run_tells_its_messages(name: str) -> None:
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
    with pytest.raises(zb.InputError, match="no rank had to wait for a message between stages 0 and 1"):
        fit_comm(Timeline("t", (here, there), (), "measured"))
