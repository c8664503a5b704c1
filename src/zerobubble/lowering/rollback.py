"""Rollback points: how far a rank may run a step and still undo it, as the optimizer's post-update validation needs.

Each rank updates its weights before it knows the global gradient norm, and validates the update while it runs the next step. If the
validation fails, every rank undoes the update and starts the step over. Only forwards can be repeated safely, so the rollback point comes
before the first pass that adds to gradients or computes a loss.

The forwards before the rollback points must form a closed set: none of them may need a message that is sent after the sender's rollback
point, as that message would never come if the step starts over. Conversely, each message that was sent must be received before the step
starts over, or it would be matched with a receive of the repeated step. So exactly the receives of messages sent before the sender's
rollback point are posted before the receiver's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from zerobubble.kinds import ValueKind, kinds_making
from zerobubble.program import Action, Compute, Program, Recv, Send
from zerobubble.rules import Value


class RollbackPoint(NamedTuple):
    """The position in a row up to which a rank can undo a step: only forwards whose inputs were made before rollback points come before it.

    `coming` are the messages that other ranks send before their rollback points and this rank does not use before its own. They are in an
    order in which all ranks can wait for them without deadlock.
    """

    position: int
    coming: tuple[Value, ...]


def with_rollback_points(program: Program) -> tuple[Program, tuple[RollbackPoint, ...]]:
    """Return `program` with its receives moved to the correct side of the rollback points, and the rollback point of each rank.

    Receives of messages that are sent before the sender's rollback point are posted before the receiver's, and all others after it. The
    rollback point of the last rank is the start of its row. No loss is computed before a rollback point.
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
    moved = replace(program, rows=tuple(rows))
    return moved, _rollback_points(moved, positions)


def _ready(program: Program) -> dict[Value, tuple[int, int]]:
    """Return the rank and position at which each value becomes available: where it is sent, or made if it is not sent."""
    ready: dict[Value, tuple[int, int]] = {}
    for rank, row in enumerate(program.rows):
        for position, action in enumerate(row):
            if isinstance(action, Compute):
                ready.update((value, (rank, position)) for value in program.makes(action.step))
            elif isinstance(action, Send):
                ready[action.value] = (rank, position)
    return ready


def _points(program: Program, ready: dict[Value, tuple[int, int]]) -> list[int]:
    """Return the rollback point of each row: its first pass that is not a plain forward, moved earlier until the forwards are closed.

    Moving one point earlier can exclude an input of a forward on another rank, so the rule is applied until nothing changes.
    """
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
    forwards = kinds_making(ValueKind.ACTIVATION)
    return all(op.kind in forwards and op.stage < num_stages - 1 for op in action.step)


def _rollback_points(program: Program, positions: list[int]) -> tuple[RollbackPoint, ...]:
    order = _sent_before(program, positions)
    points = []
    for row, position in zip(program.rows, positions, strict=True):
        used = {value for action in row[:position] if isinstance(action, Compute) for value in program.uses(action.step)}
        left = {action.value for action in row[:position] if isinstance(action, Recv)} - used
        points.append(RollbackPoint(position, tuple(value for value in order if value in left)))
    return tuple(points)


def _sent_before(program: Program, points: list[int]) -> list[Value]:
    """Return the messages sent before rollback points, in the order of a run of these parts of the rows.

    If each rank waits for its messages in this order, no two ranks can wait for each other.
    """
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
