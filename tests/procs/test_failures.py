"""When one rank fails, every rank ends with one clear error in seconds, and no process is left behind."""

from __future__ import annotations

import itertools
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import InBackward, batch, build, loss_fn
from tests.procs.patience import SHORT_S
from tests.procs.ranks import Ranks
from tests.procs.signs import await_signs
from tests.procs.test_fault_injection import replaced
from tests.refusals import raises, states
from zerobubble.runtime.failure.report import FailureReport, RankStatus
from zerobubble.runtime.failure.watch import FailureWatch

pytestmark = pytest.mark.ranks_wait

TIMEOUT, PROMPT = 200.0, 100.0
"""Seconds after which a rank gives up by itself, and within which it must know of a failure, even on a busy machine."""


@pytest.fixture
def doomed() -> Iterator[Ranks]:
    """Four ranks of their own for a test that kills some."""
    ranks = Ranks(4)
    yield ranks
    ranks.kill()


class Bomb(nn.Module):
    """Passes its input on until the microbatch on which it acts, forward or backward."""

    def __init__(self, act: Any, when: int) -> None:
        super().__init__()
        self.act = act
        self.calls = itertools.count()  # no attribute that a forward sets: copies of a stage may not have one
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        if next(self.calls) == self.when:
            self.act()
        return x


