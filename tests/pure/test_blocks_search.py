"""Results of the block search, compared with published and proven figures."""

from __future__ import annotations

from itertools import accumulate, pairwise, product

import pytest

from tests.refusals import Stated, raises
from tests.thinned import every
from zerobubble import Costs, InputError, Kind, Op, Placement, make, schedule_faults, simulate
from zerobubble.blocks import Block, known_block, repeat, search
from zerobubble.blocks.block_search import Paths
from zerobubble.costs import NS_PER_MS

ZIGZAG = Placement.custom((0, 1, 2, 2, 1, 0, 0, 1, 2))
"""Three stages on each of three ranks: down, back and down again."""


def slots(block: Block, kind: Kind) -> list[int]:
    """The slots of one kind of pass, stage by stage."""
    found = {start.op: start.slot for row in block.starts for start in row}
    return [found[Op(kind, stage, 0)] for stage in range(block.placement.num_stages)]


def gaps(walk: list[int]) -> list[int]:
    """The slots between one pass and the next."""
    return [later - earlier for earlier, later in pairwise(walk)]


def least(ranks: int, memory: int) -> int:
    """The least bubble at unit times on the V that the authors' adaptive scheduler reaches; proved for 3 and 4 ranks."""
    return 6 * ranks - 1 - 3 * memory if memory <= 2 * ranks - 2 else 3 * (2 * ranks - memory)


BUDGETS = [(p, k) for p in (4, 5) for k in range(2 * ((p + 4) // 3), 2 * p + 1)] + [(6, 7), (6, 8), (6, 12)]


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "memory"), every(4, BUDGETS))
def test_the_adaptive_law(ranks: int, memory: int) -> None:
    """Every even budget is met; an odd one below 2p - 1 is missed by one slot, since reordering alone does not find its last move."""
    best = search(Placement.vee(ranks), memory, tries=60)[0]
    missed = memory % 2 and memory < 2 * ranks - 1
    assert best.span // NS_PER_MS - 18 * ranks == least(ranks, memory) + missed
    assert schedule_faults(best.layout.schedule) == ()
    assert max(best.layout.peaks) <= memory


def test_it_beats_v_min_where_v_min_is_off_the_law() -> None:
    published = make("v-min", 5, 15)
    best = search(Placement.vee(5), 6)[0]
    assert [simulate(schedule, Costs.uniform(10)).span // NS_PER_MS - 90 for schedule in (published, best.layout.schedule)] == [15, 11]


def test_times_shape_the_block() -> None:
    """Where B takes three halves of F and W half, blocks of their own leave less idle than V-Half, at its memory."""
    costs = Costs.uniform(8, (2, 3, 1))
    best = search(Placement.vee(4), 6, 12, times=(2, 3, 1), slack=3, tries=40)[0]
    assert simulate(make("v-half", 4, 12), costs).span == 176 * NS_PER_MS
    assert best.span == simulate(best.layout.schedule, costs).span == 167 * NS_PER_MS


def test_legs_of_forward_and_backward_may_differ() -> None:
    """At (1, 2, 1) and eight activations the shortest block walks back faster than forward, and beats V-ZB."""
    best = search(Placement.vee(4), 8, 12, times=(1, 2, 1), slack=3, tries=60)[0]
    forward, backward = slots(best.block, Kind.F), slots(best.block, Kind.B)[::-1]
    assert gaps(forward)[:3] != gaps(backward)[:3]
    assert best.span < simulate(make("v-zb", 4, 12), Costs.uniform(8, (1, 2, 1))).span


def test_costs_of_each_stage_judge_the_result() -> None:
    """With a last stage of twice the work the best block is another one than with equal stages."""
    heavy = Costs.from_ms([1] * 7 + [2], [1] * 7 + [2], [1] * 7 + [2])
    found = search(Placement.vee(4), 6, 12, costs=heavy, tries=60)
    assert [one.span for one in found] == sorted(simulate(one.layout.schedule, heavy).span for one in found)
    assert found[0].span <= simulate(make("v-half", 4, 12), heavy).span


@pytest.mark.long
@pytest.mark.parametrize("placement", every(2, [Placement.looped(3, 3), ZIGZAG]), ids=["looped", "zigzag"])
def test_three_stages_per_rank(placement: Placement) -> None:
    tight, wide = (search(placement, memory, slack=1, tries=20)[0] for memory in (6, 9))
    for found, memory in ((tight, 6), (wide, 9)):
        assert schedule_faults(found.layout.schedule) == ()
        assert max(found.layout.peaks) <= memory
    assert wide.span // NS_PER_MS - 81 == 2
    assert tight.span // NS_PER_MS - 81 <= 7


def test_fused_blocks() -> None:
    found = search(Placement.linear(3), 3, split=False)
    assert found[0].span // NS_PER_MS - 27 == 6
    assert known_block("1f1b", 3).starts in [one.block.starts for one in found]


def test_too_little_memory_finds_nothing() -> None:
    assert search(Placement.vee(4), 3) == ()


def test_walks_are_all_there_are() -> None:
    """Against trying every list of gaps."""
    expected = []
    for leg in product(range(1, 5), repeat=3):
        walk = list(accumulate(leg, initial=0))
        try:
            repeat(Block.from_paths("try", Placement.linear(2), 4, walk, split=False), 3)
        except InputError:
            continue
        expected.append(walk)
    found = list(Paths(Placement.linear(2), 4, (1, 1, 1), Kind.BW, 99, 3))
    assert [walk for walk in found if max(gaps(walk)) <= 4] == expected != []


@pytest.mark.parametrize(
    ("arguments", "stated"),
    [
        ({"memory": 0}, (1, 0, "memory")),
        ({"memory": 4, "tries": 0}, (1, 0, "tries")),
        ({"memory": 4, "interval": 5}, (5, 6, "interval", "slots")),
    ],
)
def test_wrong_requests_are_refused(arguments: dict[str, int], stated: Stated) -> None:
    with raises(InputError, *stated):
        search(Placement.vee(2), **arguments)
