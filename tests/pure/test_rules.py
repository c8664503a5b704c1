"""The rules table, compared with the dependencies as stated in the papers."""

from __future__ import annotations

from hypothesis import given

from tests.pure.problems import needs, schedules
from zerobubble import Kind, Op, Schedule
from zerobubble.graph import resolve
from zerobubble.kinds import KINDS, SENT_BETWEEN_STAGES, Collective, ValueKind, kinds_making, kinds_using
from zerobubble.rules import Value, complete_sets, given_by, makers, makes, message_receiver, moving, uses


def test_what_passes_use_and_make_in_the_middle() -> None:
    assert list(map(str, uses(Op(Kind.F, 1, 5), 3))) == ["a0.5"]
    assert list(map(str, uses(Op(Kind.B, 1, 5), 3))) == list(map(str, uses(Op(Kind.BW, 1, 5), 3))) == ["s1.5", "g2.5"]
    assert list(map(str, uses(Op(Kind.W, 1, 5), 3))) == ["w1.5"]
    assert [[str(value) for value in makes(Op(kind, 1, 5), 3)] for kind in KINDS] == [
        ["a1.5", "s1.5"], ["g1.5", "w1.5"], [], ["g1.5"], ["s1.5"], ["v1.5"], [], ["u1.5"], [],
    ]  # fmt: skip
    assert list(map(str, makes(Op(Kind.F, 1, 5), 3, recomputed_by=Kind.R))) == ["a1.5", "i1.5"]
    assert list(map(str, uses(Op(Kind.R, 1, 5), 3))) == ["i1.5"]


def test_the_ends_of_the_pipeline_need_and_make_less() -> None:
    assert uses(Op(Kind.F, 0, 0), 2) == []
    assert uses(Op(Kind.B, 1, 0), 2) == [Value(ValueKind.SAVED, 1, 0)]
    assert makes(Op(Kind.F, 1, 0), 2) == [Value(ValueKind.SAVED, 1, 0)]
    assert makes(Op(Kind.B, 0, 0), 2) == [Value(ValueKind.WEIGHT_WORK, 0, 0)]
    assert makes(Op(Kind.F, 0, 0), 2, forward_only=True) == [Value(ValueKind.ACTIVATION, 0, 0)]
    assert makes(Op(Kind.F, 1, 0), 2, forward_only=True) == []


def test_parts_of_a_head_gather_from_the_last_stage_and_from_each_other() -> None:
    parts = (0, 1, 2)
    output, softmax, gradient = (collective.value_kind for collective in (Collective.OUTPUT, Collective.SOFTMAX, Collective.GRADIENT))
    assert uses(Op(Kind.S, 1, 5), 3, parts) == [Value(output, 2, 5)]
    assert uses(Op(Kind.T, 1, 5), 3, parts)[1:] == [Value(softmax, stage, 5) for stage in parts]
    assert uses(Op(Kind.BW, 2, 5), 3, parts)[1:] == [Value(gradient, stage, 5) for stage in parts]
    assert makes(Op(Kind.F, 2, 5), 3, parts=parts)[1:] == [Value(output, 2, 5)]
    assert [value.value_kind for value in makes(Op(Kind.S, 1, 5), 3, parts=parts)][1:] == [softmax, gradient]
    for kind in (Kind.F, Kind.BW):
        assert uses(Op(kind, 1, 5), 3, parts) == uses(Op(kind, 1, 5), 3)
        assert makes(Op(kind, 1, 5), 3, parts=parts) == makes(Op(kind, 1, 5), 3)
    assert given_by(Kind.F, 2, Kind.S, 1, 3) == (output,)
    assert given_by(Kind.F, 1, Kind.S, 1, 3) == given_by(Kind.F, 2, Kind.T, 1, 3) == ()


def test_messages_go_to_the_stage_that_uses_them() -> None:
    assert [message_receiver(Kind.F, stage, 3) for stage in range(3)] == [1, 2, None]
    assert [message_receiver(Kind.B, stage, 3) for stage in range(3)] == [None, 0, 1]
    assert message_receiver(Kind.W, 1, 3) is None


def test_a_recomputed_forward_is_the_last_to_make_a_value() -> None:
    assert makers(Value(ValueKind.SAVED, 1, 5)) == [Op(Kind.R, 1, 5), Op(Kind.F, 1, 5)]


def test_makers_are_the_passes_that_make() -> None:
    for kind in KINDS:
        op = Op(kind, 2, 1)
        assert all(op in makers(value) for value in makes(op, 5))
        assert all(value in makes(maker, 5) for value in uses(op, 5) for maker in makers(value))


def test_complete_ways_to_process_a_microbatch() -> None:
    plain = {frozenset({Kind.F, Kind.BW}), frozenset({Kind.F, Kind.B, Kind.W})}
    stages = plain | {kinds | {Kind.R} for kinds in plain}
    heads = [frozenset[Kind](), frozenset({Kind.S, Kind.T}), frozenset({Kind.SL, Kind.TX})]
    assert {kinds | head for kinds in stages for head in heads} == complete_sets()


def test_what_the_kinds_are_called() -> None:
    assert kinds_making(ValueKind.ACTIVATION) == {Kind.F}
    assert kinds_making(ValueKind.GRADIENT) == {Kind.B, Kind.BW}
    assert kinds_using(ValueKind.WEIGHT_WORK) == {Kind.W}
    assert {kind: moving(kind) for kind in (Kind.F, Kind.B, Kind.BW)} == {
        kind: value_kind for kind, traits in KINDS.items() for value_kind in traits.makes if value_kind in SENT_BETWEEN_STAGES
    }


@given(schedules())
def test_the_graph_holds_the_dependencies_of_the_papers(schedule: Schedule) -> None:
    graph = resolve(schedule)
    present = set(graph.ops)
    for number, op in enumerate(graph.ops):
        assert {graph.ops[need] for need in graph.needs[number]} == set(needs(op, present, schedule.num_stages))
        assert schedule.rows[graph.rank[number]][graph.position(number)] == op
