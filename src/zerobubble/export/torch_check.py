"""Checks that the messages and weight operations in PyTorch's schedule CSV match its passes.

PyTorch does not check this. It runs a CSV with swapped sends and computes wrong gradients without an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from zerobubble.errors import Fault, ParseError
from zerobubble.export.torch_cells import Cell, MessageEnd, SendWait, WeightAction, Weights, cell_text
from zerobubble.ir import Schedule, Step
from zerobubble.kinds import traits_of
from zerobubble.program import Action, Compute, Free, Program, Recv, Send
from zerobubble.rules import SENT_BETWEEN_STAGES, Value, uses
from zerobubble.verify import schedule_faults
from zerobubble.verify_program import program_faults

Cells = dict[int, Cell]
"""The cells of a row by their position in the line, counted from 1."""


def steps_of(cells: Cells) -> list[Step]:
    """Return the steps among the cells."""
    return [cell for cell in cells.values() if not isinstance(cell, (MessageEnd, SendWait, Weights))]


def check_comms(schedule: Schedule, rows: Sequence[Cells]) -> None:
    """Raise `ParseError` naming line and cell if messages or weight operations do not match the passes of a legal `schedule`.

    A CSV with passes only needs no check, and an illegal schedule is left to `schedule_faults`.
    """
    if all(len(steps_of(row)) == len(row) for row in rows) or schedule_faults(schedule):
        return
    reduces = any(isinstance(cell, Weights) and cell.action is WeightAction.REDUCE_GRAD for row in rows for cell in row.values())
    for line, row in enumerate(rows, 1):
        for place, wrong in (*_gather_faults(row), *(_reduce_faults(row) if reduces else ()), *_reduction_wait_faults(row)):
            raise _error(line, place, wrong)
    _check_messages(schedule, rows)


def _error(line: int, place: int, message: str) -> ParseError:
    return ParseError("line {line}, cell {place}: {fault}", line=line, place=place, fault=message)


def _stages(step: Step) -> set[int]:
    return {op.stage for op in step}


def _gather_faults(row: Cells) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with UNSHARD and RESHARD in a row, by position. In a row without them, weights are always available."""
    held = set[int]().union(*map(_stages, steps_of(row)))
    gathers = any(isinstance(cell, Weights) and cell.action in (WeightAction.UNSHARD, WeightAction.RESHARD) for cell in row.values())
    gathered: dict[int, int] = {}
    for place, cell in row.items():
        match cell:
            case Weights(WeightAction.UNSHARD, stage):
                if stage in gathered or stage not in held:
                    yield place, f"{cell}, but {'they are already gathered' if stage in held else 'no pass here needs them'}; remove it"
                gathered[stage] = place
            case Weights(WeightAction.RESHARD, stage):
                if gathered.pop(stage, None) is None:
                    yield place, f"{cell}, but these weights are not gathered; remove it"
            case Weights() | MessageEnd() | SendWait():
                pass
            case step if gathers and (absent := _stages(step) - gathered.keys()):
                yield place, f"the weights of stage {min(absent)} are not gathered here; write {min(absent)}UNSHARD before"
    for stage, place in gathered.items():
        yield place, f"the weights of stage {stage} stay gathered, so the next step cannot gather them; end the row with {stage}RESHARD"


def _reduce_faults(row: Cells) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with REDUCE_GRAD in a row, by position.

    If any stage has one, all need one, since REDUCE_GRAD also divides the gradients by the number of microbatches.
    """
    passes = ((place, cell) for place, cell in row.items() if not isinstance(cell, (MessageEnd, SendWait, Weights)))
    last = {op.stage: place for place, step in passes for op in step if traits_of(op.kind).adds_gradients}
    reduced: set[int] = set()
    for place, cell in row.items():
        if isinstance(cell, Weights) and cell.action is WeightAction.REDUCE_GRAD:
            if cell.stage in reduced or cell.stage not in last:
                yield place, f"{cell}, but stage {cell.stage} has no gradients left here to reduce; remove it"
            elif place < last[cell.stage]:
                yield place, f"{cell} comes before the last backward of its stage, in cell {last[cell.stage]}; move it after that"
            reduced.add(cell.stage)
    for stage in last.keys() - reduced:
        yield last[stage], f"the gradients of stage {stage} are not averaged over microbatches; write {stage}REDUCE_GRAD after it"


def _reduction_wait_faults(row: Cells) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with WAIT_REDUCE_GRAD in a row, by position. If there is any, each reduction needs a wait before the next one."""
    cells = {place: cell for place, cell in row.items() if isinstance(cell, Weights)}
    if all(cell.action is not WeightAction.WAIT_REDUCE_GRAD for cell in cells.values()):
        return
    pending: Weights | None = None
    for place, cell in cells.items():
        if cell.action is WeightAction.REDUCE_GRAD:
            if pending is not None:
                yield place, f"{cell} begins while {pending} is not waited for; write {pending.stage}WAIT_REDUCE_GRAD before it"
            pending = cell
        elif cell.action is WeightAction.WAIT_REDUCE_GRAD:
            if pending is None or pending.stage != cell.stage:
                yield place, f"{cell}, but no reduction of stage {cell.stage} is in progress here; move it after {cell.stage}REDUCE_GRAD"
            pending = None
    if pending is not None:
        yield max(cells), f"{pending} is never waited for; end the row with {pending.stage}WAIT_REDUCE_GRAD"


