"""Plans under noisy times: figures match the simulator exactly, and robust orders lose less.

Every sample of the compiled simulator equals the Python simulation of its own times.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from statistics import fmean, stdev
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from tests.pure.problems import problems
from tests.refusals import raises
from tests.thinned import every_of
from zerobubble import Costs, InputError, Limits, Op, Schedule, ScheduleError, make, schedule_faults, simulate
from zerobubble.bounds import Bound
from zerobubble.cli import main
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.noise.robust import RobustOrder, most_robust_order
from zerobubble.planning.noise.sensitivity import Sensitivity, jittered, scaled, sensitivity, what_if, what_if_text
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.replay import Replay
from zerobubble.simulation import memory_faults, peak_memory

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
@settings(max_examples=60, deadline=None)
def test_a_replay_is_the_simulation(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    timeline = simulate(schedule, costs)
    replay = Replay.from_schedule(schedule)
    assert replay.time(Objective.PERIOD, costs) == timeline.span
    assert replay.time(Objective.MAKESPAN, costs) == timeline.makespan


@pytest.mark.parametrize("name", ["dualpipe", "zb-v", "chimera", "gis"])
def test_a_replay_with_other_times_is_the_simulation_with_them(name: str) -> None:
    schedule, dice = make(name, 4, 8), Random(3)
    replay = Replay.from_schedule(schedule)
    for _ in range(5):
        columns = [[dice.uniform(0.5, 2) for _ in range(schedule.num_stages)] for _ in range(3)]
        costs = Costs.from_ms(*columns, 0.1, hidden=[dice.uniform(0, 1) for _ in range(schedule.num_stages)])
        assert replay.time(Objective.PERIOD, costs) == simulate(schedule, costs).span


@pytest.mark.parametrize("objective", Objective)
def test_each_effect_is_the_simulation_with_that_time_off(objective: Objective) -> None:
    schedule = make("zb-h1", 4, 8)
    found = sensitivity(schedule, TIMES, 0.2, objective=objective, samples=1)

    def time(costs: Costs) -> int:
        return objective.measure(simulate(schedule, costs))

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
    assert found.ranks_over_limit == (1, 2)
    assert sensitivity(schedule, costs, samples=1).ranks_over_limit == ()


def test_only_the_named_times_are_scaled() -> None:
    assert scaled(TIMES, {("forward", 1): 2.0, ("comm", 0): 0.5}) == with_column(with_column(TIMES, "forward", 2, 1), "comm", 0.5, 0)


def test_the_json_form_shows_everything() -> None:
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
    with raises(InputError, "share", "10 %", got=error):
        sensitivity(make("zb-h1", 2, 2), Costs.uniform(2), error)


def test_no_samples_are_refused() -> None:
    with raises(InputError, 1, 0, "samples"):
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
    assert text.endswith("Memory: activations 10 % larger would not fit on 1 of 3 ranks; rank 1 has 0.00 % of its memory left.")


VERB = ["plan", "--ranks", "3", "--microbatches", "6", "--placement", "linear", "--memory", "3", "--budget", "0", "--what-if"]


def test_the_verb_shows_what_becomes_of_the_winner() -> None:
    output = CliRunner().invoke(main, [*VERB, "10"])
    assert output.exit_code == 0, output.output
    assert "off by 10 %" in output.stdout
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
    nothing = Plan(problem, Status.INFEASIBLE, Bound(0, "work"), None, None, 0.0, "", "rank 0 lacks 1 byte")
    with raises(InputError, "rank 0", 1):
        what_if(nothing, 0.1)


def problem_of(schedule: Schedule, costs: Costs, objective: Objective = Objective.PERIOD) -> Problem:
    """The problem whose memory `schedule` just fits."""
    return Problem(schedule.placement, schedule.num_microbatches, costs, Limits(peak_memory(schedule, costs)), objective)


PLAIN, NOISE = Costs.uniform(4, (10, 10, 7), 0.2), 0.1


def mean_under_noise(problem: Problem, schedule: Schedule) -> float:
    """The mean objective in ns, played in plain Python with each pass taking its own time."""
    replay, dice = Replay.from_schedule(schedule), Random(99)
    drawn = [{op: max(0.0, dice.gauss(1, NOISE)) for op in sorted(op for _, _, op in schedule.ops())} for _ in range(200)]
    measured = replay.durations(problem.costs)

    def once(factors: dict[Op, float]) -> int:
        durations = [round(time * factors[step[0]]) if step else 0 for step, time in zip(replay.steps, measured, strict=True)]
        return replay.play(problem.objective, durations, problem.costs.comm)

    return fmean(map(once, drawn))


def tried(problem: Problem, candidates: list[Schedule], evaluations: int = 20_000, seed: int = 0) -> RobustOrder:
    return most_robust_order(problem, candidates, error=NOISE, evaluations=evaluations, seed=seed)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("name", ["zb-h1", "v-half", "interleaved-zb"])
def test_every_sample_is_played_as_the_plain_player_plays_its_times(name: str, objective: Objective) -> None:
    """The compiled player's axis of noise: each column is the play of its own times, and the first that of the measured ones."""
    from zerobubble.planning.kernels import robust_anneal
    from zerobubble.planning.kernels.entry_points import order_of, tables_of

    schedule = make(name, 4, 8)
    problem = problem_of(schedule, Costs.uniform(schedule.num_stages, (10, 10, 7), 0.2), objective)
    tables, replay = tables_of(problem), Replay.from_schedule(schedule)
    sampled = robust_anneal.draw_samples(tables, 0.3, (1,))
    rows, _ = robust_anneal.play_sampled(tables, sampled, order_of(schedule))
    compiled = (sampled.work + rows.idle[tables.ranks["stop"] - 1]).max(axis=0)
    first = {kind: number * schedule.num_stages for number, kind in enumerate("FBW")}
    passes = [(first[str(op.kind)] + op.stage) * schedule.num_microbatches + op.microbatch for op, *_ in filter(None, replay.steps)]
    assert len(passes) == len(replay.steps)
    plain = [replay.play(objective, list(map(int, times[passes])), problem.costs.comm) for times in sampled.duration.T]
    assert plain == list(map(int, compiled))
    assert plain[0] == objective.measure(simulate(schedule, problem.costs)) != plain[1]


