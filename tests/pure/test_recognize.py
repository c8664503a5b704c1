"""Recognizing schedules: published ones under any name, and the first difference of others."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from time import process_time

import pytest

from tests.pure.shapes import EVERY
from tests.refusals import states
from tests.thinned import every_and_all
from zerobubble import InputError, Op, Placement, Schedule, make
from zerobubble.export.torch_csv import from_torch_csv, to_torch_csv
from zerobubble.recognition import recognize
from zerobubble.schedules import SCHEDULES, Recipe, registry

SHAPES = [(2, 4), (4, 8), (4, 9), (6, 13)]


def renumbered(schedule: Schedule, new: list[int]) -> Schedule:
    """The same order with microbatch j called `new[j]`."""

    def called(op: Op) -> Op:
        return op._replace(microbatch=new[op.microbatch])

    routes = schedule.microbatch_routes and tuple(schedule.microbatch_routes[new.index(j)] for j in range(len(new)))
    return replace(
        schedule,
        rows=tuple(tuple(map(called, row)) for row in schedule.rows),
        microbatch_routes=routes,
        overlaps=frozenset((called(a), called(b)) for a, b in schedule.overlaps),
    )


def swapped(schedule: Schedule, rank: int, position: int) -> Schedule:
    """Two passes of a row exchanged."""
    row = list(schedule.rows[rank])
    row[position : position + 2] = row[position : position + 2][::-1]
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


@every_and_all(5)
@pytest.mark.parametrize(("name", "v"), EVERY)
def test_every_published_schedule_is_recognized(name: str, v: int, nth: int) -> None:
    for p, m in SHAPES[::nth]:
        if SCHEDULES[name].allows(p, m, v):
            found = recognize(make(name, p, m, v))
            assert (found.name, found.exact, found.share, found.relabeled) == (name, True, 1.0, False), (p, m)
            anonymous = recognize(replace(make(name, p, m, v), name="mine"))
            assert name in (anonymous.name, *anonymous.also), (p, m)


@every_and_all(5)
@pytest.mark.parametrize(("name", "v"), EVERY)
def test_numbers_of_microbatches_do_not_matter(name: str, v: int, nth: int) -> None:
    for p, m in SHAPES[::nth]:
        if SCHEDULES[name].allows(p, m, v):
            new = list(range(m))
            Random(p * m).shuffle(new)
            found = recognize(renumbered(make(name, p, m, v), new))
            assert (found.name, found.exact, found.relabeled) == (name, True, True), (p, m)
            states(str(found), name, "microbatches")


def test_several_names_of_one_order_are_all_reported() -> None:
    found = recognize(make("1f1b", 2, 1))
    assert set(found.also) >= {"gpipe", "eager-1f1b"}
    states(str(found), "1f1b", "eager-1f1b")


def test_the_placement_counts_and_its_name_does_not() -> None:
    schedule = make("1f1b", 3, 4)
    assert recognize(from_torch_csv(to_torch_csv(schedule))).name == "1f1b"
    assert recognize(replace(schedule, placement=Placement.custom(range(3)))).exact
    turned = replace(schedule, placement=Placement.custom((1, 0, 2)), rows=(schedule.rows[1], schedule.rows[0], schedule.rows[2]))
    states(recognize(turned).difference, "stage 0", "rank 1")


def test_the_first_difference_is_a_sentence() -> None:
    found = recognize(swapped(make("zb-h1", 4, 8), 2, 5))
    assert (found.name, found.exact) == ("zb-h1", False)
    assert found.share == (4 * 24 - 2) / (4 * 24)
    assert found.difference == "rank 2, position 5: runs 2B2 where zb-h1 runs 2F3"
    states(str(found), "zb-h1", "97.92", found.difference)


def test_the_earliest_position_comes_first() -> None:
    found = recognize(swapped(swapped(make("zb-h1", 4, 8), 0, 20), 3, 10))
    assert found.difference.startswith("rank 3, position 10: ")


def test_a_difference_is_reported_in_the_numbers_of_the_schedule_given() -> None:
    found = recognize(swapped(renumbered(make("zb-h1", 4, 8), list(range(8))[::-1]), 2, 5))
    assert (found.name, found.relabeled) == ("zb-h1", True)
    assert found.difference == "rank 2, position 5: runs 2B5 where zb-h1 runs 2F4"


def test_a_row_may_end_early() -> None:
    schedule = make("zb-h1", 2, 4)
    shorter = replace(schedule, rows=(schedule.rows[0][:-1], schedule.rows[1]))
    longer = replace(schedule, rows=(schedule.rows[0], (*schedule.rows[1], Op.parse("1W3"))))
    states(recognize(shorter).difference, "rank 0", "position 11", "zb-h1", "0W3")
    states(recognize(longer).difference, "rank 1", "position 12", "1W3", "zb-h1")


def test_routes_count() -> None:
    schedule = make("chimera", 4, 8)
    routes = schedule.microbatch_routes
    j = routes.index(1)
    other = replace(schedule, microbatch_routes=(*routes[:j], 0, *routes[j + 1 :]))
    states(recognize(other).difference, f"microbatch {j}", 0)


def test_overlapping_counts() -> None:
    schedule = make("dualpipe-v", 2, 8)
    found = recognize(replace(schedule, overlaps=frozenset()))
    assert (found.name, found.exact, found.share) == ("dualpipe-v", False, 1.0)
    assert found.difference.endswith("one after the other where dualpipe-v runs them overlapped")
    pair = schedule.rows[0][0], schedule.rows[0][1]
    more = replace(schedule, overlaps=schedule.overlaps | {pair})
    states(recognize(more).difference, "rank 0", "position 0", "0F0", "0F1", "dualpipe-v")


def test_nothing_to_compare_with() -> None:
    schedule = Schedule.from_text(
        "zerobubble schedule 1\nplacement custom: 0 1 1\nmicrobatches 1\nrank 0: 0F0 0BW0\nrank 1: 1F0 2F0 2BW0 1BW0\n"
    )
    found = recognize(schedule)
    assert (found.name, found.exact) == ("", False)
    states(str(found), 3, 2, 1, "schedule", "stages")


def test_schedules_of_ones_own_are_known_and_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
        """Mine."""
        if microbatches > 4:
            raise InputError("too many")
        return replace(renumbered(make("gpipe", ranks, microbatches), list(range(microbatches))[::-1]), name="mine")

    monkeypatch.setitem(registry.registered, "mine", Recipe("mine", backwards))
    assert recognize(replace(backwards(2, 4), name="file")).name == "mine"
    assert recognize(make("gpipe", 2, 5)).name == "gpipe"


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_large_schedules_take_a_moment(name: str) -> None:
    schedule = make(name, 16, 64)
    start = process_time()
    assert recognize(schedule).name == name
    assert process_time() - start < 30, "seconds, mostly less than half of one; a virtual machine may count what others took"
