"""Random problems, and an independent, slow implementation of the papers' rules, with which the package is compared."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from zerobubble import Costs, Kind, Op, Placement, Schedule
from zerobubble.graph import resolve

F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW


def needs(op: Op, present: set[Op], stages: int) -> list[Op]:
    """The passes that must be over before `op`, among those `present`."""
    kind, s, j = op
    if kind is F:
        before = [Op(F, s - 1, j)] if s else []
    elif kind is W:
        before = [Op(B, s, j)]
    else:
        before = [Op(F, s, j), Op(B, s + 1, j), Op(BW, s + 1, j)]
    return [need for need in before if need in present and need.stage < stages]


def slow_ends(schedule: Schedule, costs: Costs) -> dict[Op, int] | None:
    """When each pass ends, by trying rank after rank until nothing moves; None if the schedule stops or is incomplete."""
    if not is_complete(schedule):
        return None
    present = {op for _, _, op in schedule.ops()}
    ends: dict[Op, int] = {}
    free_at, heads, moved = [0] * schedule.num_ranks, [0] * schedule.num_ranks, True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.steps):
            while heads[rank] < len(row):
                edges = [(need, op) for op in row[heads[rank]] for need in needs(op, present, schedule.num_stages)]
                if not all(need in ends for need, _ in edges):
                    break
                begin = max([free_at[rank], *(ends[need] + delay(schedule, costs, need, op) for need, op in edges)])
                free_at[rank] = begin + step_time(row[heads[rank]], costs)
                ends |= dict.fromkeys(row[heads[rank]], free_at[rank])
                heads[rank] += 1
                moved = True
    return ends if len(ends) == len(present) else None


def step_time(step: tuple[Op, ...], costs: Costs) -> int:
    """How long a step takes: overlapped, F and a backward hide each other for a while, but not more than the shorter one."""
    times = [pass_time(op, costs) for op in step]
    hidden = min(round(costs.hidden[step[0].stage] * share_of(op, costs)) for op in step)
    kinds = {op.kind for op in step}
    return sum(times) - (min(hidden, *times) if F in kinds and kinds & {B, BW} else 0)


def pass_time(op: Op, costs: Costs) -> int:
    """How long a pass takes, each of its columns times the share of its microbatch."""
    columns = {F: [costs.forward], B: [costs.backward], W: [costs.weight], BW: [costs.backward, costs.weight]}[op.kind]
    return sum(round(column[op.stage] * share_of(op, costs)) for column in columns)


def share_of(op: Op, costs: Costs) -> float:
    """The factor on the times of a microbatch."""
    return costs.shares[op.microbatch] if costs.shares else 1


def delay(schedule: Schedule, costs: Costs, maker: Op, user: Op) -> int:
    """The time of the message between two passes, 0 on the same rank."""
    same = schedule.rank_of(maker.stage, maker.microbatch) == schedule.rank_of(user.stage, user.microbatch)
    return 0 if same else costs.comm[min(maker.stage, user.stage)]


def is_complete(schedule: Schedule) -> bool:
    """Whether every microbatch passes every stage once, on its rank, forward and backward (or forward alone throughout)."""
    kinds: dict[tuple[int, int], list[Kind]] = {}
    for rank, _, op in schedule.ops():
        if not (0 <= op.stage < schedule.num_stages and 0 <= op.microbatch < schedule.num_microbatches):
            return False
        if schedule.rank_of(op.stage, op.microbatch) != rank:
            return False
        kinds.setdefault((op.stage, op.microbatch), []).append(op.kind)
    sets = [sorted(found) for found in kinds.values()]
    whole = len(sets) == schedule.num_stages * schedule.num_microbatches
    return whole and (all(s == [F] for s in sets) or all(s in ([B, F, W], [BW, F]) for s in sets))


@st.composite
def placements(draw: st.DrawFn, max_ranks: int = 4) -> Placement:
    """Stages on ranks in any order, every rank used, on one route or two."""
    ranks = draw(st.integers(1, max_ranks))
    extra = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
    route = draw(st.permutations([*range(ranks), *extra]))
    if draw(st.booleans()):
        return Placement.custom(route)
    return Placement.custom(route, draw(st.permutations(route)))


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 4) -> Schedule:
    """A legal schedule: passes of split or fused stages, picked at random among those whose needs are met."""
    placement = draw(placements(max_ranks))
    stages, microbatches = placement.num_stages, draw(st.integers(1, 4))
    routes = draw(st.lists(st.integers(0, 1), min_size=microbatches, max_size=microbatches)) if len(placement.routes) == 2 else []
    split = draw(st.lists(st.booleans(), min_size=stages, max_size=stages))
    left = {Op(kind, s, j) for s in range(stages) for j in range(microbatches) for kind in ((F, B, W) if split[s] else (F, BW))}
    empty = Schedule("random", placement, microbatches, ((),) * placement.num_ranks, tuple(routes))
    return fill(empty, left, random.Random(draw(st.integers(0, 1 << 32))), draw(st.sampled_from((0.0, 0.5))))


def reordered(schedule: Schedule, seed: int) -> Schedule:
    """The same passes in another legal order: that of a random walk through what needs what."""
    draw, graph = random.Random(seed), resolve(schedule)
    left = [set(needs) for needs in graph.needs]
    users = defaultdict(list)
    for user, needs in enumerate(graph.needs):
        for need in needs:
            users[need].append(user)
    rows: list[list[Op]] = [[] for _ in schedule.rows]
    ready = [number for number, needs in enumerate(left) if not needs]
    while ready:
        number = ready.pop(draw.randrange(len(ready)))
        rows[graph.rank[number]].append(graph.ops[number])
        for user in users[number]:
            left[user].discard(number)
            if not left[user]:
                ready.append(user)
    return replace(schedule, rows=tuple(map(tuple, rows)))


def fill(empty: Schedule, ops: set[Op], dice: random.Random, together: float = 0.0) -> Schedule:
    """The rows that random list scheduling gives, with some steps of two passes where `together` is the chance to try."""
    rows: list[list[tuple[Op, ...]]] = [[] for _ in empty.rows]
    done: set[Op] = set()
    while done < ops:
        ready = sorted(op for op in ops - done if all(need in done for need in needs(op, ops, empty.num_stages)))
        step: tuple[Op, ...] = (dice.choice(ready),)
        rank = empty.rank_of(step[0].stage, step[0].microbatch)
        others = [op for op in ready if op != step[0] and op.kind is not F and empty.rank_of(op.stage, op.microbatch) == rank]
        if others and dice.random() < together:
            step += (dice.choice(others),)
        rows[rank].append(step)
        done.update(step)
    return Schedule.of_steps(*empty.header[:3], rows, empty.microbatch_routes)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """A legal schedule with uneven costs, zeros among them, and often microbatches of unequal cost."""
    schedule = draw(schedules())
    count = schedule.num_microbatches
    shares = draw(st.just(()) | st.lists(st.sampled_from((0.5, 1, 1.7, 3)), min_size=count, max_size=count).map(tuple))
    return schedule, replace(draw(costs(schedule.num_stages)), shares=shares)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> Costs:
    """Small whole times, so that ties are frequent."""

    def column(length: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(0, 5), min_size=length, max_size=length)))

    return Costs(column(stages), column(stages), column(stages), column(stages - 1), column(stages), column(stages), column(stages))


def edited(schedule: Schedule, rank: int, row: list[Op] | tuple[Op, ...]) -> Schedule:
    """The schedule with another row on `rank`."""
    return with_rows(schedule, [*schedule.rows[:rank], row, *schedule.rows[rank + 1 :]])


def with_rows(schedule: Schedule, rows: Sequence[Sequence[Op]]) -> Schedule:
    """The schedule with other rows; passes that no longer stand next to each other are no longer overlapped."""
    side_by_side = {pair for row in rows for pair in pairwise(row)}
    return replace(schedule, rows=tuple(map(tuple, rows)), overlaps=schedule.overlaps & side_by_side)
