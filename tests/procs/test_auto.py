"""`schedule="auto"`: training starts at once, a plan follows during training, and a new one when pass times change.

A plan is advice: no failure of the planner's process stops training.
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.ranks import Ranks
from tests.procs.test_profile import Doze
from tests.refusals import raises, states
from zerobubble.planning import background
from zerobubble.replanning import auto
from zerobubble.replanning.measured_choice import BLOCK

M = 6
LONGEST_S = 200.0
"""How long a plan is waited for; on a busy machine it takes a minute to load what searches."""


def dozing(stage: int, num_stages: int, pace: float = 1.0) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Doze(pace * (2.0 if stage == 1 else 0.5))).double()


def data(step: int) -> Tensor:
    return torch.randn(2 * M, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def reference(num_stages: int, steps: int) -> list[tuple[float, list[Tensor]]]:
    """Loss and first-stage gradients of one device, step by step."""
    modules = [nn.Sequential(*[part for part in dozing(s, num_stages).children() if not isinstance(part, Doze)]) for s in range(num_stages)]  # type: ignore[arg-type]
    model, found = nn.Sequential(*modules), []
    for step in range(steps):
        total = 0.0
        for x in data(step).chunk(M):
            loss = nn.functional.mse_loss(model(x), x) / M
            loss.backward()
            total += loss.item()
        found.append((total, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    return found


def train(group: Any, placement: str, limit: int | None) -> tuple[list[str], int, Any]:
    """Step until there is a plan, then slow one stage down until there is another; compares every step with one device."""
    names: list[str] = []
    plans: list[dict[str, Any]] = []
    long = partial(dozing, pace=6.0)  # so long that the delay until a busy machine wakes a sleeper is short in comparison
    with ExitStack() as stack:
        for owner, name, value in ((auto, "SECONDS", 1.0), (auto, "REVIEW", 2), (background, "NICENESS", 0)):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.object(auto, "how_late", return_value=0.0))  # whatever else the machine does
        pipe = stack.enter_context(zb.Pipeline(long, zb.Auto(placement, limit), M, nn.functional.mse_loss, group=group))
        names.append(pipe.schedule.name)
        wanted = reference(pipe.schedule.num_stages, 1)[0]
        end = time.monotonic() + LONGEST_S
        while len(plans) < 3 and time.monotonic() < end:
            loss = pipe.step(data(0), data(0))
            assert abs(loss.item() - wanted[0]) < 1e-12
            mine = {id(p): k for k, p in enumerate(p for s in range(pipe.schedule.num_stages) for p in _of(pipe, s))}
            for parameter in pipe.parameters():
                assert parameter.grad is not None
                assert torch.allclose(parameter.grad, wanted[1][mine[id(parameter)]], rtol=1e-12, atol=1e-14)
                parameter.grad = None
            if pipe.schedule.name != names[-1]:
                names.append(pipe.schedule.name)
            if pipe.plan is not None and (not plans or pipe.plan.to_dict() != plans[-1]):
                plans.append(pipe.plan.to_dict())
                if len(plans) == 2:
                    for module in pipe.modules.values():
                        module[2].units *= 3  # type: ignore[index,union-attr,operator]
        assert len(plans) == 3, f"{len(plans)} plans in {LONGEST_S:g} s"
        assert pipe.plan is not None
        found = pipe.memory_forecast(pipe.plan.problem.costs)
        assert limit is None or max(rank.total for rank in found) <= limit
        assert found[pipe.rank].messages == pipe.transport.held_bytes
        return names, len(plans), [plan["costs"] for plan in plans]


def _of(pipe: zb.Pipeline, stage: int) -> list[Any]:
    """The parameters of a stage; placeholders for stages of other ranks."""
    return list(pipe.modules[stage].parameters()) if stage in pipe.modules else [object(), object()]


@pytest.mark.long
@pytest.mark.parametrize(("placement", "limit"), [("linear", None), ("vee", 20_000)])
def test_training_continues_while_it_plans_and_replans_for_slower_stages(world: Ranks, placement: str, limit: int | None) -> None:
    first, *others = world.run(train, placement, limit, ranks=4, seconds=2 * LONGEST_S)
    assert all(other == first for other in others), "all ranks follow the same plans"
    names, _, costs = first
    assert names[0] == "one by one"
    assert costs[0] == costs[1], "the published schedule and the plan are for the same costs"
    slower = [now / was for was, now in zip(costs[1]["forward"], costs[2]["forward"], strict=True)]
    assert all(2 < ratio < 4.5 for ratio in slower), slower
    assert costs[1]["held_after_f"] == costs[2]["held_after_f"]


def refused(group: Any, options: zb.Auto) -> str:
    pipe = None
    try:
        pipe = zb.Pipeline(dozing, options, M, nn.functional.mse_loss, group=group)
        for _ in range(4):
            pipe.step(data(0), data(0))
    except zb.ZeroBubbleError as error:
        return str(error)
    finally:
        if pipe is not None:
            pipe.close()
    return ""


@pytest.mark.parametrize(
    ("given", "argument"),
    [({"memory": 1e9}, "memory"), ({"memory": "lots"}, "memory"), ({"placement": 7}, "placement")],
)
def test_invalid_memory_and_placements_are_refused_at_once(given: Any, argument: str) -> None:
    with raises(zb.InputError, argument=f"{argument} of Auto"):
        zb.Auto(**given)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (zb.Auto(memory=10), "no schedule fits into the memory limit"),
        pytest.param(
            zb.Auto(memory=2000),
            "the memory limit, of which messages take 1344, 2688, 2688, 1344 bytes on the ranks in turn",
            marks=cpu_only("messages take memory in the rings of CPUs"),
        ),
        (zb.Auto(memory=[1000, 1000]), "the bytes of each of 4 ranks"),
        (zb.Auto("lineer"), "did you mean 'linear'"),
        (zb.Auto(zb.make("chimera", 4, 4).placement), "give its schedule by name"),
    ],
)
def test_what_cannot_be_planned_is_refused_on_every_rank(world: Ranks, options: zb.Auto, words: str) -> None:
    for said in world.run(refused, options, ranks=4):
        assert words in said


class Heard(logging.Handler):
    """The warnings of the package on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train_on(group: Any, steps: int, warnings: int, **patches: Any) -> tuple[list[str], list[str]]:
    """Run steps with parts of the planner replaced, at least `steps` and until rank 0 has enough warnings; compares losses with one device.

    Returns the warnings of this rank and the schedules."""
    heard = Heard()
    logger = logging.getLogger("zerobubble")
    logger.addHandler(heard)
    names: list[str] = []
    wanted = reference(2, 1)[0][0]
    with ExitStack() as stack:
        stack.callback(logger.removeHandler, heard)
        for name, value in patches.items():
            module = background if hasattr(background, name) else auto
            stack.enter_context(mock.patch.object(module, name, value))
        pipe = stack.enter_context(zb.Pipeline(dozing, "auto", M, nn.functional.mse_loss, group=group))
        end = time.monotonic() + LONGEST_S
        while steps > 0 or is_first_true(group, len(heard.texts) < warnings and time.monotonic() < end):
            steps -= 1
            assert abs(pipe.step(data(0), data(0)).item() - wanted) < 1e-12
            names += [pipe.schedule.name] * (pipe.schedule.name not in names)
    return heard.texts, names