@pytest.mark.parametrize(("name", "objective"), every_of(3, ["zb-h1", "v-half"], Objective))
def test_the_steadiest_order_is_as_short_fits_and_stands_noise_better(name: str, objective: Objective) -> None:
    schedule = make(name, 4, 8)
    costs = Costs.uniform(schedule.num_stages, (10, 10, 7), 0.2)
    problem = problem_of(schedule, costs, objective)
    found = tried(problem, [schedule])
    assert schedule_faults(found.schedule) == ()
    assert memory_faults(found.schedule, costs, problem.limits) == ()
    assert (found.before.measured, found.after.measured) == tuple(objective.measure(simulate(s, costs)) for s in (schedule, found.schedule))
    assert found.after.measured <= found.before.measured
    before, after = (mean_under_noise(problem, order) for order in (schedule, found.schedule))
    assert (found.before.noisy, found.after.noisy) == (pytest.approx(before, rel=0.005), pytest.approx(after, rel=0.005))
    assert after < 0.997 * before
    assert found.gain == pytest.approx(1 - after / before, abs=0.003)


def test_with_evaluations_the_steadiest_is_that_of_the_seed() -> None:
    schedule = make("zb-h1", 4, 8)
    problem = problem_of(schedule, PLAIN)
    assert tried(problem, [schedule], 500, seed=1) == tried(problem, [schedule], 500, seed=1)
    assert tried(problem, [schedule], 500, seed=1).before != tried(problem, [schedule], 500, seed=2).before


def test_an_order_that_nothing_improves_is_given_back() -> None:
    """One pass at a time and nobody waits for anything: noise adds up the same in every order."""
    schedule = make("zb-h1", 1, 4)
    found = tried(problem_of(schedule, Costs.uniform(1)), [schedule], 300)
    assert found.schedule == schedule
    assert found.before == found.after
    assert found.gain == 0


def test_of_orders_equally_short_the_one_that_stands_noise_better_is_taken_and_no_longer_one() -> None:
    long, short = make("1f1b", 4, 8), make("zb-h1", 4, 8)
    problem = problem_of(short, PLAIN)
    robust = tried(problem, [short]).schedule
    assert simulate(robust, PLAIN).span == simulate(short, PLAIN).span < simulate(long, PLAIN).span
    found = tried(problem, [long, short, robust], 0)
    assert found.schedule.rows == robust.rows
    assert found.before.measured == simulate(short, PLAIN).span


def test_candidates_that_cannot_be_compared_are_refused() -> None:
    short, large, stopped = make("zb-h1", 3, 6), make("zb-h2", 3, 6), make("zb-h1", 3, 6)
    stopped = replace(stopped, rows=(stopped.rows[0][::-1], *stopped.rows[1:]))
    problem = problem_of(short, Costs.uniform(3, (10, 10, 7), 0.2))
    with raises(InputError, 1, "candidates", "memory"):
        tried(problem, [large])
    with raises(InputError, "zb-h1", "candidate", "placement"):
        tried(problem, [make("zb-h1", 3, 7)])
    with raises(ScheduleError, "zb-h1"):
        tried(problem, [stopped])
    with raises(InputError, "share", got=1.5):
        most_robust_order(problem, [short], error=1.5)


def test_ctrl_c_ends_the_annealing_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerobubble.planning.kernels import robust_anneal

    schedule = make("zb-h1", 4, 8)
    problem = problem_of(schedule, PLAIN)
    whole = tried(problem, [schedule], 500)

    anneal_from_best = robust_anneal.anneal_from_best

    def interrupted(*args: Any) -> None:
        anneal_from_best(*args)
        if args[-1].evaluations == 500:
            raise KeyboardInterrupt

    monkeypatch.setattr(robust_anneal, "anneal_from_best", interrupted)
    assert tried(problem, [schedule], 500) == whole
