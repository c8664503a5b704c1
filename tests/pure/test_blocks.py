"""Building blocks: their formats, their repetition, and the invariants of squeezing and reordering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product
from random import Random

import pytest

from tests.refusals import Stated, raises
from zerobubble import InputError, Kind, Op, Placement, ScheduleError, schedule_faults, simulate
from zerobubble.blocks import (
    KNOWN,
    Block,
    Start,
    collisions,
    early_starts,
    four_steps,
    known_block,
    lifespans,
    memory_law,
    path_slots,
    reorder,
    repeat,
    squeeze,
    steady_peaks,
)
from zerobubble.blocks.block_search import Paths
from zerobubble.costs import NS_PER_MS
from zerobubble.errors import ParseError

TINY = """zerobubble block 1
name tiny
placement linear: 0 1
interval 3  # F, B and W
rank 0: 0F0@0 0B0@4 0W0@5
rank 1: 1F0@1 1B0@2 1W0@3
"""

RANKS = range(1, 17)


@pytest.mark.parametrize("name", KNOWN)
def test_published_blocks_survive_text_and_repeat_without_collision(name: str) -> None:
    for ranks in RANKS:
        block = known_block(name, ranks)
        assert Block.from_text(block.to_text()) == block
        assert schedule_faults(repeat(block, 2 * ranks).schedule) == ()


def test_a_block_of_uneven_times_survives_text() -> None:
    block = Block.from_paths("slow", Placement.linear(2), 9, path_slots(0, (1, 3), (1, 3), (1, 4)), times=(3, 4, 2))
    assert Block.from_text(block.to_text()) == block
    assert "times 3 4 2" in block.to_text()


def test_a_walk_is_written_leg_by_leg() -> None:
    assert path_slots(2, (3, 1), (1, 4), (2, 2)) == [2, 3, 4, 5, 9, 11, 13]
    v_half = known_block("v-half", 3)
    slots = {start.op: start.slot for row in v_half.starts for start in row}
    for r in range(3):  # the formulas of table 9, for an odd number of ranks
        expected = [2 * r, 9 - r - 2, 9 + 2 * r - 1, 18 - r - 2]
        assert [slots[op] for op in (Op(Kind.F, r, 0), Op(Kind.F, 5 - r, 0), Op(Kind.B, 5 - r, 0), Op(Kind.B, r, 0))] == expected


@pytest.mark.parametrize(
    ("old", "new", "stated"),
    [
        ("zerobubble block 1", "zerobubble schedule 1", ("line 1", "'zerobubble block 1'")),
        ("0F0@0", "0F0", ("line 5", "0F0", "0F0@3")),
        ("0F0@0", "0X0@0", ("line 5", "0X0")),
        ("0F0@0", "0F0@-1", ("line 5", "0F0@-1")),
        ("rank 1", "rank 2", ("line 6", "'rank 1: ...'")),
        ("interval 3", "interval x", ("line 4", "interval", 1, "x")),
        ("interval 3", "interval 3\ninterval 4", ("line 5", "'interval 4'")),
        ("interval 3", "speed 3", ("line 4", "'speed 3'")),
        ("interval 3", "", ("interval", "missing", "header")),
        ("interval 3", "interval 3\nmicrobatches 2", (2, 1, "microbatches")),
        ("interval 3", "interval 3\nroutes 0", ("block", "header", "'routes'")),
        ("interval 3", "interval 0", ("tiny", 1, 0)),
        ("interval 3", "interval 3\ntimes 1 0 1", ("tiny", 1, "F", "B", "W", "(1, 0, 1)")),
    ],
)
def test_a_malformed_text_is_reported(old: str, new: str, stated: Stated) -> None:
    with raises(InputError, *stated) as caught:
        Block.from_text(TINY.replace(old, new))
    assert isinstance(caught.value, ParseError) or "tiny" in stated


@pytest.mark.parametrize(
    ("old", "new", "stated"),
    [
        ("interval 3", "interval 2", ("tiny", "rank 0", "0F0@0", "0B0@4", 2)),
        ("0W0@5", "0W0@6", ("tiny", "rank 0", "0F0@0", "0W0@6", 3, 0)),
        ("0B0@4 0W0@5", "0B0@2 0W0@4", ("tiny", "0B0", 2, "1B0", 3)),
    ],
)
def test_a_block_that_cannot_repeat_is_reported(old: str, new: str, stated: Stated) -> None:
    with raises(InputError, *stated):
        repeat(Block.from_text(TINY.replace(old, new)), 4)


def test_a_block_that_lacks_a_pass_is_reported() -> None:
    with raises(ScheduleError, "stage 1", "microbatch 0", "rank 1", "1W0"):
        repeat(Block.from_text(TINY.replace(" 1W0@3", "")), 4)


@pytest.mark.parametrize("seed", range(12))
def test_collisions_are_those_of_copies_played_slot_by_slot(seed: int) -> None:
    chance = Random(seed)
    ops = [Op(kind, stage, 0) for stage in range(2) for kind in (Kind.F, Kind.B, Kind.W)]
    rows = tuple(tuple(Start(op, chance.randrange(12)) for op in ops if op.stage == rank) for rank in range(2))
    times = (chance.randint(1, 3), chance.randint(1, 5), chance.randint(1, 2))
    block = Block("random", Placement.linear(2), chance.randint(2, 9), rows, times)
    found: dict[tuple[int, frozenset[Start]], tuple[int, set[int]]] = {}
    for rank, row in enumerate(block.starts):
        running: dict[int, list[tuple[Start, int]]] = {}
        for copy, start in product(range(30), row):
            for slot in range(block.length(start.op.kind)):
                running.setdefault(start.slot + slot + copy * block.interval, []).append((start, copy))
        for slot, passes in sorted(running.items()):
            for (one, _), (other, _) in combinations(passes, 2):
                key = rank, frozenset((one, other))
                found.setdefault(key, (slot, set()))[1].add(slot % block.interval)
    reported = {(one.rank, frozenset((one.first, one.second))): (one.since, set(one.slots)) for one in collisions(block)}
    assert reported == found
    assert len(reported) == len(collisions(block))


def test_a_pass_longer_than_the_interval_collides_with_its_own_next_copy() -> None:
    block = Block("long", Placement.linear(1), 2, ((Start(Op(Kind.F, 0, 0), 1),),), (3, 1, 1))
    (found,) = collisions(block)
    assert (found.first, found.slots, found.since) == (found.second, (1,), 3)
    with raises(InputError, "0F0@1", 3, 2):
        repeat(block, 4)


def test_early_starts_name_what_they_wait_for() -> None:
    block = Block.from_text(known_block("1f1b", 2).to_text().replace("0BW0@4", "0BW0@3"))
    (early,) = early_starts(block)
    assert (str(early.start), str(early.maker), early.end) == ("0BW0@3", "1BW0", 4)
    assert early_starts(known_block("v-half", 4)) == ()


def test_passes_longer_than_a_slot_collide_by_any_of_their_slots() -> None:
    fused = Block("fused", Placement.linear(1), 3, ((Start(Op(Kind.F, 0, 0), 0), Start(Op(Kind.BW, 0, 0), 2)),))
    with raises(InputError, "0F0@0", "0BW0@2"):
        repeat(fused, 2)
    assert repeat(replace(fused, interval=4), 2).bubble == 2


def test_a_pass_longer_than_the_interval_collides_with_its_own_copy() -> None:
    lone = Block("lone", Placement.linear(1), 2, ((Start(Op(Kind.F, 0, 0), 0),),), (3, 1, 1))
    with raises(InputError, "rank 0", "0F0@0", 3, 2):
        repeat(lone, 2)
    assert repeat(replace(lone, interval=3), 2).bubble == 0


def test_w_needs_room() -> None:
    with raises(InputError, "rank 0", "0W0", 2):
        Block.from_paths("tight", Placement.linear(1), 2, [0, 1])
    with raises(InputError, 2, 4, 3, "path", "stages"):
        Block.from_paths("short", Placement.linear(2), 6, [0, 1, 2])


def test_copies_follow_each_other_at_the_interval() -> None:
    laid = repeat(known_block("two-thirds", 4), 5)
    slots = {start.op: start.slot for row in laid.rows for start in row}
    assert len(slots) == 4 * 3 * 5
    assert all(slots[op] - slots[op._replace(microbatch=op.microbatch - 2)] == 6 for op in slots if op.microbatch >= 2)


@pytest.mark.sweep
@pytest.mark.parametrize("name", KNOWN)
def test_the_memory_law_holds_and_the_steady_peak_is_exact(name: str) -> None:
    for ranks in RANKS:
        block = known_block(name, ranks)
        longest = max(life.slots for lives in lifespans(block) for life in lives)
        steps = four_steps(block, block.num_microbatches * (2 * longest // block.interval + 2))
        assert all(peak <= law for peak, law in zip(steps.repeated.peaks, memory_law(block), strict=True)), ranks
        assert steps.repeated.peaks == steady_peaks(block), ranks
        assert max(steps.squeezed.peaks) == max(steady_peaks(block)), ranks
        assert max(steps.reordered.peaks) <= max(steps.squeezed.peaks), ranks


def test_lifespans_of_the_papers_table() -> None:
    """Table 1 of the paper: a stage lives 6d slots at most in V-Half, 4d in V-Min, 12d - 2 in V-ZB, and 3d in 1F1B's slots."""
    for ranks in (4, 5, 7, 8, 16):
        longest = {name: max(life.slots for lives in lifespans(known_block(name, ranks)) for life in lives) for name in KNOWN}
        assert abs(longest["v-half"] - 6 * ranks) <= 6
        assert abs(longest["v-min"] - 4 * ranks) <= 4
        assert longest["v-zb"] <= 12 * ranks - 2
        assert longest["1f1b"] == 3 * ranks


