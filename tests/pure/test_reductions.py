"""Sums over replicas: a lane parallel to the passes of each rank, compared with a slow reference, drawn, explained and reported.

Gradient sums change no pass and no memory, and their idle time adds up to the nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerobubble as zb
from tests.pure.orders import every_schedule, played
from tests.pure.problems import pass_time, problems, slow_ends
from tests.refusals import states
from zerobubble import Costs, Kind, Op, Placement, Schedule, Timeline, diff, make, simulate
from zerobubble.bounds import lower_bounds
from zerobubble.explain import Metric, attribute, critical_path
from zerobubble.export import perfetto_json, timeline_svg
from zerobubble.graph import play
from zerobubble.planning import Status
from zerobubble.reductions import measured_sums, planned_sums, play_sums, stage_sums
from zerobubble.simulation import metrics, pass_times, peak_memory
from zerobubble.timeline import ReplicaSum
from zerobubble.verify import checked

METRICS: tuple[Metric, ...] = ("makespan", "span")


@st.composite
def summed_problems(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """A random problem whose stages are summed over replicas."""
    schedule, costs = draw(problems())
    sums = draw(st.lists(st.integers(0, 9), min_size=costs.num_stages, max_size=costs.num_stages))
    buckets = draw(st.lists(st.integers(0, 4), min_size=costs.num_stages, max_size=costs.num_stages))
    return schedule, replace(costs, reduce=tuple(sums), buckets=tuple(buckets))


def slow_tail(schedule: Schedule, rank: int, stage: int) -> list[Op]:
    """The W's of a stage behind which its rank runs nothing but W's until the last pass of the stage is over."""
    row = schedule.rows[rank]
    last = max(place for place, op in enumerate(row) if op.stage == stage and op.kind is not Kind.F)
    overlapped = {op for pair in schedule.overlaps for op in pair}
    is_w = [op.kind is Kind.W and op not in overlapped for op in row]
    return [op for place, op in enumerate(row[: last + 1]) if op.stage == stage and all(is_w[place : last + 1])]


def slow_buckets(schedule: Schedule, costs: Costs, ends: dict[Op, int], rank: int, stage: int) -> list[tuple[int, int]]:
    """When the buckets of a stage are complete, and what they take: by running its tail ns by ns."""
    tail, count = slow_tail(schedule, rank, stage), costs.buckets[stage]
    moments = [ends[op] - pass_time(op, costs) + ns + 1 for op in tail for ns in range(pass_time(op, costs))]
    if count < 2 or not moments:
        last = max(ends[op] for op in schedule.rows[rank] if op.stage == stage)
        return [(last, costs.reduce[stage])]
    shares = [number * costs.reduce[stage] // count for number in range(count + 1)]
    done = [next(at for at in range(1, len(moments) + 1) if at * count >= number * len(moments)) for number in range(1, count + 1)]
    return [(moments[at - 1], after - before) for at, (before, after) in zip(done, pairwise(shares), strict=True)]


def slow_lane(schedule: Schedule, costs: Costs, ends: dict[Op, int], rank: int) -> list[ReplicaSum]:
    """The sums of a rank, by asking again and again which stage of those left ended first in its row."""
    row = [op for op in schedule.rows[rank] if op.kind is not Kind.F]
    holders = {stage: {r for route in schedule.placement.routes for r in [route[stage]]} for stage in range(schedule.num_stages)}
    trains = {stage: {r for r in holders[stage] if any(op.stage == stage for op in schedule.rows[r])} for stage in holders}
    last = {stage: max(row.index(op) for op in row if op.stage == stage) for stage in {op.stage for op in row}}
    alone = sorted((place, stage) for stage, place in last.items() if len(trains[stage]) == 1)
    shared = sorted(stage for stage in last if len(trains[stage]) > 1)
    ready = [(stage, *bucket) for _, stage in alone for bucket in slow_buckets(schedule, costs, ends, rank, stage)]
    ready += [(stage, max(max(ends[op] for op in schedule.rows[r]) for r in trains[stage]), costs.reduce[stage]) for stage in shared]
    free, lane = 0, []
    for stage, there, takes in ready:
        if costs.reduce[stage]:
            begin = max(free, there)
            free = begin + takes
            lane.append(ReplicaSum(stage, begin, free))
    return lane


@given(summed_problems())
def test_sums_follow_the_last_passes_of_their_stages_one_after_another(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    timeline, ends = simulate(schedule, costs), slow_ends(schedule, costs)
    assert ends is not None
    if schedule.is_forward_only:
        assert timeline.reductions == ()
        return
    assert [list(timeline.reductions_of(rank)) for rank in range(schedule.num_ranks)] == [
        slow_lane(schedule, costs, ends, rank) for rank in range(schedule.num_ranks)
    ]
    assert timeline.rows == simulate(schedule, replace(costs, reduce=())).rows
    assert timeline.memory == simulate(schedule, replace(costs, reduce=())).memory
    assert timeline.end == max([*ends.values(), *(one.end for row in timeline.reductions for one in row)])
    assert metrics(schedule, costs) == (timeline.span, timeline.makespan)
    assert peak_memory(schedule, costs) == peak_memory(schedule, replace(costs, reduce=()))


def test_a_stage_of_two_ranks_is_summed_after_the_rows_of_both() -> None:
    """Rows of eight passes. Ranks 0 and 3 hold stages 0 and 3, the others 1 and 2."""
    outer, inner = (7, 31), (15, 23)
    sums = [[(one.stage, one.after) for one in row] for row in stage_sums(checked(make("chimera", 4, 4))[0])]
    assert sums == [[(0, outer), (3, outer)], [(1, inner), (2, inner)], [(1, inner), (2, inner)], [(0, outer), (3, outer)]]


@given(summed_problems())
def test_the_figures_of_a_rank_add_up(problem: tuple[Schedule, Costs]) -> None:
    timeline = simulate(*problem)
    for figures in timeline.ranks:
        assert figures.lead + figures.span + figures.tail == timeline.makespan
        assert min(figures.lead, figures.gaps, figures.reduction, figures.tail) >= 0


@given(summed_problems(), st.sampled_from(METRICS))
def test_the_causes_of_idle_time_add_up_with_sums(problem: tuple[Schedule, Costs], metric: Metric) -> None:
    timeline, idle = simulate(*problem), attribute(*problem, metric)
    whole = timeline.makespan if metric == "makespan" else timeline.span
    assert [causes.total for causes in idle.ranks] == [whole - figures.work for figures in timeline.ranks]
    assert all(causes.reduction >= 0 for causes in idle.ranks)


def later(row: Sequence[ReplicaSum]) -> tuple[ReplicaSum, ...]:
    """The sums of a rank, each later and longer than the one before."""
    return tuple(ReplicaSum(stage, begin + 2 * at, end + 3 * at) for at, (stage, begin, end) in enumerate(row))


@given(summed_problems(), st.data())
def test_a_run_with_sums_equals_its_plan_to_the_nanosecond(problem: tuple[Schedule, Costs], data: st.DataObject) -> None:
    schedule, costs = problem
    other = replace(costs, reduce=tuple(data.draw(st.integers(0, 9)) for _ in costs.reduce))
    run = simulate(schedule, replace(other, forward=tuple(time + 1 for time in costs.forward)))
    run = replace(run, source="measured", reductions=tuple(map(later, run.reductions)))
    found = diff(schedule, costs, run)
    assert found.measured == run.makespan
    assert all(account.total == run.makespan for account in found.accounts)


@given(summed_problems())
def test_the_critical_path_leads_to_the_sum_that_ends_last(problem: tuple[Schedule, Costs]) -> None:
    timeline = simulate(*problem)
    path = critical_path(timeline)
    assert path[0].start == 0
    last = max((row[-1] for row in timeline.reductions if row), key=lambda one: one.end, default=None)
    if last is None or path[-1].end == timeline.end:
        assert path[-1].end == timeline.end
    else:
        lanes: Sequence[Sequence[ReplicaSum]] = [row for row in timeline.reductions if row and row[-1].end == timeline.end]
        assert any(path[-1].start <= one.start <= path[-1].end for row in lanes for one in row)
    assert all(after.why is not None and after.why.op == before.op for before, after in pairwise(path))


def test_zb_v_hides_the_sums_of_its_first_stages() -> None:
    """By hand: rank 0 ends stage 7 at 20 ms and stage 0 at 24; sums of 3 ms each follow on, of which 3 ms are exposed."""
    timeline = simulate(make("zb-v", 4, 8), Costs.uniform(8, stages_per_rank=2, reduce=6.0))
    (late, early), figures = timeline.reductions[0], timeline.ranks[0]
    assert (late.stage, late.start / 1e6, late.duration / 1e6) == (7, 20.0, 3.0)
    assert (early.stage, early.start / 1e6, early.duration / 1e6) == (0, 24.0, 3.0)
    assert figures.reduction == 3_000_000
    assert attribute(make("zb-v", 4, 8), Costs.uniform(8, stages_per_rank=2, reduce=6.0)).ranks[0].reduction == 5_500_000


@given(summed_problems())
def test_buckets_never_make_a_step_longer(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    assert simulate(schedule, costs).makespan <= simulate(schedule, replace(costs, buckets=())).makespan


def test_zb_h2_hides_its_sums_behind_its_last_w() -> None:
    """By hand: sums as long as W in four buckets, of which the last is complete when W is over."""
    schedule, costs = make("zb-h2", 4, 8), Costs.uniform(4, (20.0, 20.0, 20.0), reduce=20.0, buckets=4)
    alone = simulate(schedule, replace(costs, reduce=())).makespan
    assert simulate(schedule, costs).makespan == alone + 5_000_000
    assert simulate(schedule, replace(costs, buckets=())).makespan == alone + 20_000_000


def test_no_bucket_leaves_during_an_overlapped_weight_pass() -> None:
    """By hand: the W of stages 0 and 1 take 4 ms each, from 40 ms on. Their sums take 2 ms, in two buckets if the W run one by one."""
    text = "zerobubble schedule 1\nplacement linear: 0 0\nmicrobatches 1\nrank 0: 0F0 1F0 1B0 0B0 {}\n"
    costs = Costs.uniform(2, (20.0, 20.0, 8.0), stages_per_rank=2, reduce=4.0, buckets=2)
    apart, together = (simulate(Schedule.from_text(text.format(end)), costs).reductions_of(0) for end in ("0W0 1W0", "0W0&1W0"))
    assert [(stage, start / 1e6, end / 1e6) for stage, start, end in apart] == [(0, 42, 43), (0, 44, 45), (1, 46, 47), (1, 48, 49)]
    assert [(stage, start / 1e6, end / 1e6) for stage, start, end in together] == [(0, 48, 50), (1, 50, 52)]


def test_sums_survive_json_and_are_drawn() -> None:
    costs = Costs.uniform(8, stages_per_rank=2, reduce=6.0)
    in_buckets = replace(costs, buckets=(3,) * 8)
    assert [Costs.from_dict(json.loads(json.dumps(each.to_dict()))) for each in (costs, in_buckets)] == [costs, in_buckets]
    states(repr(costs), "Costs", 8, "F", "0.5 ms", "B", "W", "0 ms", "3 ms")
    timeline = simulate(make("zb-v", 4, 8), costs)
    assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline
    svg = timeline_svg(timeline, memory=True)
    assert svg.count('class="sum"') == 8 + 1  # and one in the legend
    assert "gradients of stage 7 summed over replicas; 20 ms to 23 ms" in svg
    slices = [event for event in json.loads(perfetto_json(timeline))["traceEvents"] if event.get("cat") == "reduction"]
    assert [event["name"] for event in slices[:2]] == ["sum of stage 7", "sum of stage 0"]
    assert [(event["ts"], event["dur"]) for event in slices[:2]] == [(20_000, 3_000), (24_000, 3_000)]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_one_stage_a_rank_hides_nothing_on_the_rank_that_ends_last(name: str) -> None:
    costs = Costs.uniform(4, reduce=2.0)
    assert simulate(make(name, 4, 8), costs).makespan == simulate(make(name, 4, 8), replace(costs, reduce=())).makespan + 2_000_000


@given(summed_problems(), st.integers(-(10**6), 10**6))
def test_measured_sums_are_played_as_they_were_measured(problem: tuple[Schedule, Costs], origin: int) -> None:
    schedule, costs = problem
    graph, order = checked(schedule)
    _, end, _ = play(graph, order, *pass_times(graph, costs))
    played = play_sums(planned_sums(graph, costs), end)
    measured = [[ReplicaSum(one.stage, one.start + origin, one.end + origin) for one in row] for row in played]
    assert play_sums(measured_sums(graph, measured, end, origin), end) == played


def without_routes(problem: tuple[Schedule, Costs]) -> bool:
    return len(problem[0].placement.routes) == 1 and not problem[0].is_forward_only


@given(summed_problems().filter(without_routes))
def test_no_random_schedule_beats_a_bound_with_sums(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    bounds = lower_bounds(schedule.placement, schedule.num_microbatches, costs, None)
    timeline = simulate(schedule, costs)
    assert bounds.span.time <= min(timeline.span, zb.simulation.period(schedule, costs))
    assert bounds.makespan.time <= timeline.makespan


@pytest.mark.parametrize("buckets", [(0, 0), (3, 3), (0, 2)])
@pytest.mark.parametrize("reduce", [(1, 1), (4, 2), (0, 9), (30, 40)])
def test_no_order_at_all_beats_a_bound_with_sums(reduce: tuple[int, int], buckets: tuple[int, int]) -> None:
    """Of all orders of six passes on each rank, with one or two stages. For long sums the bound is the optimum of the linear placement."""
    for placement, microbatches in ((Placement.linear(2), 2), (Placement.vee(2), 1), (Placement.custom([0, 0]), 1)):
        more = placement.num_stages // 2
        columns = [values * more for values in ((3, 2), (4, 3), (2, 5), (1, 1), (1, 1))]
        comm = (1,) * (placement.num_stages - 1)
        costs = Costs(*columns[:3], comm, *columns[3:], reduce=reduce * more, buckets=buckets * more)
        bounds = lower_bounds(placement, microbatches, costs, None)
        timelines = [timeline for schedule in every_schedule(placement, microbatches) for timeline in played(schedule, costs)]
        assert bounds.span.time <= min(timeline.span for timeline in timelines)
        assert bounds.makespan.time <= min(timeline.makespan for timeline in timelines)
        if min(reduce) >= 30 and placement.name == "linear" and buckets == (0, 0):
            assert bounds.makespan.time == min(timeline.makespan for timeline in timelines)


@pytest.mark.parametrize(("placement", "least"), [("linear", 220), ("vee", 170)])
def test_the_bound_of_a_plan_counts_its_last_sums(placement: str, least: int) -> None:
    """By hand: a rank has 120 ms of passes, and then sums its one stage in 100 ms or the later of its two in 50."""
    found = zb.plan(zb.Workload.uniform(2, (10, 12, 8), comm=0.5, reduce=100), 4, placements=placement, evaluations=500)
    assert found.bound.time == least * 1e6
    assert (found.status is Status.OPTIMAL) == (placement == "linear")


def test_windows_bound_the_passes_before_the_sums() -> None:
    work = zb.Workload.uniform(3, (10, 12, 8), comm=0.5)
    bare, summed = (zb.plan(each, 6, placements="linear", evaluations=500) for each in (work, replace(work, reduce=(7_000_000,) * 3)))
    assert bare.bound.time > bare.problem.bound().time
    assert summed.bound.time == bare.bound.time + 7_000_000
