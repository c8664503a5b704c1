"""Explanations in a plan: of its winner, of the other candidates, and of placements that cannot be searched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import zerobubble as zb
from tests.refusals import states
from tests.thinned import every
from zerobubble.planning.answer import CUT_SHORT
from zerobubble.planning.layer_plan import CutSavings
from zerobubble.planning.pareto import pareto
from zerobubble.units import show_ms

WORK = zb.Workload.uniform(3, (1, 1, 1), held=2.0)
"""B leaves W twice of what F saved."""


@pytest.mark.parametrize(("memory", "recompute"), every(4, [(1.5, "none"), (2.0, "none"), (1.5, "full"), (1.5, "auto")]))
def test_the_note_separates_searched_from_published_where_b_leaves_more_than_f_saved(memory: float, recompute: str) -> None:
    def note(evaluations: int) -> str:
        return zb.plan(WORK, 6, memory, placements="linear", evaluations=evaluations, recompute=recompute).choices[0].note

    states(note(0), "period", "search")
    states(note(100), "period", "search")


# The reasons reported for the winner and the others.

EQUAL = zb.Workload.uniform(4, (1, 1, 1))


def test_of_equally_short_plans_the_one_with_the_smaller_makespan_wins() -> None:
    made = zb.plan(EQUAL, 8, seconds=0)
    spans, makespans = zip(*((c.plan.timeline.bubble_span, c.plan.timeline.bubble_makespan) for c in made.choices), strict=True)  # type: ignore[union-attr]
    assert made.choices[0].name == "vee"
    assert makespans[0] == min(makespan for span, makespan in zip(spans, makespans, strict=True) if span == spans[0]) < max(makespans)


def test_the_note_of_an_equally_short_plan_says_what_ranks_it_after_the_winner() -> None:
    winner, other = zb.plan(EQUAL, 8, placements=["vee", "linear"], seconds=0).choices
    assert winner.plan.time == other.plan.time
    states(other.note, show_ms((other.plan.makespan or 0) - (winner.plan.makespan or 0)), "winner")
    states(winner.note, "rank 0")
    (first, second), work = ("linear", "vee"), zb.Workload.uniform(2, (1, 1, 0))  # one microbatch has one path, however often it is sent
    winner, other = zb.plan(work, 1, placements=[second, first], objective="makespan", seconds=0).choices
    assert (winner.name, other.name) == (first, second)
    states(other.note, f"{other.plan.problem.messages} messages", str(winner.plan.problem.messages))


def test_the_table_says_what_steps_are_and_sets_apart_what_was_not_searched() -> None:
    lines = str(zb.plan(EQUAL, 8, seconds=0)).splitlines()
    assert lines[0].split()[:5] == ["placement", "period", "bubble", "bound", "over"]
    apart = lines.index("not searched, a first schedule that fits:")
    assert [line.split()[0] for line in lines[1 : apart - 1]] == ["vee", "linear"]
    assert {line.split()[0] for line in lines[apart + 1 : apart + 6]} == {"looped-2", "looped-3", "looped-4", "wave-3", "wave-4"}
    states(" ".join(str(zb.plan(EQUAL, 8, placements="linear", objective="makespan", seconds=0)).split()), "--objective")
    states(" ".join(str(zb.plan(EQUAL, 8, 2, placements="wave-4", seconds=0)).split()), "searched", "Nothing", "--budget", "seconds=")


def test_reasons_have_the_figures_of_the_table_where_layers_are_cut_anew() -> None:
    layers = [zb.partition.Layer(f * 10**6, f * 10**6, 10**6, 100, 50) for f in (3, 3, 3, 3, 3, 3, 3, 9)]
    placements = {"vee": zb.Placement.vee(2), "looped-2": zb.Placement.looped(2, 2)}
    found = zb.plan(layers, 6, zb.Limits((600, 600)), placements=placements, evaluations=2000)
    (savings,) = found.savings
    assert isinstance(savings, CutSavings)
    assert savings.cut.cuts != savings.balanced_cut.cuts
    winner, other = found.choices
    states(other.note, f"{100 * (winner.plan.bubble or 0):.2f}", "winner")
    assert winner.searched


def test_a_published_schedule_that_is_as_short_is_the_simple_choice() -> None:
    made = zb.plan(EQUAL, 8, placements="vee", seconds=0)
    assert (made.how, made.simple and made.simple.how) == ("zb-v-greedy", "zb-v")
    message = " ".join(str(made).split())
    states(message, "zb-v", "schedule")
    assert message.endswith("zerobubble show zb-v --ranks 4 --microbatches 8")
    assert zb.plan(EQUAL, 8, placements="looped-2", seconds=0).simple is None, "the winner is published itself"


def test_a_published_schedule_that_is_nearly_as_short_is_named_with_its_stages() -> None:
    made = zb.plan(zb.Workload.uniform(8, (12, 11, 7)), 64, 5, placements="looped-4", evaluations=10_000)
    assert made.simple is not None
    assert made.simple.how == "gis-h"
    assert (made.time or 0) < (made.simple.time or 0) < 1.005 * (made.time or 0)
    states(str(made), "--stages-per-rank 4")


def test_a_plan_that_ctrl_c_cuts_short_says_so() -> None:
    made = zb.plan(EQUAL, 12, 3, placements=["looped-4", "wave-4"], evaluations=2000, progress=_interrupts(after=0))
    assert made.interrupted
    assert str(made).endswith(CUT_SHORT)
    assert zb.schedule_faults(made.schedule) == ()


def test_a_front_that_ctrl_c_cuts_short_keeps_its_points() -> None:
    front = pareto(EQUAL, 12, [1, 1.5, 2, 2.5, 3], placements="wave-4", evaluations=2000, progress=_interrupts(after=1))
    assert front.interrupted
    assert 1 <= len(front.points) < 5
    states(str(front).splitlines()[-1], "Ctrl-C", "front", "incomplete")


def _interrupts(after: int) -> Callable[[object], None]:
    heard: list[object] = []

    def interrupt(news: object) -> None:
        heard.append(news)
        if len(heard) > after:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize("options", [{}, {"recompute": "auto"}, {"recompute": "full"}, {"shares": (1, 2, 3)}], ids=str)
def test_plans_for_passes_that_take_no_time_are_reported(options: dict[str, Any]) -> None:
    found = zb.plan(zb.Workload.uniform(2, (0, 0, 0)), 3, 1 if "recompute" in options else None, evaluations=0, **options)
    states(str(found), "0.00 %")


def test_a_head_that_takes_no_time_is_reported() -> None:
    found = zb.plan(zb.Workload.uniform(2, (0, 0, 0)), 3, head=zb.planning.Head((0, 0, 0)), evaluations=0)
    states(" ".join(str(found).split()), "0 ms", "0.00")
