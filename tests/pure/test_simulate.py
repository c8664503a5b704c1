"""Simulated timelines: every span as early as the rules allow, with a truthful reason.

A schedule without faults always runs. The compiled and the Python simulator agree, and both agree with a slow implementation.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

import zerobubble as zb
from tests.pure.problems import delay, needs, problems, slow_ends, step_time
from tests.refusals import raises, states
from zerobubble import Costs, InputError, Op, Placement, Schedule, ScheduleError, Timeline, make, simulate
from zerobubble.simulation import metrics, peak_memory
from zerobubble.timeline import Awaited, Span, Why

Problem = tuple[Schedule, Costs]


@given(problems())
def test_ends_are_those_of_a_slow_player(problem: Problem) -> None:
    schedule, costs = problem
    assert {span.op: span.end for _, span in simulate(schedule, costs).spans()} == slow_ends(schedule, costs)


@given(problems())
def test_spans_keep_the_rows_their_times_and_their_needs(problem: Problem) -> None:
    schedule, costs = problem
    timeline = simulate(schedule, costs)
    spans = {span.op: span for _, span in timeline.spans()}
    assert tuple(tuple(span.op for span in row) for row in timeline.rows) == schedule.rows
    for row in schedule.steps:
        assert all(spans[left[-1]].end <= spans[right[0]].start for left, right in pairwise(row))
        for step in row:
            assert {(spans[op].start, spans[op].duration) for op in step} == {(spans[step[0]].start, step_time(step, costs))}
    for op, span in spans.items():
        for need in needs(op, set(spans), schedule.num_stages):
            assert span.start >= spans[need].end + delay(schedule, costs, need, op)


@given(problems())
def test_every_reason_is_true(problem: Problem) -> None:
    schedule, costs = problem
    timeline = simulate(schedule, costs)
    spans = {span.op: span for _, span in timeline.spans()}
    for row in schedule.steps:
        for before, step in zip((None, *row), row, strict=False):
            check_reason(schedule, costs, spans, spans[before[-1]] if before else None, step)


@given(problems())
def test_lengths_are_those_of_the_timeline(problem: Problem) -> None:
    timeline = simulate(*problem)
    assert metrics(*problem) == (timeline.span, timeline.makespan)


def check_reason(schedule: Schedule, costs: Costs, spans: dict[Op, Span], before: Span | None, step: tuple[Op, ...]) -> None:
    span = spans[step[0]]
    assert all(spans[op].why == span.why for op in step)
    assert span.why is not None
    cause, op = span.why
    if cause is Awaited.NOTHING:
        assert (before, op, span.start) == (None, None, 0)
    elif cause is Awaited.ROW:
        assert before is not None
        assert (op, span.start) == (before.op, before.end)
    else:
        assert op is not None
        users = [user for user in step if op in needs(user, set(spans), schedule.num_stages)]
        assert schedule.rank_of(op.stage, op.microbatch) != schedule.rank_of(step[0].stage, step[0].microbatch)
        assert span.start in [spans[op].end + delay(schedule, costs, op, user) for user in users]


@given(problems())
def test_the_account_of_every_rank_adds_up(problem: Problem) -> None:
    timeline = simulate(*problem)
    for rank in timeline.ranks:
        assert rank.lead + rank.work + rank.gaps + rank.tail == timeline.makespan
        assert min(rank.lead, rank.gaps, rank.tail) >= 0
    assert 0 <= timeline.bubble_span <= timeline.bubble_makespan < 1 or timeline.makespan == 0


@given(problems())
def test_memory_returns_to_nothing_and_peaks_where_the_order_says(problem: Problem) -> None:
    schedule, costs = problem
    timeline = simulate(schedule, costs)
    assert tuple(rank.peak_bytes for rank in timeline.ranks) == peak_memory(schedule, costs)
    for steps in timeline.memory:
        assert [held for _, held in steps[-1:]] in ([], [0])
        assert all(left[0] <= right[0] for left, right in pairwise(steps))


def test_reasons_as_sentences() -> None:
    timeline = simulate(make("1f1b", 2, 2), Costs.uniform(2))
    assert [str(span.why) for span in timeline.rows[0]] == [
        "started at once",
        "followed 0F0 without a gap",
        "waited for the message of 1BW0",
        "waited for the message of 1BW1",
    ]


def test_memory_over_time() -> None:
    timeline = simulate(make("zb-h1", 1, 1), Costs.uniform(1, held=0.5))
    assert timeline.memory == (((0, 0), (0, 1_000_000), (2_000_000, 500_000), (3_000_000, 0)),)


def test_inference_holds_no_memory() -> None:
    schedule = make("zb-h1", 2, 3).forward_only()
    timeline = simulate(schedule, Costs.uniform(2))
    assert timeline.makespan == 4_000_000
    assert timeline.peak_bytes == 0


def test_costs_for_another_model_are_refused() -> None:
    with raises(InputError, "zb-v", 4, 2):
        simulate(make("zb-v", 2, 4), Costs.uniform(2))


def test_an_illegal_schedule_is_refused_with_its_faults() -> None:
    with raises(ScheduleError, "empty", 1) as caught:
        simulate(Schedule("empty", Placement.linear(1), 1, ((),)), Costs.uniform(1))
    assert [fault.code for fault in caught.value.faults] == ["count"]


def test_a_measured_timeline_needs_no_reasons_and_no_memory() -> None:
    spans = tuple(Span(Op.parse(text), start, end) for text, start, end in (("0F0", 5, 7), ("0BW0", 10, 14)))
    timeline = Timeline("run", (spans, ()), source="measured")
    assert (timeline.makespan, timeline.span, timeline.work) == (9, 9, 6)
    assert [(rank.lead, rank.gaps, rank.tail, rank.peak_bytes) for rank in timeline.ranks] == [(0, 3, 0, None), (9, 0, 0, None)]
    assert timeline.peak_bytes is None
    assert timeline.bubble_span == pytest.approx(1 - 6 / 18)
    assert Timeline.from_dict(timeline.to_dict()) == timeline


def test_memory_is_for_all_ranks_or_none() -> None:
    with raises(InputError, 2, 1, "timeline", "ranks"):
        Timeline("run", ((), ()), ((),))


def test_an_empty_timeline_has_no_bubble() -> None:
    timeline = Timeline("nothing", ((), ()))
    assert (timeline.makespan, timeline.span, timeline.bubble_span, timeline.bubble_makespan) == (0, 0, 0.0, 0.0)


def test_the_reason_of_a_span_names_its_pass() -> None:
    states(str(Why(Awaited.MESSAGE, Op.parse("1F0"))), "1F0", "message")


def test_a_rank_over_its_limit_reports_how_much_is_missing() -> None:
    schedule = zb.make("1f1b", 3, 6)
    costs = zb.Costs.uniform(3)
    assert zb.simulation.memory_faults(schedule, costs, zb.Limits((3_000_000, 2_000_000, 1_000_000))) == ()
    (fault,) = zb.simulation.memory_faults(schedule, costs, zb.Limits((2_500_000, 2_000_000, 1_000_000)))
    assert (fault.code, fault.rank) == ("memory", 0)
    states(fault.message, "rank 0", 3000000, 500000, 2500000)
    with raises(zb.InputError, 3, 1, "ranks", "limits"):
        zb.simulation.memory_faults(schedule, costs, zb.Limits((1,)))