def is_first_true(group: Any, mine: bool) -> bool:
    """Rank 0's value, on every rank."""
    said = torch.tensor([float(mine)])
    dist.broadcast(said, 0, group=group)
    return bool(said)


def failing(group: Any, program: str, margin: float) -> tuple[list[str], list[str]]:
    """Pass times seem to change all the time, so that new plans are requested repeatedly from a process that runs `program`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.py")
        file.write_text(program)
        return train_on(group, 8, auto.MOST_FAILURES, PROGRAM=file, MARGIN_S=margin, SECONDS=0.1, REVIEW=1, DRIFT=-1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise ValueError('boom')", "its process ended with code 1: .*boom"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its process was killed by SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "its process gave no answer in 0.6 s"),
        ("print('{garbage')", "its process ended without a plan that can be read"),
    ],
    ids=["crashing", "killed", "frozen", "garbage"],
)
def test_a_planner_that_fails_is_advice_that_does_not_come(world: Ranks, program: str, words: str) -> None:
    """The planner fails three times; the rank that started it warns once per failure. Then no more searches start."""
    (warned, names), (others, same) = world.run(failing, program, 0.5 if "SIGSTOP" in program else 60.0, ranks=2, seconds=2 * LONGEST_S)
    assert len(warned) == auto.MOST_FAILURES
    assert others == []
    for text in warned:
        assert re.search(f"a search for a plan failed, and training continues with '{names[-1]}'; .*: {words}", text), text
    assert ["no more searches start" in text for text in warned] == [False, False, True]
    assert names == same
    assert names[0] == "one by one"
    assert len(names) == 2, "the published schedule stays"


def unable(group: Any, ranks: list[int], steps: int) -> tuple[list[str], list[str]]:
    """Some ranks cannot compare the published schedules."""

    def solve(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    return train_on(group, steps, 0, **({"solve": solve} if group.rank() in ranks else {}))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [[0], [1]])
def test_a_rank_that_cannot_compare_schedules_follows_one_that_can(world: Ranks, ranks: list[int]) -> None:
    outcomes = world.run(unable, ranks, 5, ranks=2)
    for rank, (warned, names) in enumerate(outcomes):
        assert len(names) == 2
        assert names == outcomes[0][1]
        wanted = [f"the published schedules could not be compared on rank {rank}: MemoryError: no room"]
        assert warned == (wanted if rank in ranks else [])


def test_without_comparison_on_any_rank_microbatches_run_one_by_one(world: Ranks) -> None:
    for warned, names in world.run(unable, [0, 1], 5, ranks=2):
        assert names[0] == "one by one"
        assert len(warned) == 1


def test_memory_limits_that_differ_are_reported(world: Ranks) -> None:
    for said in world.run(limited_apart, ranks=2):
        states(said, "rank 0", 20000, "rank 1", 30000)


def limited_apart(group: Any) -> str:
    return refused(group, zb.Auto(memory=[20_000, 20_000 + 10_000 * group.rank()]))


def test_costs_are_corrected_by_what_was_measured() -> None:
    planned = zb.Costs.from_ms([1, 1], [2, 2], [1, 1], 0.5, [7, 7], [3, 3])
    fused = zb.simulate(zb.make("1f1b", 2, 4), zb.Costs.from_ms([2, 1], [3, 2], [1.5, 1]))
    now = auto.corrected(planned, fused)
    assert now == zb.Costs.from_ms([2, 1], [3, 2], [1.5, 1], 0.5, [7, 7], [3, 3]), "a fused stage is scaled as a whole"
    assert auto.how_far(planned, [now]) == 1.0
    apart = zb.simulate(zb.make("zb-h1", 2, 4), zb.Costs.from_ms([1, 1], [2, 1], [1, 2]))
    assert auto.corrected(planned, apart).weight == (1_000_000, 2_000_000)
    assert auto.how_far(planned, [auto.corrected(planned, apart)]) == 0.0, "B and W together take what they took"


def test_delays_of_messages_are_relative_to_the_passes_of_a_stage() -> None:
    """A stage takes 4 ms for F, B and W together, and a message comes 1 ms late."""
    planned, found = (zb.Costs.from_ms([1, 1], [2, 2], [1, 1], comm) for comm in (0.5, 1.5))
    assert auto.how_late(planned, [found]) == 1 / 4
    assert auto.how_late(planned, [found] * 3 + [planned]) == 1 / 4
    assert auto.how_late(planned, [found] * 2 + [planned] * 2) == 0
    assert auto.how_late(planned, [planned]) == 0


def test_no_more_searches_start_after_three_failures() -> None:
    schedule = zb.make("zb-h1", 2, 4)
    planner = auto.AutoPlanner(zb.Auto(), 2, 4)
    planner._problem = zb.planning.Problem(schedule.placement, 4, zb.Costs.uniform(2), zb.Limits((1, 1)))
    with mock.patch.object(auto, "BackgroundPlanner", side_effect=background.PlannerError) as starts:
        assert [planner._search() for _ in range(5)] == [(True, None)] * 5
    assert starts.call_count == 3


def test_a_plan_is_reviewed_after_so_many_steps_with_it() -> None:
    planner = auto.AutoPlanner(zb.Auto(), 2, 4)
    planner._pipeline, planner._problem = mock.Mock(), mock.Mock()
    with mock.patch.multiple(auto, REVIEW=5), mock.patch.object(planner, "_review", return_value=None) as reviews:
        counts = []
        for _ in range(6):
            planner._after_step()
            counts.append(reviews.call_count)
    assert counts == [0, 0, 0, 0, 1, 2]


def test_plans_may_take_what_messages_leave_and_at_least_a_byte() -> None:
    schedule = zb.make("zb-h1", 2, 4)
    planner = auto.AutoPlanner(zb.Auto(memory=[100, 30]), 2, 4)
    planner._problem = zb.planning.Problem(schedule.placement, 4, zb.Costs.uniform(2), zb.Limits((1000, 1000)))
    assert planner._problem_after_messages([mock.Mock(messages=30), mock.Mock(messages=30)]).limits.memory == (70, 1)


@pytest.mark.parametrize(("fitting", "taken"), [((True,), 0), ((False, True), 1), ((False, False), None)])
def test_the_best_published_schedule_is_searched_again_if_its_messages_do_not_fit(fitting: tuple[bool, ...], taken: int | None) -> None:
    planner, found = auto.AutoPlanner.__new__(auto.AutoPlanner), [object() for _ in fitting]
    with mock.patch.multiple(planner, _best_published=mock.Mock(side_effect=found), _fits=mock.Mock(side_effect=fitting)):
        assert planner._published_that_fits() is (None if taken is None else found[taken])


def test_a_window_of_slow_steps_starts_a_search(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    schedule, costs = zb.make("zb-h1", 2, 4), zb.Costs.from_ms([1, 1], [1, 1], [1, 1])
    problem = zb.planning.Problem(schedule.placement, 4, costs, zb.Limits((8_000_000,) * 2))
    planner = auto.AutoPlanner(zb.Auto(), 2, 4)
    planner._problem, planner.plan = problem, zb.planning.solve(problem, evaluations=0)
    monkeypatch.setattr(auto.AutoPlanner, "_objective", problem.objective)
    monkeypatch.setattr(auto.AutoPlanner, "_wait", lambda planner: schedule)
    planned, slow = zb.simulate(schedule, costs), zb.simulate(schedule, zb.Costs.from_ms([1.5, 1], [1, 1], [1, 1]))
    with caplog.at_level(logging.INFO, "zerobubble"):
        steps = [slow, slow, planned, *[slow] * auto.WINDOW]
        assert [planner._review(each) for each in steps] == [*[None] * (len(steps) - 1), schedule]
    assert [record.args for record in caplog.records] == [(50.0,)]
    assert planner._patience == 2


def planner_for(memory: Any = None, ranks: int = 2, microbatches: int = 4) -> tuple[Any, zb.Plan]:
    """A planner with a problem and a plan for it, whose pipeline is that of its only rank: what it gathers comes from it alone."""
    planner = auto.AutoPlanner(zb.Auto(memory=memory), ranks, microbatches)
    costs = zb.Costs.from_ms([1] * ranks, [1] * ranks, [1] * ranks)
    problem = zb.planning.Problem(planner.schedule.placement, microbatches, costs, zb.Limits((100_000_000,) * ranks))
    planner._problem = problem
    planner._pipeline = mock.Mock(rank=0, ranks_meet=True)
    planner._pipeline.gather = lambda mine, doing: [mine]
    return planner, zb.planning.solve(problem, evaluations=0)


def forecasts(*totals: int, messages: int = 10) -> list[Any]:
    return [mock.Mock(total=total, messages=messages) for total in totals]


def test_a_plan_fits_if_each_rank_has_the_memory_for_it() -> None:
    planner, plan = planner_for()
    assert planner._fits(plan)
    planner, plan = planner_for([100_000, 200_000])
    found, before = [], planner._problem
    for totals in ((100_000, 200_000), (100_001, 200_000), (100_000, 200_001), (0, 0)):
        planner._pipeline.memory_forecast_of.return_value = forecasts(*totals)
        found.append(planner._fits(plan))
    assert found == [True, False, False, True]
    assert planner._problem == before, "what messages leave would be too little for any schedule"
    planner, plan = planner_for(200_000_000)
    planner._pipeline.memory_forecast_of.return_value = forecasts(200_000_001, 1, messages=70_000_000)
    assert not planner._fits(plan)
    assert planner._problem.limits.memory == (130_000_000,) * 2


def test_candidates_for_bad_links_are_the_current_and_the_published_schedules_without_w() -> None:
    planner, plan = planner_for()
    samples, current = [auto.Sample(1, plan.costs)], planner._as_plan(plan, planner.schedule, "as before")
    with mock.patch.object(auto, "NOISE", 10.0):
        candidates = planner._candidates(plan, current, samples)
        assert candidates[:2] == [current, plan]
        assert [each.how for each in candidates[2:]] == ["published"] * (len(candidates) - 2)
        assert {"1f1b", "gpipe"} <= {each.schedule.name for each in candidates}
        assert not any(each.schedule.split_stages for each in candidates[2:])
        rows = [each.schedule.rows for each in candidates]
        assert len(rows) == len(set(rows))
        with mock.patch.object(planner, "_fits", side_effect=lambda each: each.schedule.name == "1f1b"):
            assert [each.schedule.name for each in planner._candidates(plan, None, samples)] == [plan.schedule.name, "1f1b"]
    with mock.patch.object(auto, "NOISE", 0.0):
        assert planner._candidates(plan, current, samples) == [current, plan], "the published ones are slower"


def test_a_change_is_a_schedule_with_other_rows(caplog: pytest.LogCaptureFixture) -> None:
    planner, _ = planner_for()
    planner._problem = replace(planner._problem, objective=zb.planning.Objective.MAKESPAN)
    plan = zb.planning.solve(planner._problem, evaluations=0)
    with caplog.at_level(logging.INFO, "zerobubble"):
        assert planner._change(plan) == plan.schedule
    (logged,) = caplog.records
    assert plan.bubble
    assert logged.args == (plan.schedule.name, 100 * plan.bubble, 100 * plan.least_bubble)
    assert planner.plan is plan
    again = zb.planning.solve(planner._problem, evaluations=0)
    assert planner._change(again) is None
    assert planner.plan is again


def test_a_search_is_waited_for_and_its_plan_taken_if_it_fits() -> None:
    planner, plan = planner_for()
    planner._is_waiting, planner._steps = True, 7
    with mock.patch.object(planner, "_search", return_value=(False, None)):
        assert planner._wait() is None
    assert (planner._is_waiting, planner._steps) == (True, 7)
    with mock.patch.object(planner, "_search", return_value=(True, None)):
        assert planner._wait() is None
    assert (planner._is_waiting, planner._steps) == (False, 0)
    assert planner.plan is None
    with mock.patch.object(planner, "_search", return_value=(True, plan.to_dict())):
        with mock.patch.object(planner, "_fits", return_value=False):
            assert planner._wait() is None
        assert planner.plan is None
        planner._window = [auto.Sample(1, plan.costs)]
        assert planner._wait().rows == plan.schedule.rows
        planner._has_bad_links, planner._window = True, [auto.Sample(1, plan.costs)]
        planner.schedule = zb.make("1f1b", 2, 4)
        assert planner._wait() is None, "the current schedule is measured first"
    assert planner._choice is not None
    assert planner.plan.schedule == planner.schedule


def test_other_ranks_take_what_the_first_has_found() -> None:
    planner, plan = planner_for()
    gathered: list[Any] = []
    planner._pipeline.rank, planner._window = 1, [auto.Sample(1, plan.costs)]
    planner._pipeline.gather = lambda mine, doing: gathered.append(mine) or [(True, plan.to_dict()), mine]
    with mock.patch.object(planner, "_search") as search:
        assert planner._wait().rows == plan.schedule.rows
    assert gathered == [None]
    assert not search.called


def test_a_measured_choice_plays_each_candidate_and_ends_with_the_fastest() -> None:
    planner, plan = planner_for()
    planner._patience = 4
    planner._choice = choice = auto.MeasuredChoice([plan, planner._as_plan(plan, planner.schedule, "as before")])
    played = []
    while planner._choice is not None:
        played.append(choice.next.schedule.name)
        makespan = 5 if choice.next.schedule.rows == plan.schedule.rows else 4
        planner._pipeline.timeline.return_value = mock.Mock(makespan=makespan)
        planner._after_step()
    names = (plan.schedule.name, planner.schedule.name)
    assert played == [names[place] for place in (0, 1, 1, 0) for _ in range(BLOCK)]
    assert planner._patience == 1
    assert planner.plan.schedule.name == "one by one"


@pytest.mark.parametrize(
    ("rank", "found_on", "source"), [(0, (True, True), 0), (1, (True, True), 0), (1, (False, True), 1), (0, (False, True), 1)]
)
def test_the_first_rank_that_compared_the_published_schedules_shares_the_best(rank: int, found_on: tuple[bool, ...], source: int) -> None:
    planner, plan = planner_for()
    shared: list[Any] = []

    def gather(mine: Any, doing: str) -> list[Any]:
        shared.append(mine)
        return list(found_on) if isinstance(mine, bool) else [plan.to_dict() if number == source else None for number in range(2)]

    planner._pipeline.rank, planner._pipeline.gather = rank, gather
    with mock.patch.object(auto, "solve", side_effect=None if found_on[rank] else ValueError, return_value=plan):
        best = planner._best_published()
    assert best.schedule.rows == plan.schedule.rows
    assert shared[0] is found_on[rank]
    assert (shared[1] is not None) == (rank == source)


def test_without_a_published_schedule_on_any_rank_there_is_none() -> None:
    planner, _ = planner_for()
    with mock.patch.object(auto, "solve", side_effect=ValueError):
        assert planner._best_published() is None


def test_a_plan_is_saved_and_loaded_where_it_fits() -> None:
    planner, plan = planner_for()
    assert planner.state_dict() == {}
    planner.plan = plan
    saved = planner.state_dict()
    other, _ = planner_for()
    other._problem, other._is_waiting, other._choice = None, True, mock.Mock()
    other.check_state_dict(saved)
    other.load_state_dict(saved)
    assert other.plan.schedule.rows == other.schedule.rows == plan.schedule.rows
    assert (other._problem, other._is_waiting, other._choice) == (plan.problem, False, None)
    ((schedule, costs), _) = other._pipeline.change_schedule.call_args
    assert (schedule.rows, costs) == (plan.schedule.rows, plan.problem.costs)
    other.load_state_dict(saved)
    assert other._pipeline.change_schedule.call_count == 1
    for ranks, microbatches in ((4, 4), (2, 6)):
        with raises(zb.InputError, planned_microbatches=4, microbatches_here=microbatches, placement_here=str(zb.Placement.linear(ranks))):
            planner_for(ranks=ranks, microbatches=microbatches)[0].check_state_dict(saved)


def test_a_better_schedule_is_played_with_the_costs_of_its_plan() -> None:
    planner, plan = planner_for()
    planner._pipeline.activity.return_value = ExitStack()
    with mock.patch.object(planner, "_after_step", side_effect=[None, plan.schedule]):
        planner.on_step_end(mock.Mock())
        assert not planner._pipeline.change_schedule.called
        planner.plan = plan
        planner.on_step_end(mock.Mock())
    planner._pipeline.change_schedule.assert_called_once_with(plan.schedule, plan.problem.costs)


def test_bytes_are_counted_in_the_first_step_alone() -> None:
    planner = auto.AutoPlanner(zb.Auto(), 2, 4)
    measures = []
    for measured, problem, asked in (
        ([], None, False),
        ([mock.Mock()], None, False),
        ([], mock.Mock(), False),
        ([mock.Mock()], None, True),
    ):
        planner._measured, planner._problem = measured, problem
        step = mock.Mock(measures_memory=asked)
        planner.on_step_begin(step)
        measures.append(step.measures_memory)
    assert measures == [True, False, False, True]


def test_late_messages_lengthen_a_link_and_start_a_search(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    planner, plan = planner_for()
    planner.plan = plan
    monkeypatch.setattr(auto.AutoPlanner, "_wait", lambda planner: plan.schedule)
    timeline = zb.simulate(plan.schedule, plan.problem.costs)
    with mock.patch.object(auto, "late_messages", return_value=(3_000_000,)) as late, caplog.at_level(logging.INFO, "zerobubble"):
        assert [planner._review(timeline) for _ in range(auto.WINDOW)] == [*[None] * (auto.WINDOW - 1), plan.schedule]
        assert [record.args for record in caplog.records] == [(100.0,)], "3 ms late, and a stage takes 3 ms for its passes"
        assert planner._has_bad_links
        assert planner._problem.costs.comm == (3_000_000,)
        late.return_value = (1_000_000,)
        assert auto.corrected(planner._problem.costs, timeline).comm == (3_000_000,), "a link is not taken to have become faster"
        late.return_value = (None,)
        assert auto.corrected(planner._problem.costs, timeline).comm == (3_000_000,)


def test_a_drift_up_to_the_threshold_is_none_if_there_is_a_plan() -> None:
    planner, plan = planner_for()
    timeline = zb.simulate(plan.schedule, plan.problem.costs)
    with mock.patch.object(planner, "_wait", return_value=plan.schedule), mock.patch.object(auto, "how_far", return_value=auto.DRIFT):
        planner.plan, planner._steps = plan, 60
        assert [planner._review(timeline) for _ in range(3)] == [None] * 3
        assert planner._steps == 0
        planner.plan = None
        assert [planner._review(timeline) for _ in range(auto.WINDOW)] == [*[None] * (auto.WINDOW - 1), plan.schedule]


def test_the_objective_is_that_of_ranks_that_meet_or_do_not() -> None:
    planner, _ = planner_for()
    assert planner._objective is zb.planning.Objective.MAKESPAN
    planner._pipeline.ranks_meet = False
    assert planner._objective is zb.planning.Objective.PERIOD


def race(group: Any) -> tuple[list[str], str, set[str]]:
    """Step until a plan for a link with late messages has been compared with other schedules; every step has the loss of one device."""
    wanted, names = reference(2, 1)[0][0], set[str]()
    with ExitStack() as stack:
        for owner, name, value in ((auto, "SECONDS", 0.3), (auto, "REVIEW", 2), (auto, "NOISE", 1e9), (background, "NICENESS", 0)):
            stack.enter_context(mock.patch.object(owner, name, value))
        late = stack.enter_context(mock.patch.object(auto, "late_messages", return_value=(None,)))
        pipe = stack.enter_context(zb.Pipeline(dozing, "auto", M, nn.functional.mse_loss, group=group))
        end, how = time.monotonic() + LONGEST_S, ""
        while "measured" not in how and is_first_true(group, time.monotonic() < end):
            if pipe.plan is not None and pipe.plan.how != "published":
                late.return_value = (60_000_000,)
            assert abs(pipe.step(data(0), data(0)).item() - wanted) < 1e-12
            how = pipe.plan.how if pipe.plan is not None else ""
            names |= {pipe.schedule.name} if pipe.plan is not None and pipe.plan.problem.costs.comm == (60_000_000,) else set()
        assert pipe.plan is not None
        return [str(row) for row in pipe.schedule.rows], how, names


@pytest.mark.long
def test_a_plan_for_bad_links_has_to_be_faster_than_1f1b(world: Ranks) -> None:
    """It takes turns with the previous schedule and the published ones without W, and all ranks agree on the winner."""
    first, *others = world.run(race, ranks=2, seconds=2 * LONGEST_S)
    assert others == [first]
    _, how, names = first
    states(how, "measured")
    assert {"1f1b", "gpipe"} & names
    assert len(names) >= 2
