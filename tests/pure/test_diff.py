"""A run compared with its plan: every ns has a cause, and a single cause is reported as the only one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.pure.problems import problems
from tests.refusals import raises, states
from zerobubble import Costs, InputError, Kind, Limits, Op, Schedule, Timeline, diff, make, offload, simulate
from zerobubble.costs import NS_PER_MS
from zerobubble.explain import WaitsFor, attribute, gaps
from zerobubble.explain.replay import measured, planned
from zerobubble.timeline import Doing, Mark, Span

Problem = tuple[Schedule, Costs]


def as_run(timeline: Timeline, marks: tuple[tuple[Mark, ...], ...] = ()) -> Timeline:
    """The same spans as if they had been measured."""
    rows = tuple(tuple(span._replace(why=None) for span in row) for row in timeline.rows)
    return Timeline(timeline.name, rows, (), "measured", marks)


def play_with(schedule: Schedule, costs: Costs, takes: dict[Op, int], lags: dict[Op, int]) -> Timeline:
    """A run in which single passes take longer or start later."""
    timed = planned(schedule, costs)
    ops, longer, later = timed.graph.ops, list(timed.takes), [0] * len(timed.takes)
    for first, *_ in timed.graph.steps():
        longer[first] += takes.get(ops[first], 0)
        later[first] = lags.get(ops[first], 0)
    begin, end, _ = replace(timed, takes=longer, lags=later).play()
    spans = list(map(Span, ops, begin, end))
    return Timeline("run", tuple(tuple(spans[a:b]) for a, b in pairwise(timed.graph.first)), (), "measured")


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, Costs, Timeline]:
    """A plan and a run of it with other costs, some passes longer, some later, and clocks that start anywhere."""
    schedule, costs = draw(problems())
    columns = {name: tuple(draw(st.integers(0, 9)) for _ in getattr(costs, name)) for name in ("forward", "backward", "weight", "comm")}
    some = st.dictionaries(st.sampled_from([op for row in schedule.rows for op in row]), st.integers(0, 5), max_size=4)
    run = play_with(schedule, replace(costs, **columns), draw(some), draw(some))
    origin = draw(st.integers(-5, 5))
    rows = tuple(tuple(span._replace(start=span.start + origin, end=span.end + origin) for span in row) for row in run.rows)
    return schedule, costs, replace(run, rows=rows)


@given(runs())
def test_the_causes_add_up_to_the_run(drawn: tuple[Schedule, Costs, Timeline]) -> None:
    schedule, costs, run = drawn
    found, plan = diff(schedule, costs, run), simulate(schedule, costs)
    assert (found.planned, found.measured) == (plan.makespan, run.makespan)
    for account, figures, before in zip(found.accounts, run.ranks, plan.ranks, strict=True):
        assert account.work == before.work
        assert account.total == run.makespan
        assert account.extra == found.extra
        assert account.idle == run.makespan - figures.work
        assert account.passes.busy + account.noise.busy == figures.work - before.work
        assert account.passes.total == sum(drift.makespan for drift in found.drifts)


@given(runs())
def test_playing_the_measured_times_gives_the_run_back(drawn: tuple[Schedule, Costs, Timeline]) -> None:
    schedule, costs, run = drawn
    played = measured(planned(schedule, costs), run).play()
    spans = [span for row in run.rows for span in row]
    assert played.begin == [span.start - run.start for span in spans]
    assert played.end == [span.end - run.start for span in spans]


@given(problems())
def test_the_plan_itself_differs_in_nothing(problem: Problem) -> None:
    schedule, costs = problem
    found = diff(schedule, costs, as_run(simulate(schedule, costs)))
    for account, causes in zip(found.accounts, attribute(schedule, costs).ranks, strict=True):
        assert account.plan == causes
        assert (account.passes, account.noise, account.comm, account.host) == ((0, 0), (0, 0), 0, 0)


@given(runs())
def test_gaps_are_the_idle_time(drawn: tuple[Schedule, Costs, Timeline]) -> None:
    schedule, costs, run = drawn
    for row, figures, found in zip(run.rows, run.ranks, gaps(schedule, costs, run), strict=True):
        assert all(gap.end > gap.start for gap in found)
        assert sum(gap.end - gap.start for gap in found) == figures.lead + figures.gaps
        busy = [(span.start, span.end) for span in row]
        assert all(gap.end <= start or gap.start >= end for gap in found for start, end in busy)


SENDING = Costs.from_ms((1, 1), (1, 1), (1, 1), 0.5)
SCHEDULE, COSTS = make("1f1b", 2, 4), Costs.from_ms((1, 1), (1, 1), (1, 1))


def in_ms(account: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(part / NS_PER_MS for part in account)


def test_a_slow_stage_is_its_passes() -> None:
    run = simulate(SCHEDULE, Costs.from_ms((1, 2), (1, 1), (1, 1)))
    found = diff(SCHEDULE, COSTS, run)
    first, second = found.accounts
    assert in_ms(second.passes) == (4, 0)
    assert in_ms(first.passes) == (0, 4)
    assert first.noise == second.noise == (0, 0)
    assert (first.comm, first.host) == (0, 0)
    assert [(drift.passes, drift.makespan / NS_PER_MS) for drift in found.drifts if drift.makespan] == [(((Kind.F, 1),), 4)]
    text = str(found)
    states(text, "rank 1", "4.00 ms", "F", "stage 1", "2.00x")
    states(text, "rank 0", "4.00 ms", "F", "stage 1", "2.00x")


def test_what_was_won_is_separate_from_what_was_lost() -> None:
    run = simulate(SCHEDULE, Costs.from_ms((1, 3), (1, 1), (0.5, 1)))
    text = str(diff(SCHEDULE, COSTS, run))
    states(text, "rank 0", "7.50 ms", "9.50 ms")
    states(text, "2.00 ms", "BW", "stage 0", "0.75x")
    won = diff(SCHEDULE, COSTS, simulate(SCHEDULE, Costs.from_ms((1, 0.5), (1, 1), (1, 1))))
    states(str(won), "rank 1", "1.00 ms", "2.00 ms", "F", "stage 1", "0.50x")


def test_one_slow_pass_is_noise() -> None:
    found = diff(SCHEDULE, COSTS, play_with(SCHEDULE, COSTS, {Op.parse("1F2"): NS_PER_MS}, {}))
    assert in_ms(found.accounts[1].noise) == (1, 0)
    assert in_ms(found.accounts[0].noise) == (0, 1)
    assert found.accounts[1].passes == (0, 0)


def test_slow_messages_are_comm() -> None:
    slow = replace(COSTS, comm=(NS_PER_MS,))
    run = simulate(SCHEDULE, slow)
    found = diff(SCHEDULE, COSTS, run)
    for account in found.accounts:
        assert account.comm == run.makespan - found.planned > 0
        assert account.host == 0


def test_marks_show_the_message_from_the_host() -> None:
    """The last backward of rank 0 starts 2 ms after its message could be there: without marks it was the message, with them the host."""
    late = Op.parse("0BW3")
    run = play_with(SCHEDULE, SENDING, {}, {late: 2 * NS_PER_MS})
    last = run.rows[0][-1]
    assert last.op == late
    before, taken = run.rows[0][-2].end, last.start - 2 * NS_PER_MS
    assert before < taken
    marked = replace(run, marks=((Mark(Doing.WAIT, before, taken, "g1.3"),), ()))
    host = [account.host for account in diff(SCHEDULE, SENDING, marked).accounts]
    assert host == [2 * NS_PER_MS] * 2
    assert [account.host for account in diff(SCHEDULE, SENDING, run).accounts] == [0, 0]
    assert [gap.waits_for for gap in gaps(SCHEDULE, SENDING, marked)[0] if gap.op == late] == [
        WaitsFor.PASS,
        WaitsFor.MESSAGE,
        WaitsFor.HOST,
    ]


@given(runs())
def test_the_main_cause_explains_the_sign_of_the_difference(drawn: tuple[Schedule, Costs, Timeline]) -> None:
    found = diff(*drawn)
    cause = found.cause
    if cause is None:
        assert 200 * abs(found.extra) < found.planned or found.extra == 0
        return
    first = found.accounts[0]
    times = {"passes": first.passes.total, "noise": first.noise.total, "messages": first.comm, "host": first.host}
    assert cause.time == times[cause.part]
    assert cause.time * found.extra > 0
    assert abs(cause.time) == max(abs(time) for time in times.values() if time * found.extra > 0)
    assert 0 <= cause.rank < len(found.accounts)
    assert cause.text in found.outcome


def test_the_main_cause_has_its_passes_its_rank_and_its_wait() -> None:
    late, free = Op.parse("0BW3"), simulate(SCHEDULE, COSTS)
    waits = Costs.from_ms((1, 1), (1, 1), (1, 1), 1.0)
    for run, part, rank, *words in (
        (simulate(SCHEDULE, Costs.from_ms((1, 2), (1, 1), (1, 1))), "passes", 1, "F", "stage 1", "2 ms", "2.00x", "rank 0", "4 ms"),
        (
            simulate(SCHEDULE, Costs.from_ms((1, 2), (1, 2), (1, 4))),
            *("passes", 1, "F", "BW", "stage 1", "2 ms", "2.00x", "6 ms", "3.00x", "rank 0"),
        ),
        (play_with(SCHEDULE, COSTS, {Op.parse("1F2"): 9 * NS_PER_MS}, {}), "noise", 1, "1F2", "10 ms", "1 ms", "rank 0 waits"),
        (simulate(SCHEDULE, waits), "messages", 0, "rank 1", "1 ms", "0 ms"),
        (play_with(SCHEDULE, COSTS, {}, {Op.parse("1BW0"): 5 * NS_PER_MS}), "host", 1, "5 ms"),
    ):
        cause = diff(SCHEDULE, COSTS, run).cause
        assert cause is not None
        assert (cause.part, cause.rank) == (part, rank)
        assert cause.time == run.makespan - free.makespan
        states(cause.text, f"rank {rank}", *words)
    marked = play_with(SCHEDULE, SENDING, {}, {late: 2 * NS_PER_MS})
    assert diff(SCHEDULE, SENDING, marked).cause is not None
    assert diff(SCHEDULE, COSTS, free).cause is None


def test_messages_that_do_not_fit_the_plan_are_named_whatever_the_main_cause() -> None:
    slow = Costs.from_ms((1, 2), (1, 1), (1, 1), 0.1)
    sends, quiet = Costs.from_ms((1, 1), (1, 1), (1, 1), 1.0), Costs.from_ms((1, 2), (1, 1), (1, 1), 0.9)
    found = diff(SCHEDULE, sends, simulate(SCHEDULE, slow))
    assert found.messages == (NS_PER_MS, NS_PER_MS // 10)
    assert "messages take 0.1 ms on average, planned were 1 ms" in found.outcome
    near = diff(SCHEDULE, sends, simulate(SCHEDULE, quiet))
    assert near.messages == (NS_PER_MS, 9 * NS_PER_MS // 10)
    assert "planned were" not in near.outcome


def test_the_host_is_named_if_it_costs_more_than_messages_that_do_not_fit() -> None:
    plan, times = Costs.from_ms((1, 1), (1, 1), (1, 1), 0.1), Costs.from_ms((1, 6), (1, 1), (1, 1), 0.3)
    for lag, is_named in ((3, True), (0, False)):
        found = diff(SCHEDULE, plan, play_with(SCHEDULE, times, {}, {Op.parse("1BW0"): lag * NS_PER_MS}))
        assert found.cause is not None
        assert found.cause.part == "passes"
        states(found.outcome, "0.3 ms", "0.1 ms")
        assert ("3.00 ms" in found.outcome, "Pipeline.profile" in found.outcome) == (is_named, not is_named)
    late = diff(SCHEDULE, plan, play_with(SCHEDULE, replace(plan, comm=times.comm), {}, {Op.parse("1BW0"): 9 * NS_PER_MS}))
    assert late.cause is not None
    assert (late.cause.part, "Pipeline.profile" in late.outcome) == ("host", False)


def test_another_schedule_is_refused() -> None:
    with raises(InputError, "rank 0", "0F2", "place 2", "0BW0"):
        diff(make("gpipe", 2, 4), Costs.uniform(2), simulate(SCHEDULE, COSTS))
    with raises(InputError, "4 ranks", "plan", "run", 2):
        diff(make("1f1b", 4, 4), Costs.uniform(4), simulate(SCHEDULE, COSTS))
    cut = Timeline("cut", (simulate(SCHEDULE, COSTS).rows[0][:-1], simulate(SCHEDULE, COSTS).rows[1]))
    with raises(InputError, "0BW3", "place 7"):
        diff(SCHEDULE, COSTS, cut)


def test_a_difference_is_written_as_json() -> None:
    run = simulate(SCHEDULE, Costs.from_ms((1, 2), (1, 1), (1, 1)))
    data = json.loads(json.dumps(diff(SCHEDULE, COSTS, run).to_dict()))
    assert data["measured"] - data["planned"] == 4 * NS_PER_MS
    assert [rank["passes"] for rank in data["ranks"]] == [{"busy": 0, "idle": 4 * NS_PER_MS}, {"busy": 4 * NS_PER_MS, "idle": 0}]
    for rank in data["ranks"]:
        parts = [*rank["plan"].values(), *rank["passes"].values(), *rank["noise"].values(), rank["comm"], rank["host"]]
        assert rank["work"] + sum(parts) == rank["total"] == data["measured"]


def test_marks_survive_json_and_older_files_have_none() -> None:
    marks = ((Mark(Doing.SEND, 1, 2, "a0.3"), Mark(Doing.OPTIMIZER, 5, 9)), ())
    timeline = as_run(simulate(SCHEDULE, COSTS), marks)
    data = timeline.to_dict()
    assert Timeline.from_dict(json.loads(json.dumps(data))) == timeline
    del data["marks"]
    assert Timeline.from_dict(data).marks == ()
    with raises(InputError, "timeline", "marks"):
        replace(timeline, marks=marks[:1])
    with raises(InputError, "timeline", "JSON", "dance"):
        Timeline.from_dict(data | {"marks": [[["dance", 1, 2, ""]], []]})


def test_waiting_for_copies_is_separate_from_the_host() -> None:
    """1F1B within two microbatches, over a link so slow that passes wait: nothing of it is the host."""
    schedule, costs = make("1f1b", 3, 6), Costs.uniform(3)
    link = offload.HostLink(to_host=2.5e8, from_host=2.5e8)
    plans = offload.plan_offloads(schedule, costs, Limits((2_000_000,) * 3), link)
    run = offload.play_offloads(schedule, costs, plans, link)
    found = diff(schedule, costs, run)
    assert found.extra > 10 * NS_PER_MS
    for account in found.accounts:
        assert (account.copies + account.comm, account.host, account.total) == (found.extra, 0, run.makespan)
        assert account.copies == 7 * NS_PER_MS  # in the rest, the rank also waited for a message, and no event shows when it was received
    states(str(found), "waiting", "copies")
    last = run.rows[0][-1]
    late = replace(run, rows=((*run.rows[0][:-1], last._replace(start=last.start + NS_PER_MS, end=last.end + NS_PER_MS)), *run.rows[1:]))
    assert {account.host for account in diff(schedule, costs, late).accounts} == {NS_PER_MS}
