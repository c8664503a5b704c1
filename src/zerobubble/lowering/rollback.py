"""How far a step may run and still be taken back: the rollback point of every rank, and what has to come in before it starts over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zerobubble.kinds import Stuff, kinds_making
from zerobubble.program import Action, Compute, Program, Recv, Send
from zerobubble.rules import Value


class RollbackPoint(NamedTuple):
    """Up to `position` in its row a rank can undo a step: it has run only forwards whose inputs were also made before a rollback point.

    `coming` are the messages that others send before theirs and this rank does not use before its own, in an order in which all ranks
    can wait for them.
    """

    position: int
    coming: tuple[Value, ...]


def with_rollback_points(program: Program) -> tuple[Program, tuple[RollbackPoint, ...]]:
    """`program` with the rollback point of each row, where exactly those receives are posted whose messages leave before the sender's.

    The last rank's is where it starts. No loss is computed before a rollback point.
    """
    ready = _ready(program)
    points = _points(program, ready)

    def arrives_early(receive: Recv) -> bool:
        return ready[receive.value][1] < points[receive.peer]

    rows: list[tuple[Action, ...]] = []
    positions: list[int] = []
    for row, point in zip(program.rows, points, strict=True):
        before, after = row[:point], row[point:]
        late = dict.fromkeys(action for action in before if isinstance(action, Recv) and not arrives_early(action))
        early = dict.fromkeys(action for action in after if isinstance(action, Recv) and arrives_early(action))
        head = [*(action for action in before if action not in late), *early]
        rows.append((*head, *late, *(action for action in after if action not in early)))
        positions.append(len(head))
    held = Program(program.name, program.placement, program.num_microbatches, tuple(rows), program.microbatch_routes)
    return held, _rollback_points(held, positions)


def _ready(program: Program) -> dict[Value, tuple[int, int]]:
    """The rank and position at which each value is there for its user: where it is sent, or made if it stays."""
    ready: dict[Value, tuple[int, int]] = {}
    for rank, row in enumerate(program.rows):
        for position, action in enumerate(row):
            if isinstance(action, Compute):
                ready.update((value, (rank, position)) for value in program.makes(action.step))
            elif isinstance(action, Send):
                ready[action.value] = (rank, position)
    return ready


def _points(program: Program, ready: dict[Value, tuple[int, int]]) -> list[int]:
    """The first pass of each row that goes back or ends in a loss, moved up until every forward before it can run before all others."""
    points = [_first(row, lambda step: not _is_plain_forward(step, program.num_stages)) for row in program.rows]
    points[-1] = 0

    def comes_later(step: Compute) -> bool:
        return any(ready[value][1] >= points[ready[value][0]] for value in program.uses(step.step))

    while (cut := [min(point, _first(row, comes_later)) for point, row in zip(points, program.rows, strict=True)]) != points:
        points[:] = cut
    return points


def _first(row: tuple[Action, ...], holds: Callable[[Compute], bool]) -> int:
    return next((k for k, action in enumerate(row) if isinstance(action, Compute) and holds(action)), len(row))


def _is_plain_forward(action: Compute, num_stages: int) -> bool:
    forwards = kinds_making(Stuff.ACTIVATION)
    return all(op.kind in forwards and op.stage < num_stages - 1 for op in action.step)


def _rollback_points(program: Program, positions: list[int]) -> tuple[RollbackPoint, ...]:
    order = _sent_before(program, positions)
    found = []
    for row, position in zip(program.rows, positions, strict=True):
        used = {value for action in row[:position] if isinstance(action, Compute) for value in program.uses(action.step)}
        left = {action.value for action in row[:position] if isinstance(action, Recv)} - used
        found.append(RollbackPoint(position, tuple(value for value in order if value in left)))
    return tuple(found)


def _sent_before(program: Program, points: list[int]) -> list[Value]:
    """What all ranks send before their rollback points, in the order of a run of these parts of the rows."""
    sent: dict[Value, None] = {}
    messages = {action.value for _, _, _, action in program.channels()}
    heads = [0] * program.num_ranks
    rank, idle = 0, 0
    while idle < program.num_ranks:
        row, start = program.rows[rank], heads[rank]
        while heads[rank] < points[rank]:
            action = row[heads[rank]]
            if isinstance(action, Compute) and any(v in messages and v not in sent for v in program.uses(action.step)):
                break
            if isinstance(action, Send):
                sent[action.value] = None
            heads[rank] += 1
        idle = 0 if heads[rank] > start else idle + 1
        rank = (rank + 1) % program.num_ranks
    return list(sent)
