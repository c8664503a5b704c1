"""The main cause of the difference between a run and its plan, with the passes, the rank and the wait, in one sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerobubble.explain.account import LEAST, Account, Cause, Drift
from zerobubble.explain.replay import TimedOrder
from zerobubble.units import show_ms


class Replays(NamedTuple):
    """The order with the plan's times, with the medians of the run, and with all of its times."""

    plan: TimedOrder
    median: TimedOrder
    exact: TimedOrder


NAMED = 3
"""The most passes that a sentence names."""


def main_cause(replays: Replays, accounts: Sequence[Account], drifts: Sequence[Drift], extra: int) -> Cause | None:
    """Returns the cause that changes the makespan most in the direction of `extra` (ns); None if the run is as long as planned."""
    if not accounts or LEAST * abs(extra) < replays.plan.makespan:
        return None
    sign = 1 if extra > 0 else -1
    first = accounts[0]  # changes of the makespan are the same for every rank
    times = {
        "passes": first.passes.total,
        "noise": first.noise.total,
        "messages": first.comm,
        "host": first.host,
        "copies": first.copies,
        "replicas": first.reduction,
    }
    part = max(times, key=lambda name: sign * times[name])
    if sign * times[part] <= 0:
        return None
    rank, text = _DESCRIBE[part](replays, accounts, drifts, sign)
    return Cause(part, times[part], rank, text)


def _passes(replays: Replays, accounts: Sequence[Account], drifts: Sequence[Drift], sign: int) -> tuple[int, str]:
    most = sorted(drifts, key=lambda one: (sign * one.makespan, sign * one.steps * (one.measured - one.planned)), reverse=True)
    off = [drift for drift in most if drift.is_off and sign * (drift.measured - drift.planned) > 0] or most[:1]
    named = ", ".join(f"{drift.name} on {_ranks(drift)} takes {drift.change}" for drift in off[:NAMED])
    more = f", and {len(off) - NAMED} more are off" if len(off) > NAMED else ""
    ranks = off[0].ranks
    return ranks[0], f"{named}{more}{_waiting([account.passes.idle for account in accounts], ranks)}"


def _ranks(drift: Drift) -> str:
    return " and ".join(f"rank {rank}" for rank in drift.ranks)


def _noise(replays: Replays, accounts: Sequence[Account], drifts: Sequence[Drift], sign: int) -> tuple[int, str]:
    graph, usual, single = replays.plan.graph, replays.median.takes, replays.exact.takes
    far = max((step[0] for step in graph.steps()), key=lambda number: sign * (single[number] - usual[number]))
    rank, op = graph.rank[far], graph.ops[far]
    waiting = _waiting([account.noise.idle for account in accounts], (rank,))
    than = "longer" if sign > 0 else "shorter"
    most = f"most of all {op} on rank {rank} ({show_ms(single[far])} instead of {show_ms(usual[far])})"
    return rank, f"single passes take {than} than their median, {most}{waiting}"


def _waiting(idle: Sequence[int], causing: Sequence[int]) -> str:
    """Returns which other rank waits longest meanwhile, by the additional idle ns of each rank."""
    rank = max(range(len(idle)), key=idle.__getitem__)
    return f", while rank {rank} waits {show_ms(idle[rank])} more" if idle[rank] > 0 and rank not in causing else ""


def _messages(replays: Replays, accounts: Sequence[Account], drifts: Sequence[Drift], sign: int) -> tuple[int, str]:
    links: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for sender, receiver, planned, taken in _sent(replays):
        links[sender, receiver].append((planned, taken))
    (sender, receiver), times = max(links.items(), key=lambda item: sign * sum(taken - planned for planned, taken in item[1]))
    planned, taken = (sum(column) // len(times) for column in zip(*times, strict=True))
    text = f"rank {receiver} waits for messages of rank {sender}, which take {show_ms(taken)} instead of {show_ms(planned)} on average"
    return receiver, text


def message_times(replays: Replays) -> tuple[int, int] | None:
    """Returns the mean ns of a message by the plan and in the run; None without messages."""
    times = [(planned, taken) for _, _, planned, taken in _sent(replays)]
    if not times:
        return None
    planned, taken = (sum(column) // len(times) for column in zip(*times, strict=True))
    return planned, taken


def _sent(replays: Replays) -> Iterator[tuple[int, int, int, int]]:
    """Yields each message as the ranks that send and receive it, and the ns it takes by the plan and in the run."""
    plan, exact = replays.plan, replays.exact
    for step in plan.graph.steps():
        for user, maker in plan.messages(step):
            yield plan.graph.rank[maker], plan.graph.rank[user], plan.delays[maker], exact.delays[maker]


def _host(replays: Replays, accounts: Sequence[Account], drifts: Sequence[Drift], sign: int) -> tuple[int, str]:
    late = [0] * len(accounts)
    for first, *_ in replays.exact.graph.steps():
        late[replays.exact.graph.rank[first]] += replays.exact.lags[first]
    rank = max(range(len(late)), key=lambda one: late[one])
    text = f"rank {rank} starts passes {show_ms(late[rank])} late in all, though it is free and their messages have arrived"
    return rank, f"{text}: Python, sends, or other processes on its cores"


def _copies(replays: Replays, accounts: Sequence[Account], drifts: Sequence[Drift], sign: int) -> tuple[int, str]:
    rank = max(accounts, key=lambda account: sign * account.copies).rank
    return rank, "passes wait for copies to the host and back: offload less, or over a faster link"


def _replicas(replays: Replays, accounts: Sequence[Account], drifts: Sequence[Drift], sign: int) -> tuple[int, str]:
    rank = max(accounts, key=lambda account: sign * account.reduction).rank
    return rank, f"sums of gradients over replicas end {'later' if sign > 0 else 'earlier'} than planned"


_DESCRIBE = {
    "passes": _passes,
    "noise": _noise,
    "messages": _messages,
    "host": _host,
    "copies": _copies,
    "replicas": _replicas,
}
