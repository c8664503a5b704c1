"""A run held against its plan: what the plan did not know, cause by cause, adding up to the ns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median_low

from zerobubble.arguments import takes
from zerobubble.costs import Costs
from zerobubble.explain.account import Account, Difference, Drift, ExtraTime, Passes
from zerobubble.explain.idle import attribute
from zerobubble.explain.replay import TimedOrder, measured, planned, waits_for_copies
from zerobubble.ir import Kind, Schedule
from zerobubble.timeline import Timeline


@takes(schedule=Schedule, costs=Costs, run=Timeline)
def diff(schedule: Schedule, costs: Costs, run: Timeline) -> Difference:
    """Every ns of a measured `run` of `schedule` against its simulation under `costs`, by cause; the causes add up exactly.

    The order of the schedule is played seven times, each time with one more part of the plan's times exchanged for the run's. What
    makespan and work of a rank change by is put to that part:

    - passes: the medians of each kind of pass and stage, one after another by stage (the drifts); costs that were wrong all along.
    - noise: the time each single pass took.
    - comm: when each message was there, as `explain.replay.measured` gives it.
    - host: the time between the moment a rank was free and had its messages, and the start of its pass: Python, sending, the system.
    - copies: of that time, what lies before the end of the last copy to the host or back that ended in it.
    - reduction: when sums over replicas began and how long they took.

    The plan's own idle time is attributed as `attribute` does. Raises as `simulate` does, and `InputError` when the run's passes are
    not those of the schedule, rank by rank in their order.

    Arguments:
        schedule: the order that was run.
        costs: the times that it was planned with, as `Pipeline.profile` or a plan gives them.
        run: what was measured, as `Pipeline.timeline` gives it.

    >>> import zerobubble as zb
    >>> schedule = zb.make("1f1b", 2, 4)
    >>> planned = zb.Costs.uniform(2, times=(10, 10, 8))
    >>> run = zb.simulate(schedule, zb.Costs.uniform(2, times=(12, 10, 8), comm=0.5))
    >>> found = zb.diff(schedule, planned, run)
    >>> found
    <Difference 1f1b: measured 152 ms, 12 ms more than planned, 2 ranks>
    >>> print(found.drifts[0])
    BW of stage 0 takes 1.00x what the plan says
    """
    plan = planned(schedule, costs)
    exact = measured(plan, run)
    drifts, median = _drifts(plan, exact, costs)
    noisy = replace(median, takes=exact.takes)
    late = replace(noisy, delays=exact.delays)
    hosted = replace(late, lags=[lag - copy for lag, copy in zip(exact.lags, waits_for_copies(exact, run), strict=True)])
    copied = replace(hosted, lags=exact.lags)
    orders = [plan, median, noisy, late, hosted, copied, exact]
    makespans = [timed.makespan for timed in orders]
    works = [timed.work() for timed in orders]
    after_passes, after_noise, after_comm, after_host, after_copies, after_sums = (after - before for before, after in pairwise(makespans))
    accounts = []
    for rank, (causes, work, usual, single, *_) in enumerate(zip(attribute(schedule, costs).ranks, *works, strict=True)):
        passes = ExtraTime(usual - work, after_passes - (usual - work))
        noise = ExtraTime(single - usual, after_noise - (single - usual))
        accounts.append(Account(rank, work, causes, passes, noise, after_comm, after_host, after_copies, after_sums))
    return Difference(schedule.name, makespans[0], makespans[-1], tuple(accounts), drifts)


def _drifts(plan: TimedOrder, exact: TimedOrder, costs: Costs) -> tuple[tuple[Drift, ...], TimedOrder]:
    """How the median of each kind of step moves the makespan, one after another; the order with all of them.

    Where microbatches have shares, times are counted as those of a microbatch of share 1.
    """
    found: dict[Passes, list[int]] = defaultdict(list)
    for step in plan.graph.steps():
        found[tuple((plan.graph.ops[i].kind, plan.graph.ops[i].stage) for i in step)].append(step[0])
    drifts, before, timed = [], plan.makespan, plan
    for passes, numbers in sorted(found.items(), key=_by_stage):
        shares = [_share(plan, costs, number) for number in numbers]
        longer = [exact.takes[number] - plan.takes[number] for number in numbers]
        middle = median_low(round(time / share) for time, share in zip(longer, shares, strict=True))
        takes = list(timed.takes)
        for number, share in zip(numbers, shares, strict=True):
            takes[number] += round(middle * share)
        timed = replace(timed, takes=takes)
        after = timed.makespan
        ranks = tuple(sorted({plan.graph.rank[number] for number in numbers}))
        usual = round(plan.takes[numbers[0]] / shares[0])
        drifts.append(Drift(passes, ranks, len(numbers), usual, usual + middle, after - before))
        before = after
    return tuple(drifts), timed


def _share(plan: TimedOrder, costs: Costs, number: int) -> float:
    """The share of the microbatch of the step that begins with a pass, 1 where they are alike; the mean of two that are overlapped."""
    if not costs.shares:
        return 1
    step = (number, number + 1) if number in plan.graph.pairs else (number,)
    return fmean(costs.shares[plan.graph.ops[each].microbatch] for each in step)


def _by_stage(found: tuple[Passes, list[int]]) -> list[tuple[int, Kind]]:
    return [(stage, kind) for kind, stage in found[0]]
