"""Compares a measured run with its plan: the difference by cause, adding up exactly in ns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median_low

from zerobubble.arguments import takes
from zerobubble.costs import Costs
from zerobubble.explain.account import Account, Difference, Drift, ExtraTime, Passes
from zerobubble.explain.cause import Replays, main_cause, message_times
from zerobubble.explain.idle import attribute
from zerobubble.explain.replay import TimedOrder, measured, planned, waits_for_copies
from zerobubble.ir import Schedule
from zerobubble.timeline import Timeline


@takes(schedule=Schedule, costs=Costs, run=Timeline)
def diff(schedule: Schedule, costs: Costs, run: Timeline) -> Difference:
    """Splits the difference between a measured `run` of `schedule` and its simulation under `costs` by cause; causes add up exactly.

    The schedule is simulated seven times, each time with one more part of the plan's times replaced by the run's. The changes of the
    makespan, and of each rank's work, are attributed to that part:

    - passes: the medians of each kind of pass and stage, one after another by stage (the drifts): wrong costs.
    - noise: the times of single passes.
    - comm: the arrival of each message, as `explain.replay.measured` gives it.
    - host: the time from when a rank is free and has its messages to the start of its pass: Python, sending, the system.
    - copies: the part of the host time in which a copy to the host or back was still running.
    - reduction: the starts and durations of sums over replicas.

    The plan's own idle time is attributed as `attribute` does. Raises as `simulate` does, and `InputError` unless each rank of the
    run has the passes of the schedule, in their order.

    Arguments:
        schedule: the order that was run.
        costs: the planned times, as `Pipeline.profile` or a plan gives them.
        run: the measured times, as `Pipeline.timeline` gives it.

    >>> import zerobubble as zb
    >>> schedule = zb.make("1f1b", 2, 4)
    >>> planned = zb.Costs.uniform(2, times=(10, 10, 8))
    >>> run = zb.simulate(schedule, zb.Costs.uniform(2, times=(12, 10, 8), comm=0.5))
    >>> found = zb.diff(schedule, planned, run)
    >>> found
    <Difference 1f1b: measured 152 ms, 12 ms more than planned, 2 ranks>
    >>> print(found.drifts[0])
    BW of stage 0 18 ms as planned
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
    replays = Replays(plan, median, exact)
    cause = main_cause(replays, accounts, drifts, makespans[-1] - makespans[0])
    return Difference(schedule.name, makespans[0], makespans[-1], tuple(accounts), drifts, cause, message_times(replays))


def _drifts(plan: TimedOrder, exact: TimedOrder, costs: Costs) -> tuple[tuple[Drift, ...], TimedOrder]:
    """Returns how the median of each kind of step changes the makespan, kind after kind, and the order with all medians.

    If microbatches have shares, times are for a microbatch of share 1.
    """
    steps_by_passes: dict[Passes, list[int]] = defaultdict(list)
    for step in plan.graph.steps():
        steps_by_passes[tuple((plan.graph.ops[i].kind, plan.graph.ops[i].stage) for i in step)].append(step[0])
    drifts, before, timed = [], plan.makespan, plan
    for passes, numbers in sorted(steps_by_passes.items(), key=lambda item: [(stage, kind) for kind, stage in item[0]]):
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
    """Returns the share of a pass's microbatch, or the mean of two shares if two passes overlap. It is 1 if all microbatches are equal."""
    if not costs.shares:
        return 1
    step = (number, number + 1) if number in plan.graph.pairs else (number,)
    return fmean(costs.shares[plan.graph.ops[op].microbatch] for op in step)
