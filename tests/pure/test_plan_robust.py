"""What a plan becomes when times are off: exact against the simulator, and orders that stand more of it."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from statistics import fmean, stdev

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.problems import problems
from zerobubble import Costs, InputError, Limits, Schedule, make, memory_faults, peak_memory, schedule_faults, simulate
from zerobubble.bounds import Bound
from zerobubble.cli import main
from zerobubble.plan.problem import Objective, Problem, Solved, Status
from zerobubble.plan.replay import Replay
from zerobubble.plan.robust import Sensitivity, jittered, scaled, sensitivity
from zerobubble.plan.steady import Noise, steadiest
from zerobubble.plan.what_if import what_if, what_if_text

TIMES = Costs.from_ms([20, 22, 18, 30], [21, 19, 18, 31], [9, 11, 10, 15], [0.6, 0.7, 0.8])


def effect(found: Sensitivity, what: str) -> tuple[int, int]:
    """The objective with `what` slower and faster."""
    slower, faster = next((each.slower, each.faster) for each in found.effects if each.what == what)
    return slower, faster


def with_column(costs: Costs, name: str, factor: float, only: int | None = None) -> Costs:
    """`costs` with a column, or one entry of it, times a factor."""
    old = getattr(costs, name)
    return replace(costs, **{name: tuple(round(t * factor) if only in (None, at) else t for at, t in enumerate(old))})


@given(problems())
@settings(max_examples=150, deadline=None)
def test_a_replay_is_the_simulation(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    timeline = simulate(schedule, costs)
    replay = Replay.of(schedule)
    assert replay.time(Objective.SPAN, costs) == timeline.span
    assert replay.time(Objective.MAKESPAN, costs) == timeline.makespan


@pytest.mark.parametrize("name", ["dualpipe", "zb-v", "chimera", "gis"])
def test_a_replay_with_other_times_is_the_simulation_with_them(name: str) -> None:
    schedule, dice = make(name, 4, 8), Random(3)
    replay = Replay.of(schedule)
    for _ in range(5):
        columns = [[dice.uniform(0.5, 2) for _ in range(schedule.num_stages)] for _ in range(3)]
        costs = Costs.from_ms(*columns, 0.1, hidden=[dice.uniform(0, 1) for _ in range(schedule.num_stages)])
        assert replay.time(Objective.SPAN, costs) == simulate(schedule, costs).span


@pytest.mark.parametrize("objective", Objective)
def test_each_effect_is_the_simulation_with_that_time_off(objective: Objective) -> None:
    schedule = make("zb-h1", 4, 8)
    found = sensitivity(schedule, TIMES, 0.2, objective=objective, samples=1)

    def time(costs: Costs) -> int:
        return objective.of(simulate(schedule, costs))

    assert found.time == time(TIMES)
    for what, column, only in (
        ("every F", "forward", None),
        ("every W", "weight", None),
        ("every message", "comm", None),
        ("B of stage 2", "backward", 2),
        ("messages after stage 1", "comm", 1),
    ):
        assert effect(found, what) == (time(with_column(TIMES, column, 1.2, only)), time(with_column(TIMES, column, 0.8, only)))
    whole = TIMES
    for column in ("forward", "backward", "weight"):
        whole = with_column(whole, column, 1.2, 3)
    assert effect(found, "rank 3")[0] == time(whole)


def test_everything_slower_is_the_worst_and_scales_the_whole_plan() -> None:
    found = sensitivity(make("zb-h2", 4, 8), TIMES, 0.1, samples=30)
    assert found.worst == pytest.approx(1.1 * found.time, rel=1e-6)
    assert max(each.slower for each in found.effects) <= found.worst
    assert min(each.faster for each in found.effects) >= 0.9 * found.time * (1 - 1e-6)
    assert -0.1 <= found.profile.mean <= found.profile.worst <= 0.1 + 1e-6


def test_the_slow_rank_carries_the_plan_and_a_fast_one_nothing() -> None:
    slow = Costs.from_ms([1, 9, 1], [1, 9, 1], [1, 9, 1])
    found = sensitivity(make("zb-h2", 3, 12), slow, samples=1)
    weights = {each.what: found.weight(each) for each in found.effects}
    assert weights["rank 1"] > 0.95
    assert weights["W of stage 0"] == 0


def test_samples_are_those_of_the_seed_and_grow_with_the_error() -> None:
    schedule = make("zb-v", 3, 6)
    costs = Costs.uniform(6, (3, 3, 2), 0.1, stages_per_rank=2)
    assert sensitivity(schedule, costs, samples=5, seed=1) == sensitivity(schedule, costs, samples=5, seed=1)
    assert sensitivity(schedule, costs, samples=5, seed=1).jitter != sensitivity(schedule, costs, samples=5, seed=2).jitter
    small, large = (sensitivity(schedule, costs, error, samples=40).jitter for error in (0.02, 0.2))
    assert 0 < small.mean < large.mean < large.worst


def test_jitter_is_normal_around_what_was_measured() -> None:
    drawn = jittered([1_000_000] * 4000, 0.1, Random(0))
    assert fmean(drawn) == pytest.approx(1_000_000, rel=0.01)
    assert stdev(drawn) == pytest.approx(100_000, rel=0.05)


def test_memory_that_is_nearly_full_is_named() -> None:
    schedule, costs = make("zb-h1", 3, 6), Costs.uniform(3)
    peaks = peak_memory(schedule, costs)
    found = sensitivity(schedule, costs, 0.1, limits=Limits((peaks[0] * 2, peaks[1], round(peaks[2] * 1.05))), samples=1)
    assert found.spare == pytest.approx((1.0, 0.0, 0.05))
    assert found.crowded == (1, 2)
    assert sensitivity(schedule, costs, samples=1).crowded == ()


def test_only_the_named_times_are_scaled() -> None:
    assert scaled(TIMES, {("forward", 1): 2.0, ("comm", 0): 0.5}) == with_column(with_column(TIMES, "forward", 2, 1), "comm", 0.5, 0)


def test_the_json_form_tells_everything() -> None:
    schedule, costs = make("zb-h1", 2, 3), Costs.uniform(2)
    data = sensitivity(schedule, costs, limits=Limits((2_500_000, 4_000_000)), samples=2).to_dict()
    assert data["time"] == simulate(schedule, costs).span
    assert data["effects"][0] == {
        "scope": "kind",
        "what": "every F",
        "slower": 10_400_000,
        "faster": 9_700_000,
        "weight": pytest.approx(0.35),
    }
    assert data["spare"] == [0.25, 1.0]


@pytest.mark.parametrize("error", [0, 1, -0.1, float("nan")])
def test_an_error_that_is_no_share_is_refused(error: float) -> None:
    with pytest.raises(InputError, match=r"a share between 0 and 1, such as 0.1 for 10 %"):
        sensitivity(make("zb-h1", 2, 2), Costs.uniform(2), error)


def test_no_samples_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1 sample, got 0"):
        sensitivity(make("zb-h1", 2, 2), Costs.uniform(2), samples=0)


def test_the_text_shows_what_moves_the_plan_most_first_of_each_scope() -> None:
    slow = Costs.from_ms([1, 9, 1], [1, 9, 1], [1, 9, 1], 0.5)
    schedule = make("zb-h2", 3, 12)
    peaks = peak_memory(schedule, slow)
    text = what_if_text(sensitivity(schedule, slow, limits=Limits((peaks[0] * 2, peaks[1], peaks[2] * 2)), samples=3))
    lines = text.splitlines()
    assert lines[0].split() == ["off", "by", "10", "%", "longer", "shorter"]
    assert lines[5].startswith("rank 1 ")
    assert {line.split("  ")[0] for line in lines[8:11]} == {"F of stage 1", "B of stage 1", "W of stage 1"}
    assert lines[13].split() == ["everything", "+10.00", "%"]
    assert text.endswith("Memory: with activations larger by 10 % it does not do on 1 of 3 ranks; rank 1 has 0.00 % left.")


VERB = ["plan", "--ranks", "3", "--microbatches", "6", "--placement", "linear", "--memory", "3", "--budget", "0", "--what-if"]


def test_the_verb_tells_what_becomes_of_the_winner() -> None:
    told = CliRunner().invoke(main, [*VERB, "10"])
    assert told.exit_code == 0, told.output
    assert "off by 10 %" in told.stdout
    data = json.loads(CliRunner().invoke(main, [*VERB, "10", "--json"]).stdout)
    assert data["what_if"]["time"] == round(data["span_ms"] * 1_000_000)
    assert data["what_if"]["worst"] == pytest.approx(1.1 * data["what_if"]["time"])


@pytest.mark.parametrize("error", ["0", "100", "-3", "nan", "much"])
def test_the_verb_refuses_an_error_that_is_no_percentage(error: str) -> None:
    refused = CliRunner().invoke(main, [*VERB, error])
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)


def test_a_problem_without_a_plan_has_nothing_to_examine() -> None:
    schedule, costs = make("zb-h1", 2, 3), Costs.uniform(2)
    problem = Problem(schedule.placement, 3, costs, Limits((1, 1)))
    nothing = Solved(problem, Status.INFEASIBLE, Bound(0, "work"), None, None, 0.0, "", "rank 0 lacks 1 byte")
    with pytest.raises(InputError, match="there is no plan to examine: rank 0 lacks 1 byte"):
        what_if(nothing, 0.1)


def problem_of(schedule: Schedule, costs: Costs, objective: Objective = Objective.SPAN) -> Problem:
    """The problem whose memory `schedule` just fits."""
    return Problem(schedule.placement, schedule.num_microbatches, costs, Limits(peak_memory(schedule, costs)), objective)


@pytest.mark.parametrize("objective", Objective)
def test_the_steadiest_order_is_as_short_fits_and_stands_noise_better(objective: Objective) -> None:
    schedule = make("zb-h1", 4, 8)
    costs = Costs.uniform(4, (10, 10, 7), 0.2)
    problem = problem_of(schedule, costs, objective)
    steady = steadiest(problem, [schedule], error=0.1, tries=300)
    assert schedule_faults(steady) == ()
    assert memory_faults(steady, costs, problem.limits) == ()
    assert objective.of(simulate(steady, costs)) <= objective.of(simulate(schedule, costs))
    fresh = Noise.of([schedule], 0.1, 200, 99)
    assert fresh.mean(problem, Replay.of(steady)) < fresh.mean(problem, Replay.of(schedule))


def test_a_longer_candidate_is_not_taken_and_one_that_does_not_fit_neither() -> None:
    costs = Costs.uniform(3, (10, 10, 7), 0.2)
    short, long, large = make("zb-h1", 3, 6), make("1f1b", 3, 6), make("zb-h2", 3, 6)
    problem = problem_of(short, costs)
    assert steadiest(problem, [long, large, short], tries=0) is short
    with pytest.raises(InputError, match="none of the 1 candidates fits the memory limits"):
        steadiest(problem, [large], tries=0)


def test_a_plan_may_grow_by_the_share_allowed_and_stands_noise_better() -> None:
    costs = Costs.uniform(4, (10, 10, 7), 0.2)
    plain = make("zb-h1", 4, 8)
    problem = problem_of(plain, costs)
    steady = steadiest(problem, [plain], tries=300, allow=0.05)
    assert simulate(steady, costs).span <= 1.05 * simulate(plain, costs).span
    fresh = Noise.of([plain], 0.1, 200, 99)
    assert fresh.mean(problem, Replay.of(steady)) < fresh.mean(problem, Replay.of(plain))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_noise_is_the_same_for_every_order(seed: int) -> None:
    one, other = make("zb-h1", 3, 5), make("zb-h2", 3, 5)
    assert Noise.of([one], 0.1, 2, seed) == Noise.of([other], 0.1, 2, seed)
