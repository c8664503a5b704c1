"""Lowering: programs are sound under every message model, and each way to break one has its fault.

Programs are sound with eager and with rendezvous messages. A malformed form is an `InputError` and nothing else.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.pure.problems import edited, schedules
from tests.pure.shapes import EVERY, SMALL, grid
from tests.refusals import Stated, raises, states
from tests.thinned import every_and_all
from zerobubble import Costs, InputError, Placement, Program, Schedule, ScheduleError, lower, make, simulate
from zerobubble.errors import Fault, ParseError, ProgramError
from zerobubble.kinds import ValueKind
from zerobubble.lowering import prefetch_depth, program_faults
from zerobubble.program import Action, Compute, Free, Recv, Send
from zerobubble.rules import Value, uses
from zerobubble.schedules import with_vocabulary


def taken(action: Compute, num_stages: int) -> list[Value]:
    """What a step uses."""
    return [value for op in action.step for value in uses(op, num_stages)]


GOLDEN = """\
zerobubble program 1
name 1f1b
placement linear: 0 1
microbatches 2
rank 0
  recv g1.0 from 1
  recv g1.1 from 1
  run 0F0
  send a0.0 to 1
  run 0F1
  send a0.1 to 1
  run 0BW0
  free a0.0
  run 0BW1
  free a0.1
rank 1
  recv a0.0 from 0
  recv a0.1 from 0
  run 1F0
  run 1BW0
  send g1.0 to 0
  run 1F1
  run 1BW1
  send g1.1 to 0
  free g1.0
  free g1.1
