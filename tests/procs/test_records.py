"""The records of a step: messages, the optimizer, live figures; recording can be switched off."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.measured import assert_least_within
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from zerobubble.timeline import Doing, messages


def record(group: Any, name: str) -> tuple[zb.Timeline, zb.Timeline]:
    """The timelines of a recorded step with its optimizer, and of one after it with neither."""
    with zb.Pipeline(build, name, 4, loss_fn, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
        for _ in range(2):
            pipe.step(*batch(4))
        with pipe.recording_optimizer():
            optimizer.step()
        recorded = pipe.timeline()
        pipe.recording = False
        pipe.step(*batch(4))
        return recorded, pipe.timeline()


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_every_message_and_the_optimizer_are_recorded(world: Ranks, name: str) -> None:
    (recorded, bare), *others = world.run(record, name, ranks=2)
    assert others == [(recorded, bare)], "one timeline on every rank"
    assert zb.Timeline.from_dict(recorded.to_dict()) == recorded
    sent, taken = ([[m for m in row if m.doing is doing] for row in recorded.marks] for doing in (Doing.SEND, Doing.WAIT))
    expected = list(messages(recorded))
    for rank in range(2):
        assert sorted(m.value for m in sent[rank]) == sorted(str(m.value) for m in expected if m.source == rank)
        assert sorted(m.value for m in taken[rank]) == sorted(str(m.value) for m in expected if m.destination == rank)
    marks = {(m.doing, m.value): m for row in recorded.marks for m in row}
    for message in expected:
        put, wait = marks[Doing.SEND, str(message.value)], marks[Doing.WAIT, str(message.value)]
        assert message.made.end <= put.start <= put.end
        assert wait.start <= wait.end <= message.used.start
    for row, spans in zip(recorded.marks, recorded.rows, strict=True):
        (step,) = [m for m in row if m.doing is Doing.OPTIMIZER]
        assert spans[-1].end <= step.start < step.end
    assert bare.marks == ()
    assert [len(row) for row in bare.rows] == [len(row) for row in recorded.rows]


def explain(group: Any, name: str) -> tuple[zb.explain.Difference, zb.Timeline]:
    costs = zb.Costs.from_ms((3, 3), (3, 3), (2, 2))
    slow = zb.Costs.from_ms((3, 3), (3, 6), (2, 2))
    with zb.Pipeline(build, name, 4, loss_fn, group=group, pace=slow) as pipe:
        for _ in range(2):
            pipe.step(*batch(4))
        run = pipe.timeline()
        return zb.diff(pipe.schedule, costs, run), run


@cpu_only("only CPUs rehearse the times of passes")
def test_a_slow_stage_of_a_real_run_is_found(world: Ranks) -> None:
    def measure() -> list[float]:
        """By how much another pass seems to cost more than the slow one."""
        (found, run), *_ = world.run(explain, "zb-h1", ranks=2)
        (slow,) = [drift for drift in found.drifts if drift.passes == ((zb.Kind.B, 1),)]
        assert slow.measured >= 6_000_000
        assert all(account.total == run.makespan for account in found.accounts)
        assert found.accounts[1].passes.busy >= 4 * 3_000_000
        return [max(drift.makespan for drift in found.drifts) - slow.makespan]

    assert_least_within(measure, [(0, 1)])


LIVE = ((16, 4), (16, 4), (8, 4), (8, 2))
"""Rows of the batch and microbatches of each step."""


def live(group: Any, *, starts_over: bool) -> tuple[list[zb.hooks.StepReport], list[float], zb.Timeline]:
    seen: list[zb.hooks.StepReport] = []
    torch.manual_seed(group.rank())
    with zb.Pipeline(
        lambda s, n: nn.Linear(8, 8), "zb-h1", 4, nn.functional.mse_loss, group=group, hooks=[zb.hooks.Telemetry(seen.append, 1e9)]
    ) as pipe:
        inner = torch.optim.SGD(pipe.parameters(), lr=0.0)
        optimizer = zb.PostValidation(inner, pipe, max_norm=1e-6) if starts_over else inner
        x = torch.rand(16, 8)
        losses = []
        for rows, microbatches in LIVE:
            losses.append(pipe.step(x[:rows], x[:rows], num_microbatches=microbatches).item())
            optimizer.step()
            optimizer.zero_grad()
        return seen, losses, pipe.timeline()


@pytest.mark.parametrize("starts_over", [False, True])
def test_live_numbers(world: Ranks, starts_over: bool) -> None:
    for rank, (result, losses, timeline) in enumerate(world.run(partial(live, starts_over=starts_over), ranks=2)):
        assert [report.step for report in result] == [0, 1, 2, 3]
        assert [report.loss for report in result] == losses
        assert losses[0] == losses[1], "counting operations changes nothing"
        for report, (rows, _) in zip(result, LIVE, strict=True):
            products = (3 if rank else 2) * 2 * rows * 8 * 8  # F, B and W; the first stage has no input gradient
            assert report.mfu == pytest.approx(products / 1e9 / report.seconds)
            assert 0 < report.bubble < 1
        assert [len(row) for row in timeline.rows] == [2 * 3, 2 * 3], "the last step had 2 microbatches"
        stepped = [[mark.doing for mark in row].count(Doing.OPTIMIZER) for row in timeline.marks]
        assert stepped == ([2, 1] if starts_over else [0, 0]), "rank 0 judged the step before, and stepped"


def automatic(group: Any) -> tuple[list[zb.hooks.StepReport], list[str], list[int]]:
    seen: list[zb.hooks.StepReport] = []
    names, stepped = [], []
    with zb.Pipeline(build, "auto", 4, loss_fn, group=group, hooks=[zb.hooks.Telemetry(seen.append)]) as pipe:
        for _ in range(4):
            pipe.step(*batch(4))
            with pipe.recording_optimizer():
                pass
            timeline = pipe.timeline()
            names.append(timeline.name)
            stepped.append([mark.doing for row in timeline.marks for mark in row].count(Doing.OPTIMIZER))
    return seen, names, stepped


def test_live_numbers_go_on_when_the_schedule_changes(world: Ranks) -> None:
    for result, names, stepped in world.run(automatic, ranks=2):
        assert [report.step for report in result] == [0, 1, 2, 3]
        assert all(0 < report.bubble < 1 for report in result)
        assert names[0] == names[2] != names[3]
        assert stepped == [2] * 4, "once on each rank, in the step that it follows"


def wrong_peak(group: Any) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, hooks=[zb.hooks.Telemetry(print, peak_flops=0.0)])
    return str(caught.value)


def test_a_peak_must_be_positive(world: Ranks) -> None:
    assert all("peak_flops" in text for text in world.run(wrong_peak, ranks=2))


def train(pipe: zb.Pipeline, steps: int) -> None:
    for _ in range(steps):
        pipe.step(*batch(4))


def failing_callback(group: Any) -> str:
    def boom(report: zb.hooks.StepReport) -> None:
        raise ValueError("boom")

    pipe = zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, hooks=[zb.hooks.Telemetry(boom)] if group.rank() == 0 else [])
    with pytest.raises(zb.PipelineError) as caught:
        train(pipe, 2)
    return str(caught.value)


def test_a_callback_that_fails_ends_every_rank(world: Ranks) -> None:
    assert all("rank 0 failed in on_step_end of Telemetry: ValueError: boom" in text for text in world.run(failing_callback, ranks=2))


class Writer:
    """What TensorBoard's SummaryWriter takes."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def test_reports_are_written(caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer()
    zb.hooks.write_scalars(writer).report(zb.hooks.StepReport(7, 0.5, 0.25, 2.0, None, {"router": 0.5}))
    assert writer.scalars == [
        ("pipeline/seconds", 0.5, 7),
        ("pipeline/bubble", 0.25, 7),
        ("pipeline/loss", 2.0, 7),
        ("pipeline/loss/router", 0.5, 7),
    ]
    with caplog.at_level(logging.INFO):
        found = zb.hooks.log_steps(logging.getLogger("steps"), every=2)
        for step in range(3):
            found.report(zb.hooks.StepReport(step, 0.5, 0.25, 2.0, 0.4))
        found.report(zb.hooks.StepReport(4, 0.5, 0.25, 2.0, 0.4, {"router": 0.5}))
    with_router = "rank 0, step 4: loss 2.0000, router 0.5000, 500.0 ms, bubble 25.00 %, MFU 40.00 %"
    without = [f"rank 0, step {step}: loss 2.0000, 500.0 ms, bubble 25.00 %, MFU 40.00 %" for step in (0, 2)]
    assert caplog.messages == [*without, with_router]