Placed = list[tuple[int, Action]]
"""The actions of a rank, each with the position of its cell."""


def _check_messages(schedule: Schedule, rows: Sequence[Cells]) -> None:
    ends = _ends(schedule)
    waits = any(isinstance(cell, SendWait) for row in rows for cell in row.values())
    actions = [_actions(rank, row, ends, waits=waits) for rank, row in enumerate(rows)]
    _check_order(rows, actions)
    program = Program(*schedule.header[:3], tuple(tuple(action for _, action in row) for row in actions))
    _check_send_waits(actions)
    faults = [fault for fault in program_faults(program) if fault.code != "leak"]
    if faults:
        rank, place = _where(faults[0], actions)
        raise _error(rank + 1, place, f"{cell_text(rows[rank][place])}: {_reason(faults[0])}")


def _check_send_waits(actions: Sequence[Placed]) -> None:
    """Raise `ParseError` for a send without a wait, if the CSV has waits, and for a wait before its send."""
    for rank, row in enumerate(actions):
        sent: dict[Value, int] = {}
        for place, action in row:
            if isinstance(action, Send):
                sent[action.value] = place
            elif isinstance(action, Free) and sent.pop(action.value, None) is None:
                wait = SendWait(*action.value)
                raise _error(rank + 1, place, f"{wait}, but that message is not in progress here; write one {wait}, after its send")
        for value, place in sent.items():
            raise _error(rank + 1, place, f"nothing waits for this send; write {SendWait(*value)} after it, where it must have arrived")


def _ends(schedule: Schedule) -> dict[MessageEnd, tuple[Value, int]]:
    """Return both ends of every message between ranks, each with its value and the other rank."""
    ends = {}
    home = schedule.placement.routes[0]
    for rank, _, op in schedule.ops():
        for value in uses(op, schedule.num_stages):
            if value.value_kind in SENT_BETWEEN_STAGES and home[value.stage] != rank:
                ends[MessageEnd(True, *value)] = value, rank
                ends[MessageEnd(False, value.value_kind, op.stage, op.microbatch)] = value, home[value.stage]
    return ends


def _actions(rank: int, row: Cells, ends: dict[MessageEnd, tuple[Value, int]], *, waits: bool) -> Placed:
    """Return the row as actions of a program. A message is freed where the CSV waits for its send, or right after it without `waits`."""
    placed: Placed = []
    for place, cell in row.items():
        if isinstance(cell, MessageEnd):
            if cell not in ends:
                raise _error(rank + 1, place, f"{cell} is not a message between passes of two ranks; remove it")
            value, peer = ends[cell]
            placed.append((place, Send(value, peer) if cell.is_send else Recv(value, peer)))
            if cell.is_send and not waits:
                placed.append((place, Free(value)))
        elif isinstance(cell, SendWait):
            placed.append((place, Free(Value(*cell))))
        elif not isinstance(cell, Weights):
            placed.append((place, Compute(cell)))
    return placed


def _check_order(rows: Sequence[Cells], actions: Sequence[Placed]) -> None:
    """Raise `ParseError` if sends and receives are in different orders; PyTorch matches messages between two ranks by order alone."""
    pairs: dict[tuple[int, int], tuple[dict[Value, int], dict[Value, int]]] = defaultdict(lambda: ({}, {}))
    for rank, row in enumerate(actions):
        for place, action in row:
            if isinstance(action, Send):
                pairs[rank, action.peer][0][action.value] = place
            elif isinstance(action, Recv):
                pairs[action.peer, rank][1][action.value] = place
    for (source, destination), (sent, received) in sorted(pairs.items()):
        if sent.keys() == received.keys():
            for (out, at), (came, place) in zip(sent.items(), received.items(), strict=True):
                if out != came:
                    cells = f"{rows[source][at]} is sent when {rows[destination][place]} is expected"
                    order = f"PyTorch matches the messages from rank {source} to rank {destination} by order alone"
                    raise _error(destination + 1, place, f"{order}, but {cells}; put the receives in the order of the sends")


def _where(fault: Fault, actions: Sequence[Placed]) -> tuple[int, int]:
    """Return the rank and the position of the cell of a fault, or of the message that it names."""
    if fault.rank is not None and fault.position is not None:
        return fault.rank, actions[fault.rank][fault.position][0]
    named = ((rank, place) for rank, row in enumerate(actions) for place, action in row if str(getattr(action, "value", "")) == fault.op)
    return next(named)


def _reason(fault: Fault) -> str:
    """Return the message of a fault without the position of its action, which the CSV does not have."""
    return fault.message.partition(": ")[2] if fault.code in ("not-there", "use-after-free", "double-free") else fault.message
