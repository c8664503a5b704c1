"""Faults: none in a legal schedule, and the right one, in the right place, for each way to break it.

A schedule has no fault exactly if it runs, compared with a slow implementation of the papers' rules.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.pure.problems import BW, B, F, edited, needs, problems, schedules, slow_ends, with_rows
from tests.refusals import states
from zerobubble import Costs, Op, Placement, Schedule, ScheduleError, make, schedule_faults, simulate
from zerobubble.errors import Fault
from zerobubble.recognition import recognize

ROOTS = ("count", "stage-range", "microbatch-range", "wrong-rank", "duplicate", "missing", "conflict", "order", "deadlock")
"""Codes, causes before what follows from them."""

Cell = tuple[int, int, Op]


@given(schedules())
def test_legal_schedules_have_no_fault(schedule: Schedule) -> None:
    assert schedule_faults(schedule) == ()
    assert schedule_faults(schedule.forward_only()) == ()


@given(schedules(), st.data())
def test_a_dropped_pass_is_missing(schedule: Schedule, data: st.DataObject) -> None:
    rank, position, op = pick(schedule, data)
    row = schedule.rows[rank]
    broken = edited(schedule, rank, row[:position] + row[position + 1 :])
    assume(not broken.is_forward_only)
    (fault,) = schedule_faults(broken)
    assert (fault.code, fault.rank, fault.op) == ("missing", rank, str(op))
    assert f"lacks {op}, so " in fault.message


@given(schedules(), st.data())
def test_a_repeated_pass_is_a_duplicate(schedule: Schedule, data: st.DataObject) -> None:
    rank, position, op = pick(schedule, data)
    row = schedule.rows[rank]
    again = data.draw(st.integers(position + 1, len(row)))
    (fault,) = schedule_faults(edited(schedule, rank, (*row[:again], op, *row[again:])))
    assert (fault.code, fault.rank, fault.position, fault.op) == ("duplicate", rank, again, str(op))
    assert fault.message.endswith(f"but it already ran at rank {rank} position {position}: remove one")


@given(schedules(), st.data())
def test_a_pass_on_another_rank_is_sent_home(schedule: Schedule, data: st.DataObject) -> None:
    assume(schedule.num_ranks > 1)
    rank, position, op = pick(schedule, data)
    other = data.draw(st.integers(0, schedule.num_ranks - 1).filter(lambda r: r != rank))
    row, there = schedule.rows[rank], schedule.rows[other]
    at = data.draw(st.integers(0, len(there)))
    moved = edited(edited(schedule, rank, row[:position] + row[position + 1 :]), other, (*there[:at], op, *there[at:]))
    fault = schedule_faults(moved)[0]
    assert (fault.code, fault.rank, fault.position, fault.op) == ("wrong-rank", other, at, str(op))
    assert fault.message.endswith(f"but stage {op.stage} is on rank {rank}: move it there")


@given(schedules(), st.data())
def test_a_fused_backward_cut_short_lacks_its_weight_pass(schedule: Schedule, data: st.DataObject) -> None:
    fused = [cell for cell in schedule.ops() if cell[2].kind is BW]
    assume(fused)
    rank, position, op = data.draw(st.sampled_from(fused))
    row = list(schedule.rows[rank])
    row[position] = op._replace(kind=B)
    (fault,) = schedule_faults(edited(schedule, rank, row))
    assert (fault.code, fault.rank, fault.op) == ("missing", rank, f"{op.stage}W{op.microbatch}")


@given(schedules(), st.data())
def test_a_pass_before_its_need_is_out_of_order(schedule: Schedule, data: st.DataObject) -> None:
    pairs = [pair for rank in range(schedule.num_ranks) for pair in dependent_pairs(schedule, rank)]
    assume(pairs)
    rank, early, late = data.draw(st.sampled_from(pairs))
    row = list(schedule.rows[rank])
    row[early], row[late] = row[late], row[early]
    faults = schedule_faults(edited(schedule, rank, row))
    named = [(f.code, f.rank, f.position, f.op) for f in faults]
    assert ("order", rank, early, str(row[early])) in named
    assert [fault.code for fault in faults] == sorted((fault.code for fault in faults), key=ROOTS.index)


def dependent_pairs(schedule: Schedule, rank: int) -> list[tuple[int, int, int]]:
    """(rank, position, later position) where the later pass needs the earlier."""
    present = {op for _, _, op in schedule.ops()}
    place = {op: position for position, op in enumerate(schedule.rows[rank])}
    rows = [(late, place[need]) for op, late in place.items() for need in needs(op, present, schedule.num_stages) if need in place]
    return [(rank, early, late) for late, early in rows]


def pick(schedule: Schedule, data: st.DataObject) -> Cell:
    return data.draw(st.sampled_from(list(schedule.ops())))


@given(problems(), st.data())
def test_no_faults_means_it_runs_and_faults_mean_it_does_not(problem: tuple[Schedule, Costs], data: st.DataObject) -> None:
    schedule, costs = problem
    broken = disturbed(schedule, random.Random(data.draw(st.integers(0, 1 << 32))))
    faults = schedule_faults(broken)
    assert (slow_ends(broken, costs) is None) == bool(faults)
    assert [fault.code for fault in faults if fault.code in ("order", "deadlock")] == sorted(
        (fault.code for fault in faults if fault.code in ("order", "deadlock")), key=ROOTS.index
    )
    if not faults:
        simulate(broken, costs)
        return
    with pytest.raises(ScheduleError) as caught:
        simulate(broken, costs)
    assert caught.value.faults == faults


def disturbed(schedule: Schedule, dice: random.Random) -> Schedule:
    """The schedule after a few random edits, some of which may undo or outweigh each other."""
    rows = [list(row) for row in schedule.rows]
    for _ in range(dice.randint(1, 3)):
        row = dice.choice([row for row in rows if row] or [[Op(F, 0, 0)]])
        at, to = dice.randrange(len(row)), dice.randrange(len(row))
        op = row.pop(at)
        edit = dice.choice(("move", "move", "move", "drop", "change", "give"))
        if edit == "move":
            row.insert(to, op)
        elif edit == "change":
            stage = max(op.stage + dice.choice((0, 0, 1, -1)), 0)
            row.insert(at, Op(dice.choice((F, B, BW)), stage, op.microbatch + dice.choice((0, 0, 1))))
        elif edit == "give":
            dice.choice(rows).append(op)
    return with_rows(schedule, rows)


def faults_of(text: str, placement: str = "linear: 0 1", microbatches: int = 1) -> list[Fault]:
    head = f"zerobubble schedule 1\nname x\nplacement {placement}\nmicrobatches {microbatches}\n"
    return list(schedule_faults(Schedule.from_text(head + text)))


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("rank 0: 0F0 0BW0 5F0\nrank 1: 1F0 1BW0", "stage-range", "rank 0 runs 5F0 at position 2, but the placement has only stages 0 to "
         "1: place stage 5 or remove the pass"),
        ("rank 0: 0F0 0BW0 0F1\nrank 1: 1F0 1BW0", "microbatch-range", "rank 0 runs 0F1 at position 2, but there are only microbatches "
         "0 to 0: declare more or remove the pass"),
        ("rank 0: 0F0 0BW0 1F0\nrank 1: 1BW0", "wrong-rank", "rank 0 runs 1F0 at position 2, but stage 1 is on rank 1: move it there"),
        ("rank 0: 0F0 0BW0 0F0\nrank 1: 1F0 1BW0", "duplicate", "rank 0 runs 0F0 at position 2, but it already ran at rank 0 position 0: "
         "remove one"),
        ("rank 0: 0F0 0B0\nrank 1: 1F0 1BW0", "missing", "stage 0, microbatch 0 on rank 0 lacks 0W0, so its weight gradient is lost: add "
         "it to the row"),
        ("rank 0: 0F0 0W0\nrank 1: 1F0 1BW0", "missing", "stage 0, microbatch 0 on rank 0 lacks 0B0, so no gradient flows back: add it to "
         "the row"),
        ("rank 0: 0W0\nrank 1: 1F0 1BW0", "missing", "stage 0, microbatch 0 on rank 0 lacks 0F0 and 0B0, so nothing is computed: add it to "
         "the row"),
        ("rank 0: 0F0\nrank 1: 1F0 1BW0", "missing", "stage 0, microbatch 0 on rank 0 lacks 0BW0, so no gradient flows back: add it to the "
         "row"),
        ("rank 0: 0F0 0BW0 0W0\nrank 1: 1F0 1BW0", "conflict", "stage 0, microbatch 0 on rank 0 has 0BW0 and 0W0: BW is B and W in one, "
         "so keep either BW or the pair"),
        ("rank 0: 0F0 0W0 0B0\nrank 1: 1F0 1BW0", "order", "rank 0 runs 0W0 at position 1 before 0B0 at position 2, whose result it uses: "
         "move 0B0 earlier"),
        ("rank 0: 0F0 0BW0\nrank 1: 1F0&1BW0", "overlap", "rank 1 runs 1F0 at position 0 overlapped with 1BW0, which uses its result: run "
         "1BW0 after it"),
        ("rank 0:\nrank 1:", "count", "the number of microbatches is 1, but the rows have only 0 passes: correct it or add the passes"),
    ],
)  # fmt: skip
def test_sentences(text: str, code: str, message: str) -> None:
    fault = faults_of(text)[0]
    assert (fault.code, str(fault)) == (code, message)


def test_the_forward_of_an_overlapped_step_is_written_first() -> None:
    (fault,) = faults_of("rank 0: 0F0 0BW0&0F1 0BW1\nrank 1: 1F0 1BW0 1F1 1BW1", microbatches=2)
    states(str(fault), "rank 0", "0BW0", "position 1", "0F1", "0F1&0BW0")


def test_overlapped_passes_wait_for_each_others_needs() -> None:
    """Apart, rank 0 would send the activation that the gradient it waits for depends on."""
    apart, together = "rank 0: 0F0 0F1 0BW0 0BW1\nrank 1: 1F0 1F1 1BW1 1BW0", "rank 0: 0F0 0F1&0BW0 0BW1\nrank 1: 1F0 1F1 1BW1 1BW0"
    assert faults_of(apart, microbatches=2) == []
    (fault,) = faults_of(together, microbatches=2)
    states(fault.message, "rank 0", "0F1", "rank 1", "1BW0", "1F1")


def test_a_circle_of_waiting_is_reported_from_its_first_rank() -> None:
    (fault,) = faults_of("rank 0: 0F0 0BW0 0F1 0BW1\nrank 1: 1F1 1F0 1BW0 1BW1", microbatches=2)
    states(str(fault), "rank 0", "0BW0", "rank 1", "1BW0", "1F1", "0F1")
    assert (fault.code, fault.rank, fault.position, fault.op) == ("deadlock", 0, 1, "0BW0")


def test_two_circles_are_two_faults() -> None:
    text = "rank 0: 0F0 0BW0 0F1 0BW1\nrank 1: 1F1 1F0 1BW0 1BW1\nrank 2: 0F2 0BW2 0F3 0BW3\nrank 3: 1F3 1F2 1BW2 1BW3"
    faults = faults_of("routes 0 0 1 1\n" + text, "custom: 0 1 | 2 3", 4)
    assert [(fault.code, fault.rank) for fault in faults] == [("deadlock", 0), ("deadlock", 2)]


def test_a_conflict_names_the_backwards_to_choose_from() -> None:
    (fault,) = faults_of("rank 0: 0F0 0B0 0W0 0BW0\nrank 1: 1F0 1BW0")
    assert (fault.code, fault.rank, fault.op) == ("conflict", 0, "0BW0 and 0B0 and 0W0")


def test_a_conflict_of_other_kinds_names_those_present() -> None:
    fault = faults_of("rank 0: 0F0 0S0 0SL0 0BW0 0T0", "linear: 0")[0]
    assert (fault.code, fault.rank, fault.op) == ("conflict", 0, "0F0 and 0BW0 and 0S0 and 0T0 and 0SL0")
    states(fault.message, "F B W", "F BW", "F BW R")


def test_the_microbatch_whose_head_is_divided_by_another_algorithm_is_at_fault() -> None:
    usual = " ".join(f"0F{j} 0S{j} 0BW{j} 0T{j}" for j in range(2))
    (fault,) = faults_of(f"rank 0: {usual} 0F2 0SL2 0TX2 0BW2", "linear: 0", microbatches=3)
    assert (fault.code, fault.rank) == ("head", 0)
    states(fault.message, "microbatch 2", "0SL2", "0TX2", "S", "T", "stages 0")


def test_an_impossible_number_of_microbatches_is_one_fault() -> None:
    (fault,) = schedule_faults(replace(make("1f1b", 2, 2), num_microbatches=10**12))
    assert fault.code == "count"


def test_an_error_shows_twenty_faults_and_counts_the_rest() -> None:
    schedule = replace(make("1f1b", 4, 20), rows=((Op(F, 0, 0),) * 30, (), (), ()))
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, Costs.uniform(4))
    shown = str(caught.value).splitlines()
    assert len(shown) == 22
    assert shown[-1] == f"  ... and {len(caught.value.faults) - 20} more"


def test_as_many_stages_as_microbatches_are_not_taken_for_each_other() -> None:
    """Every kind and microbatch of the row has two passes, as it should, but those of stage 1 are at a stage that there is not."""
    text = "zerobubble schedule 1\nplacement linear: 0 0\nmicrobatches 2\nrank 0: 0F0 {0}F0 0F1 {0}F1 {0}BW0 0BW0 {0}BW1 0BW1\n"
    schedule = Schedule.from_text(text.format(1))
    assert schedule_faults(schedule) == ()
    wrong = tuple(Op(op.kind, 2 * op.stage, op.microbatch) for op in schedule.rows[0])
    assert {fault.code for fault in schedule_faults(with_rows(schedule, (wrong,)))} == {"stage-range"}


def test_passes_that_are_far_too_few_are_one_fault() -> None:
    stages, microbatches = 300, 200
    row = [Op(F, stage, 0) for stage in range(stages)] + [Op(F, 0, microbatch) for microbatch in range(1, microbatches)]
    schedule = Schedule("few", Placement.custom([0] * stages), microbatches, [row])
    (fault,) = schedule_faults(schedule)
    assert fault.code == "count"
    assert not recognize(schedule).name
