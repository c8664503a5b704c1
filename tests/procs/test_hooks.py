"""Step hooks: their calls and arguments, averaging gradients over replicas as they become ready, and errors in hooks.

Hooks are called in order, and average gradients over replicas on 2 x 2 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.refusals import raises


class AverageOverReplicas(zb.hooks.StepHook):
    """Averages the gradients of a stage over the replicas of its rank while later passes run."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        self.replicas = replicas
        self.under_way: list[tuple[Any, torch.Tensor]] = []

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            self.under_way.append((dist.all_reduce(parameter.grad, group=self.replicas, async_op=True), parameter.grad))

    def before_optimizer(self) -> None:
        for work, gradient in self.under_way:
            work.wait()
            gradient /= self.replicas.size()
        self.under_way.clear()


class Diary(zb.hooks.StepHook):
    """Records its calls."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.heard: list[Any] = []

    def on_step_begin(self, step: zb.hooks.TrainingStep) -> None:
        self.heard.append(("begin", step.number))

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        self.heard.append(("ready", stage, len(parameters)))

    def on_step_end(self, step: zb.hooks.TrainingStep) -> None:
        assert step.loss is not None
        self.heard.append(("end", step.number, step.loss.item()))

    def before_optimizer(self) -> None:
        self.heard.append("optimizer")

    def settle(self) -> None:
        self.heard.append("settle")

    def state_dict(self) -> dict[str, Any]:
        return {"entries": len(self.heard)} if self.name else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heard.append(("loaded", state["entries"]))


class Exploding(zb.hooks.StepHook):
    """Raises in the method of this name."""

    def __init__(self, where: str) -> None:
        setattr(self, where, self.explode)

    def explode(self, *_: Any) -> None:
        raise ValueError("boom")


MICROBATCHES = 4


def replicated(group: Any, name: str) -> float:
    """Two pipelines of two ranks, each with half of the batch: how far this rank's weights are from one device's after a step."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replica", "pipe"))
    replica = mesh.get_local_rank("replica")
    inputs, targets = batch(MICROBATCHES)
    half = slice(len(inputs) // 2 * replica, len(inputs) // 2 * (replica + 1))
    with zb.Pipeline(
        build, name, MICROBATCHES // 2, loss_fn, group=mesh.get_group("pipe"), hooks=[AverageOverReplicas(mesh.get_group("replica"))]
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(inputs[half], targets[half])
        optimizer.step()
        whole = [build(stage, pipe.schedule.num_stages) for stage in range(pipe.schedule.num_stages)]
        one_device(whole, MICROBATCHES, inputs, targets)
        torch.optim.SGD(nn.ModuleList(whole).parameters(), lr=0.1).step()
        stages = [(module.parameters(), whole[stage].parameters()) for stage, module in pipe.modules.items()]
        pairs = [pair for ours, theirs in stages for pair in zip(ours, theirs, strict=True)]
        return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_a_hook_averages_over_replicas_the_moment_gradients_are_ready(world: Ranks, name: str) -> None:
    assert max(world.run(replicated, name, ranks=4)) < 1e-12


def written_down(group: Any) -> tuple[list[Any], list[Any], list[float]]:
    first, second = Diary(), Diary("kept")
    tied = [[(0, "0.weight"), (1, "1.weight")]]  # the embedding and the head
    with zb.Pipeline(build, "zb-h1", MICROBATCHES, loss_fn, group=group, hooks=[first], tied=tied) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = [pipe.step(*batch(MICROBATCHES)).item()]
        optimizer.step()
        optimizer.step()
        pipe.attach(second)
        losses.append(pipe.step(*batch(MICROBATCHES)).item())
        pipe.profile(*batch(MICROBATCHES), steps=1)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.load_step_state(pipe.step_state())
        with raises(zb.InputError, "attached", "pipeline"):
            pipe.attach(second)
        with raises(zb.InputError, "hook", "Diary.7"):
            pipe.load_step_state({"num_steps": 1, "hooks": {"Diary.7": {}}})
    return first.heard, second.heard, losses


def test_hooks_get_the_documented_calls(world: Ranks) -> None:
    for rank, (first, second, losses) in enumerate(world.run(written_down, ranks=2)):
        own = (5, 6)[rank]  # a block, and the head's bias
        ready = [("ready", rank, own), ("ready", rank, 1)]  # the tied one comes when its sum is there
        step = [("begin", 0), *ready, ("end", 0, losses[0]), "optimizer"]
        assert first[: len(step)] == step
        again = [("begin", 1), *ready, ("end", 1, losses[1]), "settle", "settle", "optimizer"]
        assert first[len(step) : len(step) + len(again)] == again
        assert second[: len(again)] == again, "attached after the first step"
        assert ("loaded", len(again) + 1) in second, "with the settling before the state was taken"


class Early(Diary):
    """Is notified of gradients within W."""

    takes_gradients_early = True

    def on_gradients_complete(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        self.heard.append(("complete", stage, [parameter.grad is not None for parameter in parameters]))


def heard_early(group: Any, split: str) -> tuple[list[Any], str]:
    hook = Early()
    tied = [[(0, "0.weight"), (1, "1.weight")]]
    with zb.Pipeline(build, "zb-h1", MICROBATCHES, loss_fn, group=group, hooks=[hook], tied=tied, split=split) as pipe:
        described = str(pipe.describe(*batch(MICROBATCHES)))
        hook.heard.clear()
        pipe.step(*batch(MICROBATCHES))
    return hook.heard[1:], described


@pytest.mark.parametrize("split", ["deferred", "graph"])
def test_a_hook_hears_of_each_gradient_within_w_but_not_of_a_shared_one(world: Ranks, split: str) -> None:
    for rank, (heard, described) in enumerate(world.run(heard_early, split, ranks=2)):
        in_w, ready = [message for message in heard if message[0] == "complete"], [message for message in heard if message[0] == "ready"]
        assert ready == [("ready", rank, (5, 6)[rank]), ("ready", rank, 1)]
        assert heard[: len(in_w) + 1] == [*in_w, ready[0]]
        if split == "deferred":
            assert [message[1] for message in in_w] == [rank] * len(in_w)
            assert sum(len(message[2]) for message in in_w) == (5, 6)[rank]
            assert len(in_w) > 2
            assert all(all(message[2]) for message in in_w)
        else:
            assert not in_w
        assert ("leave together" in described) == (split == "graph")


WHERE = ["on_step_begin", "on_stage_gradients_ready", "on_step_end", "before_optimizer"]


def step_and_clip(pipe: zb.Pipeline) -> None:
    pipe.step(*batch(MICROBATCHES))
    pipe.clip_grad_norm_(1.0)


def exploding(group: Any, where: str) -> str:
    hooks = [Exploding(where)] if group.rank() == 1 else []
    pipe = zb.Pipeline(build, "zb-h1", MICROBATCHES, loss_fn, group=group, hooks=hooks)
    with pytest.raises(zb.PipelineError) as caught:
        step_and_clip(pipe)
    return str(caught.value)


@pytest.mark.sweep
@pytest.mark.parametrize("where", WHERE)
def test_a_hook_that_fails_ends_every_rank_with_its_error(world: Ranks, where: str) -> None:
    for text in world.run(exploding, where, ranks=2):
        assert text.startswith("rank 1 failed ")
        assert "ValueError: boom" in text
        assert where in text


def refused(group: Any) -> list[str]:
    class Refusing(zb.hooks.StepHook):
        def on_attach(self, pipeline: zb.hooks.AttachedPipeline) -> None:
            raise zb.InputError("not here")

    texts = []
    for hook in ([Refusing()], ["nothing"]):
        with pytest.raises(zb.InputError) as caught:
            zb.Pipeline(build, "zb-h1", MICROBATCHES, loss_fn, group=group, hooks=hook if group.rank() == 1 else [])  # type: ignore[arg-type]
        texts.append(str(caught.value))
    return texts


def test_a_hook_that_cannot_be_attached_is_reported_on_every_rank(world: Ranks) -> None:
    for texts in world.run(refused, ranks=2):
        assert texts[0] == "rank 1: not here"
        assert texts[1].startswith("rank 1: a hook must be a zerobubble.hooks.StepHook, got 'nothing'")
