"""The Chrome trace: slices, message arrows with both ends, memory counters."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tests.pure.shapes import shape
from zerobubble.costs import Costs
from zerobubble.export.perfetto import perfetto_json
from zerobubble.lowering import lower
from zerobubble.program import Send
from zerobubble.schedules import SCHEDULES, make
from zerobubble.simulation import simulate


def traced(name: str, copies: int = 1) -> tuple[Any, list[dict[str, Any]]]:
    schedule = make(name, *shape(name, 4, 6))
    timeline = simulate(schedule, Costs.uniform(schedule.num_stages, (3.0, 3.0, 2.0), 0.25))
    return schedule, json.loads(perfetto_json(*[timeline] * copies))["traceEvents"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_arrow_for_every_message_from_its_maker_to_its_user(name: str) -> None:
    schedule, events = traced(name)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    sends = sum(isinstance(action, Send) for row in lower(schedule).rows for action in row)
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(event["ph"] == "s" for event in events) == sends
    slices = [event for event in events if event["ph"] == "X"]
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert start["ts"] < end["ts"]
        assert start["tid"] != end["tid"]
        for flow in (start, end):
            assert any(s["tid"] == flow["tid"] and s["ts"] <= flow["ts"] < s["ts"] + s["dur"] for s in slices)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_slice_per_pass_and_a_memory_counter_per_rank(name: str) -> None:
    schedule, events = traced(name)
    slices = [event for event in events if event["ph"] == "X"]
    assert Counter(event["name"] for event in slices) == Counter(str(op) for _, _, op in schedule.ops())
    assert {event["args"]["kind"] for event in slices} == {op.kind for _, _, op in schedule.ops()}
    assert {event["name"] for event in events if event["ph"] == "C"} == {f"memory of rank {rank}" for rank in range(4)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_two_slices_of_a_thread_cross_and_overlapped_passes_have_one_of_their_own(name: str) -> None:
    schedule, events = traced(name)
    threads: dict[int, list[tuple[float, float]]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        threads.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(slices))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names.keys() == threads.keys()
    ranks = [f"rank {rank}" for rank in range(4)]
    overlapped = [f"rank {rank}, overlapped" for rank in range(4) if any(len(step) > 1 for step in schedule.steps[rank])]
    assert sorted(names.values()) == sorted(ranks + overlapped)
    assert [names[thread] for thread in sorted(names)] == sorted(names.values()), "the second thread of a rank stands below its first"


def test_times_are_in_microseconds() -> None:
    _, events = traced("1f1b")
    first = next(event for event in events if event["ph"] == "X")
    assert (first["ts"], first["dur"]) == (0.0, 3000.0)
    assert first["args"]["why"] == "started at once"


def test_each_timeline_is_a_process_with_arrows_of_its_own() -> None:
    _, events = traced("zb-v", copies=2)
    assert {event["pid"] for event in events} == {1, 2}
    owners: dict[int, set[int]] = {}
    for event in events:
        if event["ph"] in "sf":
            owners.setdefault(event["id"], set()).add(event["pid"])
    assert owners
    assert all(len(pids) == 1 for pids in owners.values())
