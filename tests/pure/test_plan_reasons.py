"""Explanations in a plan: of its winner, of the other candidates, and of placements that cannot be searched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import zerobubble as zb
from tests.refusals import states
from tests.thinned import every
from zerobubble.planning import attempt
from zerobubble.planning.answer import CUT_SHORT
from zerobubble.planning.axes.layers import CutSavings
from zerobubble.planning.pareto import pareto

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


def test_the_note_of_an_equally_short_plan_says_what_ranks_it_after_the_winner() -> None:
    winner, other = zb.plan(EQUAL, 8, placements=["vee", "linear"], seconds=0).choices
    assert winner.plan.time == other.plan.time
    states(other.note, f"{other.plan.problem.messages} messages", str(winner.plan.problem.messages), "winner")
    states(winner.note, "rank 0")
    (first, second), work = ("linear", "vee"), zb.Workload.uniform(2, (1, 1, 0))  # one microbatch has one path, however often it is sent
    winner, other = zb.plan(work, 1, placements=[second, first], objective="makespan", seconds=0).choices
    assert (winner.name, other.name) == (first, second)
    states(other.note, f"{other.plan.problem.messages} messages", str(winner.plan.problem.messages))


def test_the_table_says_what_steps_are_and_sets_apart_what_was_not_searched() -> None:
    lines = str(zb.plan(EQUAL, 8, seconds=0)).splitlines()
    assert lines[0].split()[:5] == ["placement", "period", "bubble", "bound", "over"]
    apart = lines.index("not searched, a first schedule that fits:")
    assert [line.split()[0] for line in lines[1 : apart - 1]] == ["linear", "vee"]
    assert {line.split()[0] for line in lines[apart + 1 : apart + 6]} == {"looped-2", "looped-3", "looped-4", "wave-3", "wave-4"}
    states(" ".join(str(zb.plan(EQUAL, 8, placements="linear", objective="makespan", seconds=0)).split()), "--objective")
    states(" ".join(str(zb.plan(EQUAL, 8, 2, placements="wave-4", seconds=0)).split()), "searched", "Nothing", "--budget", "seconds=")


def test_reasons_have_the_figures_of_the_table_where_layers_are_cut_anew() -> None:
    layers = [zb.partition.Layer(f * 10**6, f * 10**6, 10**6, 100, 50) for f in (3, 3, 3, 3, 3, 3, 3, 9)]
    placements = {"linear": zb.Placement.linear(2), "vee": zb.Placement.vee(2), "looped-2": zb.Placement.looped(2, 2)}
    found = zb.plan(layers, 6, zb.Limits((600, 600)), placements=placements, evaluations=2000)
    (savings,) = found.savings
    assert isinstance(savings, CutSavings)
    assert savings.cut.cuts != savings.balanced_cut.cuts
    winner, optimal, slow = found.choices
    assert winner.searched
    assert winner.plan.time is not None
    states(winner.note, f"{100 * (winner.plan.time / winner.plan.bound.time - 1):.2f} %")
    assert optimal.plan.time == optimal.plan.bound.time
    assert optimal.note.endswith(optimal.plan.bound.reason)
    states(optimal.note, "rank 1", "220 ms")
    states(slow.note, f"{100 * slow.plan.least_bubble:.2f} %", f"{100 * (winner.plan.bubble or 0):.2f} %", "winner")


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


def test_a_published_schedule_is_the_simple_choice_where_the_winner_splits_its_backward_passes() -> None:
    work = zb.Workload.from_ms((8.65,) * 2, (10.77,) * 2, (9.4,) * 2, (0.0,) * 2, held=0.5)
    made = zb.plan(work, 8, 3, placements="vee", objective="makespan", seconds=0)
    assert (made.schedule.name, made.simple and made.simple.how) == ("dualpipe-v", "zb-v")
    assert ((made.simple and made.simple.time) or 0) < 1.005 * (made.time or 0)


def test_the_fewest_messages_then_the_fewest_stages_win_a_tie() -> None:
    tied = zb.plan(zb.Workload.uniform(4, (10, 10, 10)), 16, placements=["vee", "linear"], evaluations=500)
    winner, other = tied.choices
    assert (winner.name, other.name, winner.plan.time) == ("linear", "vee", other.plan.time)
    assert (winner.plan.makespan or 0) > (other.plan.makespan or 0)
    states(other.note, "192", "96", "messages")
    alone = zb.plan(zb.Workload.uniform(1, (10, 10, 10)), 4, placements=["looped-2", "linear"], evaluations=10)
    assert [(choice.name, choice.plan.time) for choice in alone.choices] == [("linear", 120_000_000), ("looped-2", 120_000_000)]
    states(alone.choices[1].note, "2 stages", "1")


def test_a_budget_that_ends_before_a_search_says_how_much_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"placements": ["looped-4", "wave-4"], "seconds": 1}
    monkeypatch.setattr(attempt, "CHECK_SECONDS", 0.01)
    ended = zb.plan(EQUAL, 12, 3, **given)
    assert not any(choice.searched for choice in ended.choices)
    assert ended.enough_seconds >= 2 * 2 * 0.01 * 2 * 12 * 48
    assert str(ended).endswith(ended.unsearched_text)
    states(ended.unsearched_text, str(ended.enough_seconds))
    monkeypatch.undo()
    given.pop("seconds")
    assert zb.plan(EQUAL, 12, 3, **given, evaluations=20).enough_seconds == 0
    assert zb.plan(EQUAL, 12, 3, **given, seconds=0).enough_seconds == 0, "nothing was to be searched"


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
