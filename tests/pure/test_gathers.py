"""Gathers of sharded weights: as few as any order of gathers allows, and never more at a time than memory allows.

Brute force finds no order with fewer gathers. Every pass has its weights, within the memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

import zerobubble as zb
from tests.refusals import raises
from zerobubble.gathers import Gather, RankGathers, gathers_of, plan_gathers

NAMES = ("interleaved-1f1b", "zb-v", "v-half", "breadth-first")


def row(text: str) -> list[tuple[zb.Op, ...]]:
    return [tuple(map(zb.Op.parse, step.split("&"))) for step in text.split()]


def random_row(draw: random.Random, stages: int, length: int) -> list[tuple[zb.Op, ...]]:
    """Passes of these stages in any order, some of which need no weights; the microbatches do not matter here."""
    kinds = [draw.choice((zb.Kind.F, zb.Kind.B, zb.Kind.BW, zb.Kind.W)) for _ in range(length)]
    return [(zb.Op(kind, draw.randrange(stages), number),) for number, kind in enumerate(kinds)]


def subsets(stages: Sequence[int]) -> Iterator[frozenset[int]]:
    for count in range(len(stages) + 1):
        yield from map(frozenset, combinations(stages, count))


def fewest(steps: Sequence[tuple[zb.Op, ...]], sizes: dict[int, int], room: Sequence[int]) -> int:
    """The fewest gathers, by trying every set of weights at every step."""
    best = {frozenset[int](): 0}
    for step, available in zip(steps, room, strict=True):
        needed = {op.stage for op in step if op.kind != zb.Kind.W}
        fitting = [held for held in subsets(list(sizes)) if needed <= held and sum(sizes[stage] for stage in held) <= available]
        best = {held: min(count + len(held - before) for before, count in best.items()) for held in fitting}
    return min(best.values())


def check(plan: RankGathers, steps: Sequence[tuple[zb.Op, ...]], sizes: dict[int, int], room: Sequence[int]) -> None:
    """Every pass has its weights, no step more than there is room for, and no stage is there twice."""
    for step, (passes, available) in enumerate(zip(steps, room, strict=True)):
        there = [gather.stage for gather in plan.gathers if gather.begins <= step <= gather.ends]
        usable = {gather.stage for gather in plan.gathers if gather.needed <= step <= gather.ends}
        assert len(set(there)) == len(there)
        assert usable.issuperset(op.stage for op in passes if op.kind != zb.Kind.W)
        assert sum(sizes[stage] for stage in there) <= available


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_gathers_has_fewer(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(2, 5)
    equal = draw.randint(1, 9)
    sizes = {stage: equal if seed % 2 else draw.randint(1, 9) for stage in range(stages)}
    steps = random_row(draw, stages, 24)
    most = max(sizes.values())
    room = [draw.randint(most, max(most, sum(sizes.values()))) for _ in steps]
    plan = gathers_of(steps, sizes, room, "rank 0")
    check(plan, steps, sizes, room)
    assert len(plan.gathers) == fewest(steps, sizes, room) == plan.bound


def test_of_many_stages_the_bound_may_stay_below() -> None:
    draw = random.Random(1)
    sizes = {stage: draw.randint(1, 50) for stage in range(16)}
    steps = random_row(draw, 16, 160)
    room = [120] * len(steps)
    plan = gathers_of(steps, sizes, room, "rank 0")
    check(plan, steps, sizes, room)
    assert 16 <= plan.bound <= len(plan.gathers)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [None, 10, 13])
def test_schedules_play_with_what_is_gathered(name: str, limit: int | None) -> None:
    schedule = zb.make(name, 3, 6)
    weights = [4 + stage % 3 for stage in range(schedule.num_stages)]
    for rank, plan in enumerate(plan_gathers(schedule, weights, limit)):
        room = [sum(weights) if limit is None else limit] * len(schedule.steps[rank])
        check(plan, schedule.steps[rank], dict(enumerate(weights)), room)
        assert plan.is_proven
        assert plan.peak_bytes <= room[0]
        if limit is None:
            assert len(plan.gathers) == len(schedule.placement.stages(rank))


def test_gathers_begin_as_early_as_memory_allows() -> None:
    steps = row("0F0 0F1 1F0 1F1 1BW0 0BW0")
    (two,) = [gathers_of(steps, {0: 4, 1: 4}, [8] * 6, "rank 0")]
    assert two.gathers == (Gather(0, 0, 0, 5), Gather(1, 0, 2, 4))
    one = gathers_of(steps, {0: 4, 1: 4}, [7] * 6, "rank 0")
    assert one.gathers == (Gather(0, 0, 0, 1), Gather(1, 2, 2, 4), Gather(0, 5, 5, 5))


def test_weight_gradients_need_no_weights() -> None:
    plan = gathers_of(row("0F0 0B0 1F0 1B0 0W0 1W0"), {0: 4, 1: 4}, [4] * 6, "rank 0")
    assert len(plan.gathers) == 2


def test_overlapped_passes_need_the_weights_of_both() -> None:
    plan = gathers_of(row("0F0 1F0&0BW0 1BW0"), {0: 4, 1: 4}, [8] * 3, "rank 0")
    assert len(plan.gathers) == 2
    with raises(zb.InputError, "rank 0", 7, "1F0&0BW0", 8):
        gathers_of(row("0F0 1F0&0BW0 1BW0"), {0: 4, 1: 4}, [7] * 3, "rank 0")


def test_wrong_arguments_are_refused() -> None:
    schedule = zb.make("1f1b", 2, 4)
    with raises(zb.InputError, 2, 3, "stages", "weights"):
        plan_gathers(schedule, [1, 1, 1])
    with raises(zb.InputError, 2, 3, "ranks", "memory"):
        plan_gathers(schedule, [1, 1], [4, 4, 4])
    with raises(zb.InputError, "stage 1", "weights"):
        plan_gathers(schedule, [1, -1])


GROUPS = [  # groups of four microbatches, the forwards of all stages of the rank before their backward passes
    [f"{stage}{kind}{microbatch}" for group in range(2) for kind, order in (("F", (rank, rank + 2)), ("BW", (rank + 2, rank)))
     for stage in order for microbatch in range(4 * group, 4 * group + 4)]
    for rank in range(2)
]  # fmt: skip
ALTERNATING = """
0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 0BW0 0BW1 2F2 2F3 0F4 2BW2 0F5 2BW3 0BW2 0BW3 2F4 2F5 0F6 2BW4 0F7 2BW5 0BW4 0BW5 2F6 2F7 2BW6 2BW7 0BW6 0BW7
1F0 1F1 3F0 3BW0 3F1 3BW1 1BW0 1BW1 1F2 1F3 3F2 3BW2 3F3 3BW3 1BW2 1BW3 1F4 1F5 3F4 3BW4 3F5 3BW5 1BW4 1BW5 1F6 1F7 3F6 3BW6 3F7 3BW7 1BW6 1BW7
"""  # noqa: E501 - the order in which the tutor plays backward passes as soon as it can
ONE_BY_ONE = [[f"{stage}{kind}{microbatch}" for microbatch in range(8) for kind, stage in
    (("F", rank), ("F", rank + 2), ("BW", rank + 2), ("BW", rank))] for rank in range(2)]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "gathers"), [(GROUPS, [5, 5]), ([line.split() for line in ALTERNATING.split("\n")[1:3]], [21, 6]), (ONE_BY_ONE, [2, 2])]
)
def test_the_example_of_the_pipeline_tutor(rows: list[list[str]], gathers: list[int]) -> None:
    """Two ranks with two stages each, eight microbatches, 14 units of memory for activations of one unit and weights of six.

    The tutor (github.com/ezyang/pipeline-parallelism-tutor, level 11) counts 10 gathers for groups of four and 27 for the alternating
    order, letting all other weights go when memory runs short. For these orders that is the least; microbatches one by one take 4.
    """
    passes = tuple(tuple(map(zb.Op.parse, row)) for row in rows)
    schedule = zb.Schedule("tutor", zb.Placement.looped(2, 2), 8, passes)
    assert not zb.schedule_faults(schedule)
    unit = 1_000_000  # of `Costs.uniform`
    plans = plan_gathers(schedule, [6 * unit] * 4, 14 * unit, zb.Costs.uniform(4))
    assert all(plan.is_proven for plan in plans)
    assert [len(plan.gathers) for plan in plans] == gathers
