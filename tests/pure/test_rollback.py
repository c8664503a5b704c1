"""Every rank can run up to its rollback point, no further than it can undo, and every message sent is received."""

from __future__ import annotations

from collections import Counter

import pytest

import zerobubble as zb
from tests.pure.shapes import EVERY, grid
from tests.thinned import every
from zerobubble.lowering.rollback import with_rollback_points
from zerobubble.program import Compute, Program, Recv, Send
from zerobubble.rules import Value, uses

CASES = [(name, v) for name, v in EVERY if zb.schedules.SCHEDULES[name].trains]


def forwards(program: Program, rank: int, position: int) -> list[str]:
    return [str(action.step[0]) for action in program.rows[rank][:position] if isinstance(action, Compute)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", [8, 8, 8, 0]),
        ("1f1b", [4, 3, 2, 0]),
        ("zb-h1", [4, 3, 2, 0]),
        ("zb-h2", [7, 5, 3, 0]),
        ("zb-v", [7, 5, 3, 0]),
        ("interleaved-1f1b", [4, 4, 4, 0]),
        ("chimera", [2, 1, 0, 0]),
    ],
)
def test_forwards_before_the_turning_points_of_4_ranks_and_8_microbatches(name: str, expected: list[int]) -> None:
    program, points = with_rollback_points(zb.lower(zb.make(name, 4, 8)))
    assert [len(forwards(program, rank, point.position)) for rank, point in enumerate(points)] == expected


@pytest.mark.parametrize(("name", "stages"), every(3, CASES))
def test_what_runs_before_the_turning_points_runs_alone_and_is_taken_back_in_whole(name: str, stages: int) -> None:
    for ranks, microbatches in grid(name, stages, [(1, 3), (2, 4), (3, 7), (4, 8), (4, 9), (6, 12)]):
        schedule = zb.make(name, ranks, microbatches, stages)
        original = zb.lower(schedule)
        program, points = with_rollback_points(original)
        assert zb.lowering.program_faults(program) == ()
        assert program.to_schedule() == schedule
        assert [Counter(row) for row in program.rows] == [Counter(row) for row in original.rows]
        assert forwards(program, ranks - 1, points[-1].position) == []
        check_turning_points(program, [point.position for point in points])
        for rank, point in enumerate(points):
            left = arriving(program, rank, [p.position for p in points])
            assert sorted(point.coming) == sorted(left)


def check_turning_points(program: Program, points: list[int]) -> None:
    """Slowly: rank by rank and pass by pass, the parts before the points run to their ends, and nothing else is received there."""
    sent: set[Value] = set()
    heads = [0] * program.num_ranks
    for _ in range(program.num_ranks * program.num_stages * program.num_microbatches):
        for rank, row in enumerate(program.rows):
            while heads[rank] < points[rank]:
                action = row[heads[rank]]
                if isinstance(action, Compute):
                    assert all(op.kind is zb.Kind.F and op.stage < program.num_stages - 1 for op in action.step)
                    here = {v for a in row if isinstance(a, Recv) for v in [a.value]}
                    if any(v in here and v not in sent for op in action.step for v in uses(op, program.num_stages)):
                        break
                elif isinstance(action, Send):
                    sent.add(action.value)
                heads[rank] += 1
    assert heads == points
    for row, point in zip(program.rows, points, strict=True):
        assert {a.value for a in row[:point] if isinstance(a, Recv)} == sent & {a.value for a in row if isinstance(a, Recv)}


def arriving(program: Program, rank: int, points: list[int]) -> set[Value]:
    """What the others send to `rank` before their points, less what it uses before its own."""
    sent = {a.value for r, row in enumerate(program.rows) for a in row[: points[r]] if isinstance(a, Send) and a.peer == rank}
    used = {v for a in program.rows[rank][: points[rank]] if isinstance(a, Compute) for op in a.step for v in uses(op, program.num_stages)}
    return sent - used


def test_turning_points_are_as_far_as_they_can_be() -> None:
    """The next pass of every row but the last rank's goes back, ends in a loss, or needs something from beyond a rollback point."""
    for name in ("zb-h2", "zb-v", "chimera", "hanayo", "breadth-first"):
        program, points = with_rollback_points(zb.lower(zb.make(name, 4, 8)))
        sent = {a.value for r, row in enumerate(program.rows) for a in row[: points[r].position] if isinstance(a, Send)}
        for rank, row in enumerate(program.rows[:-1]):
            following = next(a for a in row[points[rank].position :] if isinstance(a, Compute))
            plain = all(op.kind is zb.Kind.F and op.stage < program.num_stages - 1 for op in following.step)
            received = {a.value for a in row if isinstance(a, Recv)}
            assert not plain or any(v in received - sent for op in following.step for v in uses(op, program.num_stages))


def test_no_loss_is_computed_before_a_turning_point() -> None:
    """Not even of a microbatch that no pass of the last rank is for."""
    header = "zerobubble schedule 1\nplacement custom: 0 0 | 1 1\nmicrobatches 2\nroutes 0 1\n"
    schedule = zb.Schedule.from_text(f"{header}rank 0: 0F0 1F0 1BW0 0BW0\nrank 1: 0F1 1F1 1BW1 0BW1\n")
    program, points = with_rollback_points(zb.lower(schedule))
    assert [forwards(program, rank, point.position) for rank, point in enumerate(points)] == [["0F0"], []]
