"""PyTorch's schedule CSV with messages and weights: no deadlock, no gather too early, and every corrupt cell is named."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.pure.problems import schedules
from tests.pure.shapes import IN_TORCH_CSV, TRAINING, grid
from tests.refusals import Stated, raises, states
from tests.thinned import every
from zerobubble.errors import InputError, ParseError, ScheduleError
from zerobubble.export.torch_cells import Cell, MessageEnd, WeightAction, Weights, parse_cell
from zerobubble.export.torch_comms import to_torch_comms_csv
from zerobubble.export.torch_csv import from_torch_csv, to_torch_csv
from zerobubble.ir import Kind, Schedule
from zerobubble.lowering import lower
from zerobubble.program import Send
from zerobubble.rules import ValueKind
from zerobubble.schedules import SCHEDULES, make
from zerobubble.verify import schedule_faults

GRID = [(1, 1), (2, 2), (3, 7), (4, 8), (8, 5)]
CASES = [(name, p, m) for name in IN_TORCH_CSV for p, m in grid(name, SCHEDULES[name].stages_per_rank, GRID)]


def cells(csv: str) -> list[list[Cell]]:
    return [[parse_cell(cell) for cell in line.split(",")] for line in csv.splitlines()]


def met(end: Cell) -> Cell:
    """The other end of a message, for stages in a row (an independent statement of what the CSV means to PyTorch)."""
    assert isinstance(end, MessageEnd)
    hop = 1 if end.is_send is (end.value_kind is ValueKind.ACTIVATION) else -1
    return MessageEnd(not end.is_send, end.value_kind, end.stage + hop, end.microbatch)


def runs_without_a_buffer(rows: list[list[Cell]]) -> bool:
    """Whether all rows end where both ends of a message wait for each other and nothing of a rank overtakes anything."""
    home = {cell: rank for rank, row in enumerate(rows) for cell in row if isinstance(cell, MessageEnd)}
    left, moved = [list(row) for row in rows], True
    while moved:
        moved = False
        for row in left:
            while row and not isinstance(row[0], MessageEnd):
                row.pop(0)
                moved = True
            if row and left[home[met(row[0])]][:1] == [met(row[0])]:
                left[home[met(row[0])]].pop(0)
                row.pop(0)
                moved = True
    return not any(left)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), every(4, CASES))
def test_what_was_written_is_read_back_and_cannot_stop(name: str, ranks: int, microbatches: int) -> None:
    schedule = make(name, ranks, microbatches)
    csv = to_torch_comms_csv(schedule, "2.13")
    assert from_torch_csv(csv, name).steps == schedule.steps
    assert from_torch_csv(to_torch_comms_csv(schedule, "2.13", 2), name).steps == schedule.steps
    assert runs_without_a_buffer(cells(csv))
    sends = sum(isinstance(action, Send) for row in lower(schedule).rows for action in row)
    assert csv.count("SEND") == csv.count("RECV") == sends


def renumbered(schedule: Schedule) -> Schedule:
    """The schedule with its microbatches numbered in the order in which the last stage runs them forward."""
    forwards = (op for _, _, op in schedule.ops() if op.kind is Kind.F and op.stage == schedule.num_stages - 1)
    number = {op.microbatch: place for place, op in enumerate(forwards)}
    rows = [[tuple(op._replace(microbatch=number[op.microbatch]) for op in step) for step in row] for row in schedule.steps]
    return Schedule.of_steps(*schedule.header[:3], rows)


@pytest.mark.long
@given(schedules(), st.integers(0, 3))
def test_random_schedules_are_read_back_and_cannot_stop(schedule: Schedule, unsharded: int) -> None:
    assume(len(schedule.placement.routes) == 1)
    schedule = renumbered(schedule)
    csv = to_torch_comms_csv(schedule, "2.13", unsharded)
    back = from_torch_csv(csv, schedule.name)
    assert (back.steps, back.placement.routes) == (schedule.steps, schedule.placement.routes)
    assert runs_without_a_buffer(cells(csv))


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in IN_TORCH_CSV if name in TRAINING])
def test_at_most_so_many_stages_are_gathered_and_reduced_after_their_last_backward(name: str, most: int) -> None:
    schedule = make(name, 2, 4)
    for rank, row in enumerate(cells(to_torch_comms_csv(schedule, "2.13", most))):
        gathered: set[int] = set()
        reduced: list[int] = []
        largest = 0
        for cell in row:
            if isinstance(cell, Weights) and cell.action is WeightAction.REDUCE_GRAD:
                reduced.append(cell.stage)
            elif isinstance(cell, Weights):
                gathered ^= {cell.stage}
                largest = max(largest, len(gathered))
            elif not isinstance(cell, MessageEnd):
                stages = {op.stage for op in cell}
                assert stages <= gathered
                assert not stages & set(reduced)
                assert len(gathered) <= max(most, len(stages))
        assert largest == min(max(most, max(map(len, schedule.steps[rank]))), len(schedule.placement.stages(rank)))
        assert not gathered
        assert sorted(reduced) == [stage for _, stage in schedule.placement.stages(rank)]


def test_a_small_one_to_read() -> None:
    assert to_torch_comms_csv(make("zb-h1", 2, 2), "2.13", 1) == (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1UNSHARD,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,1RESHARD\n"
    )


def test_a_small_one_with_waits_to_read() -> None:
    assert to_torch_comms_csv(make("zb-h1", 2, 2), "2.15.0+cpu", 1) == (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0WAIT_SEND_F0,0W0,0RECV_B1,0I1,0WAIT_SEND_F1,0W1,"
        "0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1UNSHARD,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,"
        "1WAIT_SEND_B0,1WAIT_SEND_B1,1RESHARD\n"
    )


@pytest.mark.parametrize("name", IN_TORCH_CSV)
def test_every_send_and_every_reduction_is_waited_for_once(name: str) -> None:
    schedule = make(name, 4, 8)
    csv = to_torch_comms_csv(schedule, "2.15", 2)
    assert from_torch_csv(csv, name).steps == schedule.steps
    rows = [line.split(",") for line in csv.splitlines()]
    older = [line.split(",") for line in to_torch_comms_csv(schedule, "2.14", 2).splitlines()]
    assert [[cell for cell in row if "WAIT_" not in cell] for row in rows] == older
    for row in rows:
        for what, wait in (("SEND_F", "WAIT_SEND_F"), ("SEND_B", "WAIT_SEND_B"), ("REDUCE_GRAD", "WAIT_REDUCE_GRAD")):
            begun = [place for place, cell in enumerate(row) if re.fullmatch(rf"[0-9]+{what}[0-9]*", cell)]
            assert len(begun) == sum(wait in cell for cell in row)
            assert all(row.index(row[place].replace(what, wait)) > place for place in begun)


GOOD = to_torch_comms_csv(make("1f1b", 2, 2), "2.13", 1)
LOOPED = to_torch_comms_csv(make("interleaved-1f1b", 2, 2), "2.13")
WAITING = to_torch_comms_csv(make("interleaved-1f1b", 2, 2), "2.15")


@pytest.mark.parametrize(
    ("text", "old", "new", "stated", "why"),
    [
        (GOOD, "0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0", ("line 2", "cell 1"), ("0SEND_F1", "1RECV_F0")),
        (GOOD, "0SEND_F1,", "", ("line 2", "cell 4"), ("a0.1", "received", "never")),
        (GOOD, "1RECV_F1,", "", ("line 1", "cell 5"), ("a0.1", "received", "never")),
        (GOOD, "0SEND_F1", "0SEND_F1,0SEND_F1", ("line 1", "cell 5"), ("a0.1", "received", "twice")),
        (GOOD, "0F0,0SEND_F0", "0SEND_F0,0F0", ("line 1", "cell 2"), ("a0.0", "rank")),
        (GOOD, "1RECV_F0,1UNSHARD,1F0", "1UNSHARD,1F0,1RECV_F0", ("line 2", "cell 2"), ("a0.0", "rank")),
        (GOOD, "0SEND_F1", "0SEND_F1,0SEND_B1", ("line 1", "cell 6"), ("0SEND_B1", "message")),
        (GOOD, "1SEND_B1", "1SEND_B1,1SEND_F1", ("line 2", "cell 10"), ("1SEND_F1", "message")),
        (GOOD, "0SEND_F1", "0SEND_F1,5RECV_F1", ("line 1", "cell 6"), ("5RECV_F1", "message")),
        (GOOD, "0F0,0SEND_F0,", "0F0,1SEND_B0,0SEND_F0,", ("line 1", "cell 3"), ("g1.0", "received", "never")),
        (GOOD, "0UNSHARD,", "", ("line 1", "cell 1"), ("stage 0", "0UNSHARD")),
        (GOOD, "0UNSHARD", "0UNSHARD,0UNSHARD", ("line 1", "cell 2"), ("0UNSHARD", "gathered", "already")),
        (GOOD, "0UNSHARD", "0UNSHARD,1UNSHARD", ("line 1", "cell 2"), ("1UNSHARD", "remove")),
        (GOOD, "0UNSHARD", "0UNSHARD,1RESHARD", ("line 1", "cell 2"), ("1RESHARD", "gathered", "remove")),
        (GOOD, ",0RESHARD", "", ("line 1", "cell 1"), ("stage 0", "gathered", "0RESHARD")),
        (GOOD, "0REDUCE_GRAD,", "", ("line 1", "cell 9"), ("stage 0", "averaged", "0REDUCE_GRAD")),
        (GOOD, "0REDUCE_GRAD", "0REDUCE_GRAD,0REDUCE_GRAD", ("line 1", "cell 11"), ("0REDUCE_GRAD", "gradients")),
        (GOOD, "0REDUCE_GRAD", "0REDUCE_GRAD,1REDUCE_GRAD", ("line 1", "cell 11"), ("1REDUCE_GRAD", "gradients")),
        (
            GOOD,
            "0RECV_B1,0B1,0REDUCE_GRAD",
            "0REDUCE_GRAD,0RECV_B1,0B1",
            ("line 1", "cell 8"),
            ("cell 10", "stage"),
        ),
        (WAITING, "0WAIT_SEND_F1,", "", ("line 1", "cell 5"), ("0WAIT_SEND_F1", "nothing")),
        (WAITING, "0SEND_F0,", "0WAIT_SEND_F0,0SEND_F0,", ("line 1", "cell 2"), ("0WAIT_SEND_F0", "message")),
        (WAITING, "2WAIT_REDUCE_GRAD,", "", ("line 1",), ("0REDUCE_GRAD", "2REDUCE_GRAD")),
        (WAITING, "2REDUCE_GRAD,2WAIT_REDUCE_GRAD,", "2WAIT_REDUCE_GRAD,2REDUCE_GRAD,", ("line 1",), ("stage 2", "reduction")),
        (WAITING, ",0WAIT_REDUCE_GRAD", "", ("line 1",), ("0REDUCE_GRAD", "0WAIT_REDUCE_GRAD")),
        (LOOPED, "2RECV_F1,2SEND_F0", "2SEND_F0,2RECV_F1", ("line 1", "cell 7"), ("rank 0", "messages")),
    ],
)
def test_a_spoilt_csv_is_refused_with_its_place(text: str, old: str, new: str, stated: Stated, why: Stated) -> None:
    assert text.count(old) == 1
    spoilt = text.replace(old, new)
    with raises(ParseError, *stated) as refusal:
        from_torch_csv(spoilt)
    states(refusal.value, *why)


def test_an_earlier_receive_is_no_fault() -> None:
    spoilt = LOOPED.replace("1SEND_B0,1RECV_B1", "1RECV_B1,1SEND_B0")
    assert spoilt != LOOPED
    assert from_torch_csv(spoilt).steps == from_torch_csv(LOOPED).steps


def test_activations_and_gradients_between_two_ranks_share_one_order() -> None:
    early = LOOPED.replace(",1RECV_B0", "").replace("3RECV_F1", "1RECV_B0,3RECV_F1")
    with raises(ParseError, "line 2", "cell 9", "rank 0", "rank 1", "2SEND_F1", "1RECV_B0"):
        from_torch_csv(early)


def test_an_illegal_schedule_is_left_to_its_own_faults() -> None:
    schedule = from_torch_csv(GOOD.replace("1F0,1RECV_F1,1B0", "1B0,1RECV_F1,1F0"))
    assert [fault.code for fault in schedule_faults(schedule)] == ["order"]


def test_passes_alone_need_no_message() -> None:
    schedule = make("1f1b", 2, 2)
    assert from_torch_csv(to_torch_csv(schedule), "1f1b") == schedule
    with raises(ParseError, "line 1", "cell 4", "0B0", "g1.0"):
        from_torch_csv(to_torch_csv(schedule).replace("0F0,", "0UNSHARD,0F0,").replace("0B1", "0B1,0RESHARD"))


def test_what_cannot_be_written_is_refused() -> None:
    with raises(InputError, "chimera", "2 routes"):
        to_torch_comms_csv(make("chimera", 2, 2), "2.13")
    with raises(InputError, argument="unsharded", got=-1):
        to_torch_comms_csv(make("1f1b", 2, 2), "2.13", -1)
    with raises(InputError, "torch", "version", "newest"):
        to_torch_comms_csv(make("1f1b", 2, 2), "newest")
    with raises(ScheduleError, "0BW1"):
        to_torch_comms_csv(from_torch_csv("0F0,0F1,0B0\n"), "2.13")