"""


def test_text_form_is_stable() -> None:
    program = lower(make("1f1b", 2, 2))
    assert program.to_text() == GOLDEN
    assert Program.from_text(GOLDEN) == program


@pytest.mark.long
@given(schedules(), st.integers(0, 3))
def test_programs_of_random_schedules_are_sound(schedule: Schedule, prefetch: int) -> None:
    for score in (schedule, schedule.forward_only()):
        program = lower(score, prefetch)
        assert program_faults(program) == ()
        assert program.to_schedule() == score
        assert Program.from_text(program.to_text()) == program


@every_and_all(11)
@pytest.mark.parametrize(("name", "stages_per_rank"), EVERY)
def test_programs_of_published_schedules_are_sound(name: str, stages_per_rank: int, nth: int) -> None:
    for ranks, microbatches in grid(name, stages_per_rank, SMALL)[::nth]:
        for prefetch in (0, 1, 3):
            assert program_faults(lower(make(name, ranks, microbatches, stages_per_rank), prefetch)) == ()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_receives_are_posted_no_earlier_than_prefetch_allows(prefetch: int) -> None:
    """GPipe never needs a receive hoisted, so at most one message waited for and `prefetch` more are posted on a channel."""
    program = lower(make("gpipe", 4, 12), prefetch)
    for _, _, channel, _ in program.channels():
        posted, most = set(), 0
        for action in program.rows[channel.destination]:
            if isinstance(action, Recv) and (action.peer, action.value.value_kind) == (channel.source, channel.value_kind):
                posted.add(action.value)
            elif isinstance(action, Compute):
                posted -= set(taken(action, 4))
            most = max(most, len(posted))
        assert most == prefetch + 1


def receives_in_time(schedule: Schedule, costs: Costs, prefetch: int) -> bool:
    """Whether every receive is posted when its message is sent: a rank posts as soon as its last pass before it has ended."""
    ended = {span.op: span.end for row in simulate(schedule, costs).rows for span in row}
    posted, sent = {}, {}
    for row in lower(schedule, prefetch).rows:
        now = 0
        for action in row:
            if isinstance(action, Compute):
                now = ended[action.step[-1]]
            elif isinstance(action, Recv):
                posted[action.value] = now
            elif isinstance(action, Send):
                sent[action.value] = now
    return all(posted[value] <= sent[value] for value in posted)


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "zb-h2", "v-half", "breadth-first", "dualpipe"])
@given(seed=st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_no_message_finds_its_receive_missing_at_the_depth_of_a_plan(name: str, seed: random.Random) -> None:
    schedule = make(name, 4, 8)
    forward, backward, weight = [[seed.choice([0.1, 1.0, 2.0, 5.0]) for _ in range(schedule.num_stages)] for _ in range(3)]
    costs = Costs.from_ms(forward, backward, weight)
    assert receives_in_time(schedule, costs, prefetch_depth(schedule, costs))


def test_a_plan_asks_for_no_more_depth_than_it_needs() -> None:
    schedule = make("gpipe", 2, 8)
    fast_then_slow = Costs.from_ms([1, 4], [1, 1], [1, 1])
    assert prefetch_depth(schedule, fast_then_slow) == 6
    assert not receives_in_time(schedule, fast_then_slow, 5)


def test_a_message_sent_at_the_start_needs_no_depth() -> None:
    """The first receive of a row is posted at 0, in time for a forward that takes no time; the next one is posted after a pass."""
    at_once = Costs.from_ms([0, 1], [1, 1], [1, 1])
    assert [prefetch_depth(make("gpipe", 2, microbatches), at_once) for microbatches in (1, 2, 3)] == [0, 1, 2]


def test_both_ends_of_every_channel_keep_one_order() -> None:
    ends: dict[object, tuple[list[object], list[object]]] = {}
    for _, _, channel, action in lower(make("zb-v", 4, 8)).channels():
        ends.setdefault(channel, ([], []))[isinstance(action, Recv)].append(action.value)
    assert all(sent == received for sent, received in ends.values())


@given(schedules(), st.integers(0, 2))
def test_what_was_sent_is_freed_with_the_first_answer(schedule: Schedule, prefetch: int) -> None:
    """An answer is a message its receiver sent after using it: no wait for the transport is left then."""
    program = lower(schedule, prefetch)
    users = [
        {value: p for p, a in enumerate(row) if isinstance(a, Compute) for value in taken(a, program.num_stages)} for row in program.rows
    ]
    sends = [(rank, position, action) for rank, position, _, action in program.channels() if isinstance(action, Send)]
    for rank, _, send in sends:
        row, used = program.rows[rank], users[send.peer][send.value]
        answers = [users[rank][back.value] for peer, at, back in sends if (peer, back.peer) == (send.peer, rank) and at > used]
        passes = [position for position, action in enumerate(row) if isinstance(action, Compute)]
        assert max(p for p in passes if p < row.index(Free(send.value))) == min(answers, default=passes[-1])


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_value_for_several_ranks_is_freed_after_all_answers_and_own_uses(name: str) -> None:
    """All ranks gather the outputs of the last stage for a divided head, its own rank too."""
    program = lower(with_vocabulary(make(name, 2, 4)))
    users = [{value: p for p, a in enumerate(row) if isinstance(a, Compute) for value in program.uses(a.step)} for row in program.rows]
    sends = [(rank, position, action) for rank, position, _, action in program.channels() if isinstance(action, Send)]
    freed = {(rank, send.value): users[rank].get(send.value, -1) for rank, _, send in sends}
    assert any(user >= 0 for user in freed.values())
    for rank, _, send in sends:
        answers = [
            users[rank][back.value]
            for peer, at, back in sends
            if (peer, back.peer) == (send.peer, rank) and at > users[send.peer][send.value]
        ]
        last = max(position for position, action in enumerate(program.rows[rank]) if isinstance(action, Compute))
        freed[rank, send.value] = max(freed[rank, send.value], min(answers, default=last))
    for (rank, value), position in freed.items():
        row = program.rows[rank]
        assert max(p for p, a in enumerate(row[: row.index(Free(value))]) if isinstance(a, Compute)) == position


def test_an_illegal_schedule_is_refused() -> None:
    schedule = make("1f1b", 2, 2)
    with raises(ScheduleError, "1f1b", 1, "stage 0", "microbatch 1"):
        lower(edited(schedule, 0, schedule.rows[0][:-1]))


def test_a_negative_prefetch_is_refused() -> None:
    with raises(InputError, argument="prefetch", got=-1):
        lower(make("1f1b", 2, 2), prefetch=-1)


# Both ranks send before they post: fine where sends do not wait, a stop where they do.
CROSSING = """\
zerobubble program 1
name crossing
placement custom: 0 1 | 1 0
microbatches 2
routes 0 1
rank 0
  run 0F0
  send a0.0 to 1
  recv a0.1 from 1
  run 1F1
  free a0.0
rank 1
  run 0F1
  send a0.1 to 0
  recv a0.0 from 0
  run 1F0
  free a0.1
