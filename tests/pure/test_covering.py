"""Which parts a rank offloads and when, worked out by hand for rows of 10 ns passes and a link that copies a byte per ns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.refusals import raises
from zerobubble import InputError, Op
from zerobubble.offload.choice import Price, improved
from zerobubble.offload.copies import HostLink
from zerobubble.offload.covering import RankRow, Window, add_window, candidates, fewest_bytes, with_headstart
from zerobubble.offload.offloads import Offload, SavedPart

LINK = HostLink(to_host=1e9, from_host=1e9)


def row(limit: int, held: list[int], parts: Mapping[tuple[int, int], tuple[int, int, int]]) -> RankRow:
    steps = [(Op.parse(f"0F{number}"),) for number in range(len(held))]
    begins = list(range(0, 10 * len(held), 10))
    return RankRow(steps, {key: SavedPart(*part) for key, part in parts.items()}, held, limit, begins, [begin + 10 for begin in begins])


def two_parts(limit: int) -> RankRow:
    """Of 4 bytes from step 0 to step 5, and of 2 bytes from step 1 to step 4."""
    return row(limit, [4, 6, 6, 6, 4, 0], {(0, 0): (0, 5, 4), (0, 1): (1, 4, 2)})


def test_headroom_is_what_the_limit_leaves() -> None:
    rank = two_parts(4)
    assert rank.longest((0, 0)) == (1, 5)
    assert rank.headroom({}) == [0, -2, -2, -2, 0, 4]
    assert rank.headroom({(0, 0): (1, 5)}) == [0, 2, 2, 2, 4, 4]
    counts = [0, 0, 0]
    add_window(counts, (1, 3), 5)
    assert counts == [0, 5, 5]


@pytest.mark.parametrize(("limit", "fewest"), [(6, 0), (5, 2), (4, 2)])
def test_the_fewest_bytes_cover_the_overrun_in_pieces(limit: int, fewest: int) -> None:
    assert fewest_bytes(two_parts(limit), 0) == fewest


def test_bytes_move_once_for_all_steps_that_lack_them() -> None:
    """Step 1 lacks 3 bytes, step 3 lacks 3: the part that is away longest covers both, but of its 2 bytes each step needs one more."""
    rank = row(2, [2, 5, 2, 5, 0], {(0, 0): (0, 4, 2), (0, 1): (0, 2, 1), (0, 2): (2, 4, 1)})
    assert fewest_bytes(rank, 0) == 4


def test_a_limit_below_what_stays_is_refused() -> None:
    with raises(InputError, "rank 7", "4 B", "0F0", "3 B"):
        fewest_bytes(two_parts(3), 7)
    with raises(InputError, "rank 7", "3 B", "0F1", "2 B"):
        fewest_bytes(row(2, [2, 6, 6, 0], {(0, 0): (0, 3, 3)}), 7)
    with raises(InputError, "rank 7", "3 B", "0F0", "2 B"):
        fewest_bytes(row(2, [3], {}), 7)  # by one byte


def test_candidates_move_few_parts_first_and_give_copies_the_memory_left() -> None:
    long, short = Offload(0, 0, 0, 1, 4, 5), Offload(0, 1, 1, 2, 3, 4)
    assert list(candidates(two_parts(4), LINK)) == [[long], [long, short]]
    assert list(candidates(two_parts(6), LINK)) == [[]]


def test_a_part_stays_if_another_covers_all_that_it_did() -> None:
    """The part that is away longest comes first, but has too few bytes. With the next one, it is unnecessary."""
    rank = row(5, [5, 9, 9, 5, 0], {(0, 0): (0, 4, 1), (0, 1): (0, 3, 4)})
    assert next(candidates(rank, LINK)) == [Offload(0, 1, 0, 1, 3, 3)]


def test_only_parts_that_the_others_make_unnecessary_stay() -> None:
    """Without the smallest, no other can stay: the two that are left cover 4 bytes with 2 and 3."""
    rank = row(5, [5, 9, 9, 5, 5, 0], {(0, 0): (0, 5, 1), (0, 1): (0, 4, 2), (0, 2): (0, 3, 3)})
    assert next(candidates(rank, LINK)) == [Offload(0, 1, 0, 1, 3, 4), Offload(0, 2, 0, 1, 3, 3)]


def test_a_part_that_covers_all_to_the_byte_moves_alone() -> None:
    rank = row(5, [5, 9, 9, 5, 0], {(0, 0): (0, 4, 4), (0, 1): (0, 3, 5)})
    assert next(candidates(rank, LINK)) == [Offload(0, 0, 0, 1, 3, 4)]


def test_a_part_that_one_step_needs_moves_too() -> None:
    rank = row(4, [4, 5, 8, 8, 0], {(0, 0): (0, 4, 1), (0, 1): (1, 4, 4)})
    assert next(candidates(rank, LINK)) == [Offload(0, 0, 0, 1, 3, 4), Offload(0, 1, 1, 2, 4, 4)]


def test_copies_get_time_on_both_sides_as_long_as_a_step_is_left() -> None:
    rank = row(4, [4, 4, 4, 4, 0], {(0, 0): (0, 4, 4)})
    assert with_headstart(rank, {(0, 0): (1, 4)}, 1.5, LINK) == {(0, 0): (2, 3)}
    assert with_headstart(rank, {(0, 0): (1, 3)}, 1.5, LINK) == {(0, 0): (2, 3)}
    assert with_headstart(rank, {(0, 0): (2, 4)}, 1.5, LINK) == {(0, 0): (2, 3)}
    longer = row(4, [4, 4, 4, 4, 4, 0], {(0, 0): (0, 5, 4)})
    assert with_headstart(longer, {(0, 0): (1, 5)}, 2.5, LINK) == {(0, 0): (2, 4)}
    assert with_headstart(longer, {(0, 0): (1, 5)}, 2.6, LINK) == {(0, 0): (2, 3)}


def test_spare_parts_are_tried_up_to_eight() -> None:
    """Each of 12 equal parts covers the one byte that is lacking. Plans move 0, 1, 2, 3, 4, 6 and 8 parts more."""
    held = [*range(1, 13), *range(12, 0, -1)]
    rank = row(11, held, {(0, number): (number, 23 - number, 1) for number in range(12)})
    assert [len(moved) for moved in candidates(rank, HostLink(1e15, 1e15))] == [1, 2, 3, 4, 5, 7, 9]


def test_a_part_is_away_between_its_passes_even_if_they_take_no_time() -> None:
    """All passes begin and end at 0, so times alone would let a part leave before it is made, and return after it is needed."""
    rank = row(4, [4, 5, 5, 4, 0], {(0, 0): (0, 3, 1)})._replace(begins=[0] * 5, ends=[0] * 5)
    assert next(candidates(rank, LINK)) == [Offload(0, 0, 0, 1, 3, 3)]


def test_a_part_gives_way_if_its_copies_lack_time() -> None:
    """Step 3 lacks a byte. Copies of the first part take 15 ns, of the second 1 ns.

    With once its time for each copy, the first part is away in steps 3 and 4, with twice that time in no step.
    """
    rank = row(16, [15, 16, 16, 17, 16, 16, 16, 0], {(0, 0): (0, 7, 15), (0, 1): (1, 6, 1)})
    long, short = Offload(0, 0, 0, 3, 4, 7), Offload(0, 1, 1, 3, 5, 6)
    assert list(candidates(rank, LINK)) == [[long], [short], [long, short]]


class Prices:
    """Prices of choices, all equal but for those named, and the windows of each choice that was priced, by microbatch."""

    def __init__(self, known: Mapping[tuple[tuple[int, Window], ...], int] | None = None) -> None:
        self.known, self.asked = known or {}, list[tuple[tuple[int, Window], ...]]()

    def __call__(self, rows: Sequence[Sequence[Offload]]) -> Price:
        ((*offloads,),) = rows
        self.asked.append(tuple((one.microbatch, (one.freed, one.back)) for one in offloads))
        return self.known.get(self.asked[-1], 9), 0, 0


ROOMY = row(5, [4, 4, 4, 4, 4, 0], {(0, 0): (0, 5, 4), (0, 1): (1, 4, 1)})
FIRST = [[Offload(0, 0, 0, 2, 4, 5)]]


def test_changes_move_one_end_by_a_step_or_one_part() -> None:
    """First the windows next to (2, 4), then the second part in addition, neither part, and the second instead of the first."""
    prices = Prices()
    assert improved([ROOMY], FIRST, LINK, prices, fastest=0, evaluations=99) == FIRST
    ends = [((0, window),) for window in ((3, 4), (2, 3), (1, 4), (2, 5), (3, 5), (1, 3))]
    parts = [((0, (2, 4)), (1, (2, 3))), ((0, (2, 3)), (1, (2, 3))), (), (), ((1, (2, 3)),), ((1, (2, 3)),)]
    assert prices.asked == [((0, (2, 4)),), *ends, *parts]


def test_changes_stay_between_the_passes_and_within_the_limit() -> None:
    prices = Prices()
    full = row(4, [4, 5, 4, 4, 0], {(0, 0): (0, 4, 1)})
    improved([full], [[Offload(0, 0, 0, 1, 2, 4)]], LINK, prices, fastest=0, evaluations=99)
    assert prices.asked == [((0, (1, 2)),), ((0, (1, 3)),)]  # without the part, or with it away later, step 1 lacks a byte


@pytest.mark.parametrize(("evaluations", "tried"), [(0, 1), (1, 2), (3, 4)])
def test_no_more_changes_are_evaluated_than_allowed(evaluations: int, tried: int) -> None:
    prices = Prices()
    improved([ROOMY], FIRST, LINK, prices, fastest=0, evaluations=evaluations)
    assert len(prices.asked) == tried


def test_the_search_goes_on_from_the_first_improvement_and_ends_at_the_fastest() -> None:
    prices = Prices({((0, (2, 3)),): 8, ((0, (1, 3)),): 7})
    assert improved([ROOMY], FIRST, LINK, prices, fastest=7, evaluations=99) == [[Offload(0, 0, 0, 1, 3, 5)]]
    assert prices.asked == [((0, window),) for window in ((2, 4), (3, 4), (2, 3), (1, 3))]
    fastest = Prices()
    assert improved([ROOMY], FIRST, LINK, fastest, fastest=9, evaluations=99) == FIRST
    assert len(fastest.asked) == 1
