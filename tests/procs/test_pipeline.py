"""`Pipeline` beyond gradients: evaluation, any boundary, any module, measured timelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.device import DEVICE, cpu_only
from tests.procs.models import Block, OneDevice, batch, build, gradient_error, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.refusals import raises, states


def evaluate(group: Any, name: str) -> tuple[float | None, float | None, float, list[int] | None, bool]:
    """Evaluation before any training: loss with targets, loss without, the oracle's loss, shape of the outputs, modes kept."""
    with zb.Pipeline(build, name, 4, loss_fn, group=group) as pipe:
        inputs, targets = batch(4)
        loss, outputs = pipe.eval_step(inputs, targets)
        none, again = pipe.eval_step(inputs)
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        expected = nn.Sequential(*stages)(inputs)
        if outputs is not None:
            torch.testing.assert_close(outputs, expected)
            torch.testing.assert_close(again, expected)
        kept = all(module.training for module in pipe.modules.values())
        assert all(p.grad is None for p in pipe.parameters())
        assert loss is not None
        return loss.item(), none, loss_fn(expected, targets).item(), None if outputs is None else list(outputs.shape), kept


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpipe", "zb-v", "interleaved-1f1b"])
def test_evaluation_runs_on_the_training_schedule(world: Ranks, name: str) -> None:
    results = world.run(evaluate, name, ranks=4)
    last = 0 if name == "zb-v" else 3
    for rank, (loss, none, expected, shape, kept) in enumerate(results):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert none is None
        assert kept
        assert shape == ([8, 5, 11] if rank == last else None)


def described(group: Any, split: Any) -> tuple[str, str]:
    with zb.Pipeline(build, "zb-v", 4, loss_fn, split=split, group=group) as pipe:
        opened = repr(pipe)
    return opened, repr(pipe)


def test_a_pipeline_is_shown_in_one_line(world: Ranks) -> None:
    shown = world.run(described, "whole", ranks=2)
    for rank, (opened, closed) in enumerate(shown):
        states(
            opened, "Pipeline", "zb-v", f"rank {rank}", "of 2", f"stages {rank}, {3 - rank}", "of 4", "4 microbatches", "whole", DEVICE.type
        )
        assert closed == f"{opened[:-1]}, closed>"
        assert len(closed) <= 120


def called_by_another_name(group: Any) -> str:
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        inputs, targets = batch(4)
        given: dict[str, Any] = {"input" if group.rank() == 0 else "inputs": inputs}
        with raises(zb.PipelineError, "Pipeline.step", "'input'", "'inputs'", rank=0) as caught:
            pipe.step(**given, targets=targets)
        return str(caught.value)


def test_a_call_with_a_wrong_name_on_one_rank_is_reported_to_all_with_the_right_name(world: Ranks) -> None:
    assert len(set(world.run(called_by_another_name, ranks=2))) == 1


