"""Idle time by cause, the critical path, and a run compared with its plan.

The causes of idle time add up to the nanosecond.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.problems import needs, problems, schedules
from tests.pure.shapes import TRAINING
from tests.refusals import raises
from zerobubble import Costs, InputError, Kind, Schedule, Timeline, make, simulate
from zerobubble.costs import NS_PER_MS
from zerobubble.explain import Metric, attribute, critical_path
from zerobubble.timeline import Awaited

METRICS: tuple[Metric, ...] = ("makespan", "span")


def in_ms(causes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(part / NS_PER_MS for part in causes)


@given(problems(), st.sampled_from(METRICS))
def test_the_causes_add_up_to_the_idle_time_of_every_rank(problem: tuple[Schedule, Costs], metric: Metric) -> None:
    timeline, idle = simulate(*problem), attribute(*problem, metric)
    whole = timeline.makespan if metric == "makespan" else timeline.span
    assert [causes.total for causes in idle.ranks] == [whole - figures.work for figures in timeline.ranks]
    assert idle.overall.total == timeline.num_ranks * whole - timeline.work
    assert all(causes.memory >= 0 for causes in idle.ranks)


@st.composite
def even_problems(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """Equal stages, as many on every rank, and messages that take no time: nothing but the order keeps a rank idle."""
    schedule = draw(schedules().filter(lambda s: all(len(set(Counter(route).values())) == 1 for route in s.placement.routes)))
    forward, backward, weight = draw(st.tuples(*[st.integers(0, 3)] * 3))
    columns = [(time,) * schedule.num_stages for time in (forward, backward, weight)]
    nothing = (0,) * schedule.num_stages
    return schedule, Costs(*columns, nothing[1:], nothing, nothing)


def held_back(schedule: Schedule, timeline: Timeline, rank: int, metric: Metric) -> int:
    """The number of time units in which a rank is idle although a later forward of its row has all inputs, counted unit by unit."""
    present = {op for _, _, op in schedule.ops()}
    ends = {span.op: span.end for _, span in timeline.spans()}
    row = timeline.rows[rank]
    count = 0
    for now in range(row[0].start if metric == "span" else 0, row[-1].start):
        if not any(span.start <= now < span.end for span in row):
            later = [span.op for span in row if span.start > now and span.op.kind is Kind.F]
            count += any(all(ends[need] <= now for need in needs(op, present, schedule.num_stages)) for op in later)
    return count


@given(even_problems(), st.sampled_from(METRICS))
def test_idle_time_of_equal_stages_is_memory_or_dependency(problem: tuple[Schedule, Costs], metric: Metric) -> None:
    schedule, costs = problem
    timeline, idle = simulate(schedule, costs), attribute(schedule, costs, metric)
    assert [(causes.comm, causes.imbalance) for causes in idle.ranks] == [(0, 0)] * schedule.num_ranks
    assert [causes.memory for causes in idle.ranks] == [held_back(schedule, timeline, r, metric) for r in range(schedule.num_ranks)]


@pytest.mark.parametrize("name", TRAINING)
def test_a_published_schedule_at_equal_costs_waits_for_nothing_else(name: str) -> None:
    schedule = make(name, 4, 8)
    overall = attribute(schedule, Costs.uniform(schedule.num_stages)).overall
    assert (overall.comm, overall.imbalance) == (0, 0)


@pytest.mark.parametrize(
    ("name", "dependency", "memory"),
    [("gpipe", 36, 0), ("1f1b", 24, 12), ("eager-1f1b", 30, 6), ("zb-h1", 6, 6), ("zb-h2", 12, 0)],
)
def test_what_unit_times_give(name: str, dependency: int, memory: int) -> None:
    """By hand for rank 0 of 1F1B: from 4 on it holds 4 microbatches and waits 6 for its first backward, then 3 in the cool-down."""
    assert in_ms(attribute(make(name, 4, 8), Costs.uniform(4)).overall) == (dependency, 0, 0, memory, 0)


def test_rank_0_of_1f1b_by_hand() -> None:
    assert in_ms(attribute(make("1f1b", 4, 8), Costs.uniform(4)).ranks[0]) == (3, 0, 0, 6, 0)


def test_zb_h2_has_no_idle_time_in_its_spans() -> None:
    assert attribute(make("zb-h2", 4, 8), Costs.uniform(4), "span").overall == (0, 0, 0, 0, 0)


def test_messages_are_what_goes_away_with_them() -> None:
    idle = attribute(make("gpipe", 4, 8), Costs.uniform(4, comm=0.5))
    assert in_ms(idle.overall) == (36, 4 * 6 * 0.5, 0, 0, 0)


def test_imbalance_is_how_much_less_a_rank_works_than_the_busiest() -> None:
    """One microbatch on two ranks takes 3 + 9: rank 0 waits 9, 6 of them because it has less to do, and rank 1 waits 3."""
    idle = attribute(make("gpipe", 2, 1), Costs.from_ms((1, 3), (1, 3), (1, 3)))
    assert [in_ms(causes) for causes in idle.ranks] == [(3, 0, 6, 0, 0), (3, 0, 0, 0, 0)]
    slow = attribute(make("gpipe", 2, 10), Costs.from_ms((1, 3), (1, 3), (1, 3)))
    assert in_ms(slow.overall) == (2 * 3, 0, 60, 0, 0)


@given(problems(), st.sampled_from(METRICS))
def test_imbalance_is_never_less_than_the_difference_of_work(problem: tuple[Schedule, Costs], metric: Metric) -> None:
    schedule, costs = problem
    works = [figures.work for figures in simulate(schedule, costs).ranks]
    idle = attribute(schedule, costs, metric)
    assert [causes.imbalance for causes in idle.ranks] == [max(works) - work for work in works]
    assert all(causes.dependency >= 0 and causes.memory >= 0 for causes in idle.ranks)


def test_work_counts_by_rank_and_not_by_stage() -> None:
    """Rank 0 has one stage and rank 1 two, which take as long together."""
    schedule = Schedule.from_text(
        "zerobubble schedule 1\nplacement custom: 0 1 1\nmicrobatches 1\nrank 0: 0F0 0BW0\nrank 1: 1F0 2F0 2BW0 1BW0\n"
    )
    idle = attribute(schedule, Costs.from_ms((2, 1, 1), (2, 1, 1), (0, 0, 0)))
    assert [in_ms(causes) for causes in idle.ranks] == [(4, 0, 0, 0, 0)] * 2


def test_another_metric_is_refused() -> None:
    with raises(InputError, "makespan", "span", "time"):
        attribute(make("gpipe", 2, 2), Costs.uniform(2), "time")  # type: ignore[arg-type]


@given(problems())
def test_the_critical_path_is_an_unbroken_chain(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    timeline = simulate(schedule, costs)
    path = critical_path(timeline)
    assert (path[0].start, path[-1].end) == (0, timeline.makespan)
    for before, after in pairwise(path):
        assert after.why is not None
        assert after.why.op == before.op
        if after.why.cause is Awaited.ROW:
            assert after.start == before.end
        else:
            # Passes that run as one step wait for the inputs of both.
            waiting = [op for pair in schedule.overlaps if after.op in pair for op in pair] or [after.op]
            apart = schedule.rank_of(*before.op[1:]) != schedule.rank_of(*after.op[1:])
            users = [op for op in waiting if abs(op.stage - before.op.stage) <= 1]
            messages = [costs.comm[min(before.op.stage, op.stage)] if apart else 0 for op in users]
            assert after.start - before.end in messages


def test_the_critical_path_of_gpipe() -> None:
    """Down with the first forward, through the last rank, and back with the last backward... or any path as long."""
    path = critical_path(simulate(make("gpipe", 2, 2), Costs.uniform(2)))
    assert [str(span.op) for span in path] == ["0F0", "1F0", "1F1", "1BW0", "0BW0", "0BW1"]


def test_a_measured_timeline_has_no_critical_path() -> None:
    simulated = simulate(make("gpipe", 2, 2), Costs.uniform(2))
    measured = replace(simulated, rows=tuple(tuple(span._replace(why=None) for span in row) for row in simulated.rows))
    with raises(InputError, "0BW1", "simulate", "waited"):
        critical_path(measured)
    assert critical_path(Timeline("nothing", ((), ()))) == ()


def test_reasons_that_go_in_a_circle_end() -> None:
    span = simulate(make("gpipe", 1, 1), Costs.uniform(1)).rows[0][1]
    assert span.why is not None
    circle = span._replace(why=span.why._replace(op=span.op))
    assert critical_path(Timeline("odd", ((circle,),))) == (circle,)