MIXED = Block.from_text(TINY.replace("name tiny", "name mixed").replace("1B0@2 1W0@3", "1BW0@2"))
"""Backward split on one rank and whole on the other."""

FORWARD = Block.from_text(TINY.replace("name tiny", "name forward").replace(" 0B0@4 0W0@5", "").replace(" 1B0@2 1W0@3", ""))
"""What inference repeats."""


NUM_RANDOM = 12


@cache
def random_blocks() -> list[Block]:
    """Walks over random placements, each with random times. They take seconds, so no import makes them."""
    random, found = Random(5), []
    while len(found) < NUM_RANDOM:
        ranks = random.randrange(1, 4)
        placement = random.choice((Placement.linear(ranks), Placement.vee(ranks), Placement.looped(ranks, 2)))
        times = random.choice(((1, 1, 1), (1, 2, 1), (2, 3, 1)))
        interval = placement.stages_per_rank * sum(times) + random.randrange(3)
        walks = list(Paths(placement, interval, times, Kind.BW, 2 * ranks, 2))
        if walks:
            found.append(Block.from_paths("random", placement, interval, random.choice(walks), split=False, times=times))
    return found


BLOCKS: dict[str, Callable[[], Block]] = {
    **{name: partial(known_block, name, 4) for name in KNOWN},
    **{"mixed": lambda: MIXED, "forward": lambda: FORWARD},
    **{f"random {number}": lambda number=number: random_blocks()[number] for number in range(NUM_RANDOM)},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("keep_steady_phase", [True, False])
def test_steps_keep_what_they_promise(name: str, keep_steady_phase: bool) -> None:
    block = BLOCKS[name]()
    for microbatches in (1, 2, 5, 11):
        _, repeated, squeezed, reordered = four_steps(block, microbatches, keep_steady_phase=keep_steady_phase)
        assert squeezed.schedule == repeated.schedule
        assert schedule_faults(reordered.schedule) == ()
        assert sorted(op for row in reordered.schedule.rows for op in row) == sorted(op for row in repeated.schedule.rows for op in row)
        assert repeated.timeline.makespan >= squeezed.timeline.makespan >= reordered.timeline.makespan
        assert max(reordered.peaks) <= max(squeezed.peaks)
        for layout in (squeezed, reordered):
            played = simulate(layout.schedule, layout.costs)
            assert [[(span.start, span.end) for span in row] for row in played.rows] == [
                [(span.start, span.end) for span in row] for row in layout.timeline.rows
            ]


def test_more_memory_makes_reordering_shorter() -> None:
    squeezed = squeeze(repeat(known_block("v-half", 8), 24))
    layouts = [reorder(squeezed, limit, keep_steady_phase=False) for limit in (10, 12, 14)]
    assert [max(layout.peaks) for layout in layouts] == [10, 12, 14]
    assert layouts[0].bubble > layouts[1].bubble > layouts[2].bubble


def test_a_steady_phase_is_left_in_peace() -> None:
    squeezed = squeeze(repeat(known_block("v-half", 4), 20))
    kept = [[op for op in row.schedule.rows[3] if 8 <= op.microbatch < 12] for row in (squeezed, reorder(squeezed))]
    assert kept[0] == kept[1]


def test_squeezing_alone_is_what_the_paper_says_it_is() -> None:
    """Bubbles before reordering, of the authors' code: 7p/2 - 2 and 7(p-1)/2 for V-Half, 4p - 3 for V-Min where 3 divides p."""
    for ranks in range(4, 13):
        half = squeeze(repeat(known_block("v-half", ranks), 3 * ranks)).bubble
        assert half == (7 * (ranks - 1) // 2 if ranks % 2 else 7 * ranks // 2 - 2)
    assert [squeeze(repeat(known_block("v-min", ranks), 3 * ranks)).bubble for ranks in (6, 9, 12)] == [21, 33, 45]


def test_a_layout_counts_slots_as_milliseconds() -> None:
    laid = squeeze(repeat(Block.from_text(TINY), 1))
    assert [(span.start // NS_PER_MS, str(span.op)) for span in laid.timeline.rows[0]] == [(0, "0F0"), (3, "0B0"), (4, "0W0")]
    assert (laid.timeline.makespan, laid.bubble, laid.peaks) == (5 * NS_PER_MS, 2, (1, 1))


def test_unknown_blocks_and_counts_are_reported() -> None:
    for wrong, stated in (
        (lambda: known_block("v-hlaf", 4), ("v-hlaf", "v-half")),
        (lambda: known_block("v-half", 0), ("block", "1 rank", 0)),
        (lambda: repeat(Block.from_text(TINY), 0), ("num_microbatches", 0)),
        (lambda: reorder(repeat(known_block("v-half", 4), 8), 5), ("v-half", 6, 5)),
        (lambda: Block("none", Placement.linear(1), 3, ((),)), ("none", "pass")),
    ):
        with raises(InputError, *stated):
            wrong()