class TwoWires(nn.Module):
    """A stage with a tuple boundary: a float wire with gradient and an integer wire without."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.embed = nn.Embedding(11, 6) if self.first else None
        self.block = Block(6)
        self.head = nn.Linear(6, 11) if self.last else None
        self.double()

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Any:
        if self.embed is not None:
            x, tokens = self.embed(x), x
        assert tokens is not None
        x = self.block(x) * (1 + tokens.unsqueeze(-1))
        return self.head(x) if self.head is not None else (x, tokens)


def same_as_one_device(group: Any, make_stage: Any, name: str, microbatches: int = 4) -> float:
    """Largest absolute difference of any gradient of this rank's stages from the one-device model's."""
    worst = 0.0
    with zb.Pipeline(make_stage, name, microbatches, loss_fn, group=group) as pipe:
        count = pipe.schedule.num_stages
        stages = [make_stage(s, count) for s in range(count)]
        for step, length in enumerate((5, 5, 3)):
            inputs, targets = batch(microbatches, seed=step, length=length)
            loss, expected = pipe.step(inputs, targets), one_device([OneDevice(stages)], microbatches, inputs, targets)
            worst = max(worst, abs(loss - expected).item())
            worst = max(worst, gradient_error(pipe, stages))
    return worst


class Shared(nn.Module):
    """One Linear used three times, its weight once more outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(torch.tanh(self.linear(self.linear(x))))
        return nn.functional.linear(x, self.linear.weight)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = Block(6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return y


class Frozen(nn.Module):
    """A block whose first Linear is frozen, with a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6)
        self.block.up.requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Watched(nn.Module):
    """A Linear with a hook on its weight, which must see the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.linear.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class ViewOut(nn.Module):
    """Ends in a transposed view of a 3-D Linear's output and starts from one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(0, 1).contiguous().transpose(0, 1)


MIDDLES = {
    "shared": Shared,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "frozen": Frozen,
    "watched": Watched,
    "view": ViewOut,
    "norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "identity": nn.Identity,
}


class Middle:
    """Builds a model whose every stage holds the module named `key` (pickles, unlike a lambda)."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        torch.manual_seed(7 * stage)
        return (
            nn.Sequential(build(stage, num_stages), MIDDLES[self.key]().double(), nn.Identity())
            if stage < num_stages - 1
            else build(stage, num_stages)
        )


@pytest.mark.sweep
@pytest.mark.parametrize("key", MIDDLES)
def test_modules_of_every_kind_keep_the_gradients_of_one_device(world: Ranks, key: str) -> None:
    for worst in world.run(same_as_one_device, Middle(key), "zb-v", ranks=2):
        assert worst <= 1e-13


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_tuples_and_integers_cross_stage_boundaries(world: Ranks, name: str) -> None:
    for worst in world.run(same_as_one_device, TwoWires, name, ranks=4):
        assert worst <= 1e-13


def mixed_schedule(group: Any) -> float:
    """Stage 1 splits its backward for odd microbatches only; both stages come from a text the user wrote."""
    text = """zerobubble schedule 1
name mine
placement custom: 0 1
microbatches 4
rank 0: 0F0 0F1 0BW0 0F2 0BW1 0F3 0BW2 0B3 0W3
rank 1: 1F0 1BW0 1F1 1B1 1F2 1BW2 1W1 1F3 1B3 1W3
"""
    schedule = zb.Schedule.from_text(text)
    with zb.Pipeline(build, schedule, 4, loss_fn, group=group) as pipe:
        stages = [build(s, 2) for s in range(2)]
        inputs, targets = batch(4)
        pipe.step(inputs, targets)
        one_device(stages, 4, inputs, targets)
        return gradient_error(pipe, stages)


def test_a_schedule_of_the_users_own_runs(world: Ranks) -> None:
    for worst in world.run(mixed_schedule, ranks=2):
        assert worst <= 1e-13


def only_where_needed(group: Any) -> float:
    """Inputs on the first rank and targets on the last, nothing elsewhere."""
    rank = torch.distributed.get_rank(group)
    inputs, targets = batch(4)
    with zb.Pipeline(build, "zb-h2", 4, loss_fn, group=group) as pipe:
        return pipe.step(inputs if rank == 0 else None, targets if rank == 2 else None).item()


def test_data_is_needed_only_on_the_ranks_at_the_ends(world: Ranks) -> None:
    losses = world.run(only_where_needed, ranks=3)
    inputs, targets = batch(4)
    expected = one_device([build(s, 3) for s in range(3)], 4, inputs, targets).item()
    assert losses == pytest.approx([expected] * 3, rel=1e-14)


def paced(group: Any) -> tuple[dict[str, Any], int]:
    """The measured timeline of a paced, metered step, and how many passes overran."""
    costs = zb.Costs.uniform(8, (60.0, 60.0, 40.0), stages_per_rank=2)
    with zb.Pipeline(build, "zb-v", 8, loss_fn, group=group, pace=costs) as pipe:
        pipe.step(*batch(8))
        pipe.metering = True
        pipe.step(*batch(8))
        assert pipe.pace is not None
        return pipe.timeline().to_dict(), pipe.pace.overruns


@pytest.mark.long
@cpu_only("pace is for rehearsals on CPUs")
def test_a_paced_run_is_measured_as_the_simulation_says(world: Ranks) -> None:
    results = world.run(paced, ranks=4)
    measured = zb.Timeline.from_dict(results[0][0])
    assert all(timeline == results[0][0] for timeline, _ in results)
    schedule = zb.make("zb-v", 4, 8)
    simulated = zb.simulate(schedule, zb.Costs.uniform(8, (60.0, 60.0, 40.0), stages_per_rank=2))
    assert measured.source == "measured"
    assert [[span.op for span in row] for row in measured.rows] == [list(row) for row in schedule.rows]
    ends = {span.op: span.end for _, span in measured.spans()}
    assert all(
        ends[zb.Op(zb.Kind.F, s - 1, j)] <= span.start
        for _, span in measured.spans()
        if span.op.kind is zb.Kind.F and (s := span.op.stage) and (j := span.op.microbatch) >= 0
    )
    assert measured.makespan >= simulated.makespan
    peaks = [figures.peak_bytes for figures in measured.ranks]
    assert all(peak is not None and peak > 0 for peak in peaks)
    assert all(steps[-1][1] == 0 for steps in measured.memory), "everything is given back at the end of a step"