"""


def test_receives_posted_too_late_stop_a_rendezvous() -> None:
    assert [str(fault) for fault in program_faults(Program.from_text(CROSSING))] == [
        "under rendezvous messages rank 0 stops at position 1, send a0.0 to 1: rank 1 does not reach its receive; move the receive earlier",
        "under rendezvous messages rank 1 stops at position 1, send a0.1 to 0: rank 0 does not reach its receive; move the receive earlier",
    ]


def test_lowering_hoists_the_receives_of_crossing_sends() -> None:
    schedule = replace(Program.from_text(CROSSING).to_schedule(), placement=Placement.custom([0, 1], [1, 0]))
    assert program_faults(lower(schedule, prefetch=0)) == ()


def test_a_send_behind_its_answer_stops_everywhere() -> None:
    row = [action for action in lower(make("1f1b", 2, 1)).rows[0] if not isinstance(action, Send)]
    send = next(action for action in lower(make("1f1b", 2, 1)).rows[0] if isinstance(action, Send))
    program = rewritten(lower(make("1f1b", 2, 1)), 0, [*row[:3], send, *row[3:]])
    assert [str(fault) for fault in program_faults(program)][:2] == [
        "under eager messages rank 0 stops at position 2, run 0BW0: the send of g1.0 is not reached; move the send earlier",
        "under eager messages rank 1 stops at position 1, run 1F0: the send of a0.0 is not reached; move the send earlier",
    ]


def rewritten(program: Program, rank: int, row: list[Action] | tuple[Action, ...]) -> Program:
    return replace(program, rows=(*program.rows[:rank], tuple(row), *program.rows[rank + 1 :]))


def test_messages_of_microbatches_out_of_range_are_named() -> None:
    """Two values that no pass makes or uses, sent and never received."""
    program = lower(make("1f1b", 2, 1))
    strays = [Value(ValueKind.ACTIVATION, 0, microbatch) for microbatch in (7, 9)]
    faults = program_faults(rewritten(program, 0, [*program.rows[0], *(Send(value, 1) for value in strays)]))
    assert named(faults)[:2] == [("message", 1, "a0.7"), ("message", 1, "a0.9")]
    assert [(fault.code, fault.position) for fault in faults[2:]] == [("not-there", len(program.rows[0]) + k) for k in range(2)]
    states(faults[2].message, "a0.7")
    states(faults[3].message, "a0.9")


@st.composite
def spots(draw: st.DrawFn, kind: type[Action]) -> tuple[Program, int, int]:
    """A program with the place of one of its actions of `kind`."""
    program = lower(draw(schedules()), draw(st.integers(0, 2)))
    found = [(r, p) for r, row in enumerate(program.rows) for p, action in enumerate(row) if isinstance(action, kind)]
    assume(found)
    return (program, *draw(st.sampled_from(found)))


def without(spot: tuple[Program, int, int]) -> Program:
    program, rank, position = spot
    row = program.rows[rank]
    return rewritten(program, rank, row[:position] + row[position + 1 :])


def named(faults: tuple[Fault, ...]) -> list[tuple[str, int | None, str | None]]:
    return [(fault.code, fault.rank, fault.op) for fault in faults]


@given(spots(Recv))
def test_a_dropped_receive(spot: tuple[Program, int, int]) -> None:
    program, rank, position = spot
    value = program.rows[rank][position].value
    faults = program_faults(without(spot))
    assert named(faults)[0] == ("message", rank, str(value))
    states(faults[0].message, value, "once", "never")
    assert {(fault.code, fault.rank) for fault in faults[1:]} == {("not-there", rank)}


@given(spots(Send))
def test_a_dropped_send(spot: tuple[Program, int, int]) -> None:
    program, rank, position = spot
    value = program.rows[rank][position].value
    (fault,) = program_faults(without(spot))
    assert (fault.code, fault.rank, fault.op) == ("message", rank, str(value))
    states(fault.message, value, "once", "never")


@given(spots(Free))
def test_a_dropped_free_leaks(spot: tuple[Program, int, int]) -> None:
    program, rank, position = spot
    value = program.rows[rank][position].value
    (fault,) = program_faults(without(spot))
    states(str(fault), f"rank {rank}", value)
    assert (fault.code, fault.rank, fault.op) == ("leak", rank, str(value))


@given(spots(Free), st.data())
def test_a_value_freed_twice(spot: tuple[Program, int, int], data: st.DataObject) -> None:
    program, rank, position = spot
    row = program.rows[rank]
    again = data.draw(st.integers(position + 1, len(row)))
    (fault,) = program_faults(rewritten(program, rank, (*row[:again], row[position], *row[again:])))
    assert (fault.code, fault.rank, fault.position, fault.op) == ("double-free", rank, again, str(row[position]))


@given(spots(Free))
def test_a_value_freed_before_its_last_use(spot: tuple[Program, int, int]) -> None:
    program, rank, position = spot
    row = program.rows[rank]
    free = row[position]
    sent = next(p for p, action in enumerate(row) if isinstance(action, Send) and action.value == free.value)
    early = (*row[:sent], free, *row[sent:position], *row[position + 1 :])
    (fault,) = program_faults(rewritten(program, rank, early))
    assert (fault.code, fault.rank, fault.position) == ("use-after-free", rank, sent + 1)
    assert fault.op == str(row[sent])


@given(spots(Compute))
def test_what_a_pass_uses_cannot_be_freed_after_it(spot: tuple[Program, int, int]) -> None:
    program, rank, position = spot
    row = program.rows[rank]
    used = taken(row[position], program.num_stages)
    assume(used)
    (fault,) = program_faults(rewritten(program, rank, (*row[: position + 1], Free(used[0]), *row[position + 1 :])))
    assert (fault.code, fault.rank, fault.position) == ("double-free", rank, position + 1)
    assert fault.message.endswith(f"{used[0]} was already consumed or freed; remove this")


@given(spots(Recv))
def test_a_receive_behind_its_use(spot: tuple[Program, int, int]) -> None:
    program, rank, position = spot
    receive = program.rows[rank][position]
    row = list(without(spot).rows[rank])
    used = next(p for p, a in enumerate(row) if isinstance(a, Compute) and receive.value in taken(a, program.num_stages))
    faults = program_faults(rewritten(program, rank, [*row[: used + 1], receive, *row[used + 1 :]]))
    assert ("not-there", rank, str(row[used])) in named(faults)


def is_step_between(program: Program, early: tuple[int, int], late: tuple[int, int]) -> bool:
    return any(isinstance(action, Compute) for action in program.rows[early[0]][early[1] : late[1]])


@given(schedules(), st.data())
def test_two_messages_of_a_channel_swapped_at_the_sender(schedule: Schedule, data: st.DataObject) -> None:
    program = lower(schedule)
    sends: dict[object, list[tuple[int, int]]] = {}
    for rank, position, channel, action in program.channels():
        if isinstance(action, Send):
            sends.setdefault(channel, []).append((rank, position))
    pairs = [pair for spots in sends.values() for pair in pairwise(spots) if is_step_between(program, *pair)]
    assume(pairs)
    (rank, early), (_, late) = data.draw(st.sampled_from(pairs))
    row = list(program.rows[rank])
    row[early], row[late] = row[late], row[early]
    faults = program_faults(rewritten(program, rank, row))
    assert faults[0].code == "channel-order"
    states(faults[0].message, "sender")
    assert faults[0].message.endswith("post the receives in the order of the sends")
    assert ("not-there", rank, str(row[early])) in named(faults)


@given(spots(Compute))
def test_a_dropped_pass_is_a_fault_of_the_schedule(spot: tuple[Program, int, int]) -> None:
    program, rank, position = spot
    broken = without(spot)
    assume(not broken.is_forward_only)
    named = {(fault.code, fault.rank, fault.op) for fault in program_faults(broken)}
    assert named == {("missing", rank, str(op)) for op in program.rows[rank][position].step}


@pytest.mark.parametrize(
    ("old", "new", "stated"),
    [
        ("zerobubble program 1", "zerobubble schedule 1", ("line 1", "'zerobubble program 1'")),
        ("run 0F1", "run 0X1", ("line 10", "0X1")),
        ("send a0.1 to 1", "send a0.1 at 1", ("line 11", "'send a0.1 at 1'", "'run 0F0'")),
        ("send a0.1 to 1", "send a0,1 to 1", ("line 11", "a0,1", "a0.3")),
        ("send a0.1 to 1", "send a0.1 to -1", ("line 11", "-1")),
        ("send a0.1 to 1", "pass a0.1 to 1", ("line 11", "'pass a0.1 to 1'")),
        ("rank 1\n", "rank 2\n", ("line 16", "'rank 2'")),
        ("rank 1\n", "", ("1 ranks", "placement", "[1]")),
        ("placement linear: 0 1\n", "", ("placement", "missing", "header")),
    ],
)
def test_malformed_text_is_reported_by_line_or_key(old: str, new: str, stated: Stated) -> None:
    with raises(InputError, *stated):
        Program.from_text(GOLDEN.replace(old, new))


@pytest.mark.long
@given(st.data())
def test_broken_text_is_a_program_or_refused(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(GOLDEN)))
    text = GOLDEN[:at] + data.draw(st.text(max_size=4)) + GOLDEN[at + data.draw(st.integers(0, 4)) :]
    try:
        program = Program.from_text(text)
    except InputError:
        return
    assert Program.from_text(program.to_text()) == program
    program_faults(program)


def test_a_program_error_lists_its_faults() -> None:
    row = [action for action in lower(make("1f1b", 2, 1)).rows[0] if not isinstance(action, Free)]
    faults = program_faults(rewritten(lower(make("1f1b", 2, 1)), 0, row))
    states(str(ProgramError(faults, "1f1b")), "1f1b", 1, "rank 0", "a0.0")


def test_json_holds_the_text() -> None:
    with raises(ParseError, "text", "program"):
        Program.from_dict({"text": 3})