class BackwardBomb(nn.Module):
    """Fails in the backward pass of microbatch 2."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = InBackward.apply(x, boom_in_backward) if self.calls == 3 else x
        return y


def boom_in_backward(dy: Tensor) -> Tensor:
    raise ValueError("boom in backward")


def boom() -> None:
    raise ValueError("boom")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def signs_of_news(folder: Path, ranks: Iterable[int]) -> list[Path]:
    """The files with which these ranks signal that they know of the failure."""
    return [folder / f"{rank} has the report" for rank in ranks]


def train_with(
    group: Any, name: str, stage: int, bomb: nn.Module, timeout: float, folder: Path | None = None
) -> tuple[float, str, int | None, str | None]:
    """One step in which `bomb` sits in front of `stage`: (seconds until the error, its text, its rank, its action)."""
    pipe = zb.Pipeline(
        lambda s, n: nn.Sequential(bomb, build(s, n)) if s == stage else build(s, n), name, 8, loss_fn, group=group, timeout=timeout
    )
    begin = time.monotonic()
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(8))
    took = time.monotonic() - begin
    if folder is not None:
        (sign,) = signs_of_news(folder, [pipe.rank])
        sign.touch()
    with raises(zb.PipelineError, "new", "Pipeline"):
        pipe.step(*batch(8))
    return took, str(caught.value), caught.value.rank, caught.value.op


@pytest.mark.sweep
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_an_exception_ends_every_rank_with_its_cause(world: Ranks, name: str, stage: int) -> None:
    for took, text, rank, op in world.run(train_with, name, stage, Bomb(boom, 3), TIMEOUT, ranks=4):
        assert took < PROMPT
        assert (rank, op) == (stage, f"run {stage}F3")
        states(text, f"rank {stage}", f"'run {stage}F3'", "ValueError: boom")


def test_an_exception_in_backward_names_the_backward_pass(world: Ranks) -> None:
    for took, text, _, _ in world.run(train_with, "zb-v", 5, BackwardBomb(), TIMEOUT, ranks=4):
        assert took < PROMPT
        states(text, "rank 2", "'run 5B2'", "ValueError: boom")


def frames_of_the_cause(group: Any) -> list[str]:
    def make_stage(stage: int, num_stages: int) -> nn.Module:
        return nn.Sequential(Bomb(boom, 1), build(stage, num_stages)) if stage == 1 else build(stage, num_stages)

    with zb.Pipeline(make_stage, "1f1b", 8, loss_fn, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(8))
    cause = caught.value.__cause__
    return [] if cause is None else [frame.name for frame in traceback.extract_tb(cause.__traceback__)]


def test_the_traceback_of_the_cause_begins_at_the_users_code(world: Ranks) -> None:
    assert world.run(frames_of_the_cause, ranks=2) == [[], ["forward", "boom"]]


def test_a_failure_in_an_overlapped_step_of_a_bidirectional_schedule_reaches_every_rank(world: Ranks) -> None:
    outcomes = world.run(train_with, "dualpipe", 1, Bomb(boom, 3), TIMEOUT, ranks=4)
    assert len({text for _, text, _, _ in outcomes}) == 1
    for took, text, rank, op in outcomes:
        assert took < PROMPT
        assert rank in (1, 2)  # the ranks that hold a copy of the stage
        assert "&" in str(op)
        states(text, f"rank {rank}", op, "ValueError: boom")


def train_twice(group: Any) -> float:
    """A failed step, then a fresh pipeline in the same processes."""
    train_with(group, "zb-v", 2, Bomb(boom, 1), TIMEOUT)
    with zb.Pipeline(build, "zb-v", 8, loss_fn, group=group) as pipe:
        return pipe.step(*batch(8)).item()


@pytest.mark.long
def test_a_new_pipeline_works_after_a_failure(world: Ranks) -> None:
    losses = world.run(train_twice, ranks=4)
    assert len(set(losses)) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_ends_the_others(doomed: Ranks, victim: int) -> None:
    outcomes = doomed.outcomes(train_with, "zb-h1", victim, Bomb(die, 2), TIMEOUT, ranks=4)
    assert [state for state, _ in outcomes] == ["gone" if rank == victim else "ok" for rank in range(4)]
    for took, text, rank, _ in (result for state, result in outcomes if state == "ok"):
        assert took < PROMPT
        assert rank == victim
        states(text, f"rank {victim}", "rank")
    doomed.processes[victim].join(TIMEOUT)
    assert not doomed.processes[victim].is_alive()


@pytest.mark.long
def test_a_frozen_rank_ends_the_others_within_the_timeout(doomed: Ranks, tmp_path: Path) -> None:
    others = (0, 2, 3)
    freeze = partial(await_signs, *signs_of_news(tmp_path, others))
    outcomes = doomed.outcomes(train_with, "1f1b", 1, Bomb(freeze, 2), SHORT_S, tmp_path, ranks=4)
    for rank in others:
        state, (took, text, _, _) = outcomes[rank]
        assert state == "ok"
        assert SHORT_S - 1 < took < PROMPT
        states(text, "rank 1", "'run 1F2'")


def dawdle(group: Any, folder: Path, *, by_sleeping: bool) -> tuple[str, int | None]:
    """Rank 1 reaches the second step after all others have an error because it did not, or makes a different call."""
    pipe = zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, timeout=SHORT_S)
    pipe.step(*batch(4))
    is_late = pipe.rank == 1
    if is_late and by_sleeping:
        await_signs(*signs_of_news(folder, (0, 2)))
    with pytest.raises(zb.PipelineError) as caught:
        _ = pipe.timeline() if is_late and not by_sleeping else pipe.step(*batch(4))
    (sign,) = signs_of_news(folder, [pipe.rank])
    sign.touch()
    return str(caught.value), caught.value.rank


@pytest.mark.long
def test_a_rank_in_code_of_its_own_is_named(world: Ranks, tmp_path: Path) -> None:
    for text, rank in world.run(partial(dawdle, by_sleeping=True), tmp_path, ranks=3):
        assert rank == 1
        states(text, "rank 1", "rank")
        assert text.endswith("raise `timeout` if it may take that long")


def come_late(group: Any, folder: Path) -> tuple[str, int | None]:
    """Rank 0 comes to the step when the others begin to ask who is to blame for a message that has not come.

    Of these one may have come later than the other, and gives up as much later: they begin together.
    """
    gave_up, find_culprit = [folder / f"{rank} gave up" for rank in range(3)], FailureWatch.find_culprit

    def give_up(watch: FailureWatch, status: RankStatus) -> FailureReport:
        gave_up[pipe.rank].touch()
        await_signs(*gave_up[1:])
        return find_culprit(watch, status)

    pipe = zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, timeout=SHORT_S)
    with replaced(FailureWatch, "find_culprit", give_up):
        if pipe.rank == 0:
            await_signs(*gave_up[1:])
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(4))
    return str(caught.value), caught.value.rank


@pytest.mark.long
def test_a_rank_that_comes_when_the_others_have_just_given_up_is_named(world: Ranks, tmp_path: Path) -> None:
    for text, rank in world.run(come_late, tmp_path, ranks=3):
        assert rank == 0
        states(text, "rank 0", "waiting")
        assert text.endswith("raise `timeout` if it may take that long")


@pytest.mark.long
def test_an_error_after_different_calls_says_what_each_rank_waits_for(world: Ranks, tmp_path: Path) -> None:
    (text,) = {text for text, _ in world.run(partial(dawdle, by_sleeping=False), tmp_path, ranks=3)}
    states(text, "rank 0", "ranks")
    states(text, "rank 1", "timeline")
    states(text, "rank", "calls")


def short_batches(group: Any, schedule: str, transport: str) -> tuple[list[str], float]:
    """What calls with batches that cannot be cut raise, and the error of a step by the remedy that they name."""
    with zb.Pipeline(build, schedule, 4, loss_fn, group=group, transport=transport) as pipe:
        inputs, targets = batch(4)
        messages = []
        wrong: list[tuple[Any, Any]] = [(inputs[:3], targets[:3]), (inputs[:0], targets[:0]), (list(inputs[:3]), targets)]
        wrong += [(None, targets), ((inputs[:3],), targets[:3]), ((inputs, targets[:2]), targets), (inputs.to("meta"), targets)]
        for x, y in wrong:
            for call in (pipe.step, pipe.eval_step, pipe.describe):
                with pytest.raises(zb.InputError) as caught:
                    call(x if pipe.rank == 0 or schedule == "chimera" else None, y)
                messages.append(str(caught.value))
        count = 4 if schedule == "chimera" else 3  # it needs an even number
        loss = pipe.step(inputs[:count], targets[:count], num_microbatches=count)
        stages = [build(stage, 2) for stage in range(2)]
        return messages, abs(loss - loss_fn(nn.Sequential(*stages)(inputs[:count]), targets[:count])).item()


@pytest.mark.parametrize(("schedule", "transport"), [("1f1b", "auto"), ("zb-h1", "gloo"), ("chimera", "auto")])
def test_a_batch_that_cannot_be_cut_is_refused_and_the_pipeline_goes_on(world: Ranks, schedule: str, transport: str) -> None:
    first, second = world.run(short_batches, schedule, transport, ranks=2)
    assert first == second
    messages, error = first
    assert error < 1e-12
    parts = ("num_microbatches=3", "leave out an empty batch", "a list of 3", "inputs are missing", "batch size 3", "batch size", "meta")
    for text, part in zip(messages, (part for part in parts for _ in range(3)), strict=True):
        assert part in text


def short_where_others_begin(group: Any, schedule: str) -> tuple[str, float, str]:
    """The errors of short targets that all ranks are given, and that only the last rank is given, and the loss of a step in between."""
    with zb.Pipeline(build, schedule, 4, loss_fn, group=group) as pipe:
        inputs, targets = batch(4)
        with pytest.raises(zb.InputError) as open_error:
            pipe.step(inputs, targets[:3])
        loss = pipe.step(inputs, targets).item()
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(inputs, targets[:3] if pipe.rank else None)
    return str(open_error.value), loss, str(caught.value)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_targets_that_cannot_be_cut_end_only_a_step_that_others_have_begun(world: Ranks, schedule: str) -> None:
    (first, loss, _), (other, same, _) = found = world.run(short_where_others_begin, schedule, ranks=2)
    assert first == other
    assert loss == same
    for open_error, _, closing in found:
        states(open_error, 3, 4, "microbatches")
        states(closing, 3, 4, "microbatches")


def wrong_loops(group: Any) -> tuple[str, str, str]:
    """The errors of `backward` on the loss of a step, and of targets of another size: given to both ranks, or to the last one alone.

    Only the second, which the first rank does not see, ends the pipeline.
    """
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        inputs, targets = batch(4)
        with raises(zb.InputError, "timeline", "step"):
            pipe.timeline()
        loss = pipe.step(inputs, targets)
        with pytest.raises(zb.InputError) as backward:
            loss.backward()
        with raises(zb.InputError, "scaler", 3):
            pipe.step(inputs, targets, scaler=3)  # type: ignore[arg-type]
        with pytest.raises(zb.InputError) as seen:
            pipe.step(inputs, targets[:4])
        assert pipe.step(inputs, targets) == loss
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(inputs, targets[:4] if pipe.rank else None)
        with pytest.raises(zb.PipelineError):
            pipe.step(inputs, targets)
    return str(backward.value), str(seen.value), str(caught.value)


def test_troubleshooting_names_the_errors_of_wrong_training_loops(world: Ranks) -> None:
    page = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text(encoding="utf-8")
    for backward, seen, sizes in world.run(wrong_loops, ranks=2):
        assert backward.partition(",")[0] in page
        states(seen, "targets", 8, 4)
        states(sizes, "rank 0", "rank 1", 8, 4)


def wrong_arguments(group: Any) -> str:
    rank = torch.distributed.get_rank(group)
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b" if rank else "zb-h1", 4, loss_fn, group=group)
    return str(caught.value)


def test_ranks_with_different_arguments_are_reported(world: Ranks) -> None:
    for text in world.run(wrong_arguments, ranks=3):
        states(text, "rank 0", "zb-h1", 4, "1f1b", "ranks 1-2")


def no_such_schedule(group: Any) -> str:
    name = "zb-h3" if torch.distributed.get_rank(group) == 1 else "zb-h1"
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, name, 4, loss_fn, group=group)
    return str(caught.value)


def test_one_wrong_argument_is_reported_to_every_rank(world: Ranks) -> None:
    for text in world.run(no_such_schedule, ranks=2):
        states(text, "rank 1", "zb-h3")
