"""Heads divided over ranks by vocabulary: schedules with S and T, or SL and TX, are checked, timed, drawn and written, or refused.

The passes wait for exactly what they gather and hold the bytes that the paper states. They fit into any schedule with one route. The
planner divides a head only if that is faster and fits. Programs of any order are sound.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.problems import reordered
from tests.recomputing import kinds_restored
from tests.refusals import Stated, raises, states
from zerobubble import (
    Costs,
    InputError,
    Kind,
    Op,
    Placement,
    Program,
    Schedule,
    ScheduleError,
    lower,
    make,
    schedule_faults,
    simulate,
)
from zerobubble.explain import attribute
from zerobubble.export import to_torch_csv
from zerobubble.fit import fit_costs
from zerobubble.graph import resolve
from zerobubble.kinds import Collective, Traits, ValueKind, add_kind, traits_of
from zerobubble.lowering import prefetch_depth, program_faults
from zerobubble.program import Compute, Recv, Send
from zerobubble.rules import Value, complete_sets
from zerobubble.schedules import SCHEDULES, with_recompute, with_vocabulary
from zerobubble.simulation import peak_memory
from zerobubble.view import Report, report_html
from zerobubble.view.page import _kinds

ONE_ROUTE = [name for name in SCHEDULES if name not in ("forward-only", "chimera", "dualpipe", "dualpipe-v")]


def divided(algorithm: int = 2, name: str = "1f1b", ranks: int = 4, microbatches: int = 8) -> Schedule:
    return with_vocabulary(make(name, ranks, microbatches), algorithm)


def costs_of(schedule: Schedule, head: float = 0.25, collective: float = 0.0) -> Costs:
    """Stages of a ms each for F, B and W of a rank; a part of the head takes `head` ms in three equal parts and keeps 1,000 bytes."""
    costs = Costs.uniform(schedule.num_stages, stages_per_rank=schedule.num_stages // schedule.num_ranks)
    return costs.with_divided_head((head / 3,) * 3, held=1000, collective=collective)


def head_row(text: str, microbatches: int = 1) -> Schedule:
    return Schedule("mine", Placement.linear(1), microbatches, (tuple(map(Op.parse, text.split())),))


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("name", ONE_ROUTE)
def test_the_head_of_every_schedule_of_one_route_can_be_divided(name: str, algorithm: int) -> None:
    plain = make(name, 4, 8)
    schedule = with_vocabulary(plain, algorithm)
    assert schedule_faults(schedule) == ()
    assert Schedule.from_text(schedule.to_text()) == Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
    kinds = {Kind.SL, Kind.TX} if algorithm == 1 else {Kind.S, Kind.T}
    for rank, row in enumerate(schedule.rows):
        assert sorted(op for op in row if op.kind in kinds) == sorted(
            Op(kind, min(plain.placement.stages(rank))[1], j) for kind in kinds for j in range(8)
        )
        assert sorted(op for op in row if op.kind not in kinds) == sorted(plain.rows[rank])
    assert schedule.forward_only().rows == plain.forward_only().rows


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 4), (2, 1), (3, 2), (5, 7), (8, 24)])
@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_other_sizes_and_costs_are_legal(name: str, ranks: int, microbatches: int) -> None:
    plain = make(name, ranks, microbatches)
    stages = plain.num_stages
    odd = [Costs.from_ms(times, times[::-1], [2.0] * stages, 0.3) for times in ([1.0 + s for s in range(stages)], [0.0] * stages)]
    for algorithm in (1, 2):
        for costs in (None, *odd, Costs.from_ms([0.0] * stages, [0.0] * stages, [0.0] * stages)):
            assert schedule_faults(with_vocabulary(plain, algorithm, costs)) == ()


@pytest.mark.parametrize("algorithm", [1, 2])
def test_recomputation_and_division_go_together(algorithm: int) -> None:
    assert schedule_faults(with_vocabulary(with_recompute(make("1f1b", 4, 8)), algorithm)) == ()
    assert schedule_faults(with_recompute(divided(algorithm))) == ()


@pytest.mark.parametrize(("algorithm", "microbatches"), [(2, 1), (1, 2)])
def test_ranks_hold_as_many_microbatches_more_as_the_paper_says(algorithm: int, microbatches: int) -> None:
    """p + 1 and p + 2 microbatches for 1F1B (arXiv 2411.05288, section 5); those of V-Half have two stages on each rank."""
    for name, stages in (("1f1b", 1), ("v-half", 2)):
        plain = make(name, 8, 32)
        costs = costs_of(plain)
        schedule = with_vocabulary(plain, algorithm)
        without = replace(costs, further=()).with_divided_head((1, 1, 1))
        more = max(peak_memory(schedule, without)) - max(peak_memory(plain, without))
        assert more == microbatches * stages * 1_000_000


def test_a_step_loses_little_to_the_division() -> None:
    """A head as heavy as a stage, on the last stage and divided: 8 ranks with 1/8 more work each, or one with twice the work."""
    plain = make("1f1b", 8, 64)
    costs = costs_of(plain, head=3 / 8)
    whole = Costs.from_ms(*[[1.0] * 7 + [2.0]] * 3)
    slowest = simulate(plain, whole).makespan
    for algorithm in (1, 2):
        timeline = simulate(with_vocabulary(plain, algorithm), costs)
        assert timeline.bubble_makespan < simulate(plain, costs).bubble_makespan
        assert 1.6 < slowest / timeline.makespan < 1.8


def test_times_and_bytes_by_hand() -> None:
    """Rank 0 in ms: F 0 to 1. Its output is there 0.5 later, so S begins at 1.5 on rank 0 and, with 1F0 from 1 to 2, at 2 on rank 1."""
    rows = [["0F0", "0S0", "0T0", "0BW0"], ["1F0", "1S0", "1BW0", "1T0"]]
    schedule = Schedule("mine", Placement.linear(2), 1, [list(map(Op.parse, row)) for row in rows])
    costs = Costs.uniform(2).with_divided_head((1, 2, 4), held=1000, collective=0.5)
    timeline = simulate(schedule, costs)
    spans = {str(span.op): (span.start / 1e6, span.end / 1e6) for _, span in timeline.spans()}
    assert spans == {
        "0F0": (0, 1),
        "1F0": (1, 2),
        "1S0": (2, 5),
        "0S0": (2.5, 5.5),  # the output of 1F0 is on its way for 0.5
        "0T0": (5.5, 9.5),  # 1S0 ended at 5 and was on its way for 0.5, as 0S0 ended
        "1BW0": (6, 8),  # 0S0 ended at 5.5
        "0BW0": (9.5, 11.5),
        "1T0": (8, 12),
    }
    assert peak_memory(schedule, costs) == (1_001_000, 1_001_000)
    assert list(accumulate(costs.memory_change(op.kind, op.stage) for op in schedule.rows[0])) == [1_000_000, 1_001_000, 1_000_000, 0]
    slower = simulate(schedule, costs.with_columns(collective=(0, 0)))
    assert slower.makespan == 12_000_000 - 1_000_000


def test_who_waits_for_whom() -> None:
    graph = resolve(divided(1, "1f1b", 2, 1))
    number = {str(op): place for place, op in enumerate(graph.ops)}
    waits = {str(op): {str(graph.ops[need]) for need in needs} for op, needs in zip(graph.ops, graph.needs, strict=True)}
    assert list(number) == ["0F0", "0SL0", "0TX0", "0BW0", "1F0", "1SL0", "1TX0", "1BW0"]
    assert waits["0SL0"] == waits["1SL0"] == {"1F0"}
    assert waits["0TX0"] == waits["1TX0"] == {"0SL0", "1SL0"}
    assert waits["1BW0"] == {"1F0", "0TX0", "1TX0"}
    assert waits["0BW0"] == {"0F0", "1BW0"}
    second = {
        str(op): {str(graph.ops[need]) for need in needs}
        for graph in [resolve(divided(2, "1f1b", 2, 1))]
        for op, needs in zip(graph.ops, graph.needs, strict=True)
    }
    assert second["1BW0"] == {"1F0", "0S0", "1S0"}
    assert second["0T0"] == {"0S0", "1S0"}


@pytest.mark.parametrize(
    ("row", "stated"),
    [
        ("0F0 0S0 0BW0", ("stage 0", "microbatch 0", "rank 0", "0T0")),
        ("0F0 0T0 0BW0", ("stage 0", "microbatch 0", "rank 0", "0S0")),
        ("0F0 0S0 0TX0 0BW0", ("stage 0", "microbatch 0", "rank 0", "0F0", "0BW0", "0S0", "0TX0")),
        ("0F0 0S0 0SL0 0T0 0TX0 0BW0", ("0F0", "0BW0", "0S0", "0T0", "0SL0", "0TX0")),
        ("0F0 0BW0 0S0 0T0", ("rank 0", "0BW0", "position 1", "0S0", "position 2")),
        ("0S0 0F0 0T0 0BW0", ("rank 0", "0S0", "position 0", "0F0", "position 1")),
        ("0F0 0SL0 0BW0 0TX0", ("rank 0", "0BW0", "position 2", "0TX0", "position 3")),
    ],
)
def test_an_illegal_order_says_why(row: str, stated: Stated) -> None:
    states(str(schedule_faults(head_row(row))[0]), *stated)


def test_a_part_of_the_head_that_a_microbatch_lacks_is_a_fault() -> None:
    schedule = divided(2, "1f1b", 2, 3)
    cut = tuple(tuple(op for op in row if str(op) not in ("1S2", "1T2")) for row in schedule.rows)
    (fault,) = schedule_faults(replace(schedule, rows=cut))
    assert (fault.code, fault.rank) == ("head", 1)
    states(str(fault), "stage 1", "microbatch 2", "rank 1", "S", "T", "stages 0", 1)
    mixed = tuple(tuple(Op.parse(str(op).replace("1S2", "1SL2").replace("1T2", "1TX2")) for op in row) for row in schedule.rows)
    (fault,) = [fault for fault in schedule_faults(replace(schedule, rows=mixed)) if fault.code == "head"]
    states(str(fault), "stage 1", "microbatch 2", "rank 1", "1SL2", "1TX2", "S", "T")


def test_ranks_that_meet_in_other_orders_are_a_deadlock() -> None:
    rows = ["0F0 0F1 0S1 0S0 0T0 0T1 0BW0 0BW1", "1F0 1S0 1BW0 1T0 1F1 1S1 1BW1 1T1"]
    schedule = Schedule("odd", Placement.linear(2), 2, tuple(tuple(map(Op.parse, row.split())) for row in rows))
    (fault,) = schedule_faults(schedule)
    assert fault.code == "deadlock"
    states(str(fault), "rank 0", "0S1", "rank 1", "1F1", "1BW0", "0S0")


@pytest.mark.parametrize(
    ("call", "stated"),
    [
        (lambda: with_vocabulary(make("1f1b", 2, 2), 3), ("algorithm", 3)),
        (lambda: with_vocabulary(make("forward-only", 2, 2)), ("backward", "passes")),
        (lambda: with_vocabulary(make("chimera", 2, 4)), (2, "routes", "stages")),
        (lambda: with_vocabulary(make("dualpipe-v", 2, 4)), ("overlapped", "steps")),
        (lambda: with_vocabulary(make("dualpipe", 2, 4)), (2, "routes", "stages")),
        (lambda: with_vocabulary(divided(1)), ("'1f1b, vocabulary 1'", "schedule", "head")),
        (lambda: with_vocabulary(make("1f1b", 2, 2), costs=Costs.uniform(3)), (2, 3, "stages", "costs")),
        (lambda: simulate(divided(), Costs.uniform(4)), ("head_forward", "S", "SL")),
        (lambda: fit_costs(simulate(divided(), costs_of(divided()))), ("timelines", "divided", "head")),
        (lambda: to_torch_csv(divided()), ("PyTorch's CSV", "BW")),
        (lambda: Costs.uniform(2).with_divided_head((1, -1, 1)), ("head_backward", "divided", "head", -1)),
        (lambda: Costs.uniform(2).with_divided_head((1, 1)), ("head", "numbers")),  # type: ignore[arg-type]
        (lambda: Costs.uniform(2).with_divided_head((1, 1, 1), held=-1), ("divided", "head", -1)),
    ],
)
def test_what_cannot_be_done_says_why(call: Callable[[], object], stated: Stated) -> None:
    with raises(InputError, *stated):
        call()


def test_an_illegal_schedule_is_not_divided() -> None:
    with raises(ScheduleError, "rank 0", "0BW0", "position 0", "0F0"):
        with_vocabulary(head_row("0BW0 0F0"))


@given(st.sampled_from(ONE_ROUTE), st.integers(1, 4), st.integers(1, 2), st.integers(0, 1 << 32), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_programs_of_any_legal_order_are_sound(name: str, ranks: int, algorithm: int, seed: int, prefetch: int) -> None:
    """Parts have several users on several ranks: each message has one sender and one receiver, and nothing is used after its end."""
    schedule = overlapped(reordered(with_vocabulary(make(name, max(ranks, name == "hanayo"), 4), algorithm), seed), seed)
    program = lower(schedule, prefetch)
    assert program_faults(program) == ()
    assert program.to_schedule() == schedule
    assert Program.from_text(program.to_text()) == program
    sent = Counter(action.value for _, _, _, action in program.channels() if isinstance(action, Send))
    last = schedule.placement.routes[0][-1]
    for j in range(4):
        assert sent[Value(ValueKind.OUTPUT, schedule.num_stages - 1, j)] == ranks - 1
        for rank, part in enumerate(schedule.head_parts if ranks > 1 else ()):
            assert sent[Value(ValueKind.SOFTMAX_SUMS, part, j)] == ranks - 1
            assert sent[Value(ValueKind.GRADIENT_PART, part, j)] == (schedule.rank_of(part, 0) != last), rank


def overlapped(schedule: Schedule, seed: int) -> Schedule:
    """The same rows with some neighbors in steps, where that is legal."""
    draw = random.Random(seed)
    for rank, row in enumerate(schedule.rows):
        place = draw.randrange(len(row) - 1)
        steps = [list(each) for each in schedule.steps]
        singles = [(op,) for op in row]
        steps[rank] = [*singles[:place], (row[place], row[place + 1]), *singles[place + 2 :]]
        together = Schedule.of_steps(*schedule.header[:3], steps, schedule.microbatch_routes)
        schedule = schedule if schedule_faults(together) else together
    return schedule


def test_parts_may_be_those_of_some_ranks_or_several_on_one() -> None:
    """A schedule may divide the head over any stages; a rank with several parts uses what it received more than once."""
    plain = make("zb-v", 2, 2)
    for parts in ((1,), (0, 3), (0, 1, 2, 3)):
        rows = []
        for rank, row in enumerate(plain.rows):
            here = [part for part in parts if plain.rank_of(part, 0) == rank]
            forwards = [op for op in row if op.kind is Kind.F]
            heads = [Op(kind, part, j) for kind in (Kind.S, Kind.T) for j in range(2) for part in here]
            rows.append((*forwards, *heads, *(op for op in row if op.kind is not Kind.F)))
        schedule = replace(plain, rows=tuple(rows))
        assert schedule_faults(schedule) == ()
        assert schedule.head_parts == parts
        for prefetch in (0, 2):
            assert program_faults(lower(schedule, prefetch)) == ()


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        ("  send o1.0 to 0", ("rank 1", "rank 0", "o1.0")),
        ("  recv x0.1 from 0", ("rank 0", "rank 1", "x0.1")),
        ("  send p0.0 to 1", ("rank 0", "rank 1", "p0.0")),
        ("  free o1.0", ("rank 1", "o1.0")),
    ],
)
def test_a_program_that_lacks_an_action_is_reported_which(line: str, stated: Stated) -> None:
    text = lower(divided(ranks=2, microbatches=2)).to_text()
    assert line + "\n" in text
    states(str(program_faults(Program.from_text(text.replace(line + "\n", "")))[0]), *stated)


def test_what_is_sent_may_be_used_until_it_is_freed() -> None:
    rows = [row.split("\n") for row in lower(divided(ranks=2, microbatches=1)).to_text().split("rank ")]
    row = rows[2]
    row.remove("  free o1.0")
    row.insert(row.index("  run 1S0"), "  free o1.0")
    (fault, *_) = program_faults(Program.from_text("rank ".join("\n".join(each) for each in rows)))
    states(str(fault), "1S0", "o1.0")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-v"])
def test_no_message_finds_its_receive_missing_at_the_depth_of_a_plan(name: str) -> None:
    schedule = divided(name=name)
    costs = costs_of(schedule)
    ended = {span.op: span.end for row in simulate(schedule, costs).rows for span in row}
    posted, sent = {}, {}
    for rank, row in enumerate(lower(schedule, prefetch_depth(schedule, costs)).rows):
        now = 0
        for action in row:
            if isinstance(action, Compute):
                now = ended[action.step[-1]]
            elif isinstance(action, Recv):
                posted[action.value, rank] = now
            elif isinstance(action, Send):
                sent[action.value, action.peer] = now
    assert posted.keys() == sent.keys()
    assert all(posted[message] <= sent[message] for message in posted)


def test_readers_of_the_table_show_the_passes_of_the_head() -> None:
    schedule = divided(2, "v-half", 2, 4)
    timeline = simulate(schedule, costs_of(schedule))
    page = report_html(Report("divided", timelines=(timeline,)))
    assert traits_of(Kind.S).phrase in page
    idle = attribute(schedule, costs_of(schedule))
    assert [causes.total for causes in idle.ranks] == [timeline.makespan - figures.work for figures in timeline.ranks]
    rows = {row["letters"]: row for row in _kinds([timeline])}
    assert rows[Kind.BW]["gathers"] == [[], [Collective.GRADIENT.value]]
    assert rows[Kind.F]["gives"] == [[], [Collective.OUTPUT.value]]
    assert rows[Kind.T]["gathers"] == [[Collective.SOFTMAX.value]] * 2


def test_costs_that_are_made_up_have_a_head_as_heavy_as_a_stage() -> None:
    schedule = divided()
    costs = Costs.uniform(4).completed_for(schedule)
    assert costs.column("head_forward") == (250_000,) * 4
    assert simulate(schedule, costs).makespan > 0


def test_an_added_kind_may_meet_in_a_collective() -> None:
    with kinds_restored():
        alone = Traits(
            phrase="watches the softmax", uses=(), makes=(), times=("watching",), run="none", lost="nobody watches", color="#102030",
            gathers=(Collective.SOFTMAX,),
        )  # fmt: skip
        kind = add_kind("V", alone)
        graph = resolve(head_row("0F0 0S0 0T0 0BW0 0V0"))
        assert graph.needs[-1] == (1,)
        assert frozenset({Kind.F, Kind.BW, Kind.S, Kind.T, kind}) in complete_sets()


def test_the_program_of_the_page_says_what_is_won(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/vocabulary.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    first, second, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(first, namespace)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "1f1b (4000000, 3000000, 2000000, 1000000) 570.0 ms",
        "1f1b, vocabulary 2 (5000000, 4050000, 3050000, 2000000) 391.4 ms",
    ]
    exec(second, namespace)
    whole, divided = "whole on the last stage", "divided by algorithm 2"
    heads = ((570.0, 402.0), (332.4, 330.7))
    seen = [line for times in heads for line in zip((whole, divided), map("{:.1f} ms".format, times), strict=True)]
    assert capsys.readouterr().out.splitlines() == [f"{way}: {time}" for way, time in seen]
