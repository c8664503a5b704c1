"""Messages staged in host memory, for ranks that share a GPU and for devices without NCCL; they run on the CPU here."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_gradients import worst_errors
from tests.procs.test_mesh import two_replicas
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble.runtime.transport import choice, staged

SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe", "dualpipe-v", "chimera", "hanayo"]


def compare(group: Any, schedule: str) -> dict[str, float]:
    return worst_errors(group, zb.make(schedule, group.size(), 8), 2, transport="staged")


@pytest.mark.parametrize("schedule", every(5, SCHEDULES))
def test_staged_messages_keep_one_devices_gradients(world: Ranks, schedule: str) -> None:
    for worst in world.run(compare, schedule, ranks=4):
        assert max(worst.values()) <= 1e-12


@pytest.mark.parametrize("schedule", ["zb-v"])
def test_replicas_sum_over_staged_lines(world: Ranks, schedule: str) -> None:
    assert max(world.run(two_replicas, schedule, ("dp", "pp"), "staged", True, ranks=4)) < 1e-12


def lengths(group: Any) -> list[float]:
    """The largest error of the loss over batches of other lengths, whose shapes are announced before their messages."""
    found = []
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, transport="staged") as pipe:
        stages = [build(stage, pipe.schedule.num_stages) for stage in range(pipe.schedule.num_stages)]
        for length in (5, 7, 5, 3):
            inputs, targets = batch(4, length=length)
            expected = loss_fn(nn.Sequential(*stages)(inputs), targets)
            found.append((pipe.step(inputs, targets) - expected).abs().item())
    return found


def test_shapes_may_change_over_staged_lines(world: Ranks) -> None:
    assert max(max(found) for found in world.run(lengths, ranks=3)) <= 1e-12


def killed(group: Any) -> str:
    pipe = zb.Pipeline(build, "zb-h1", 8, loss_fn, group=group, transport="staged", timeout=100.0)
    pipe.step(*batch(8))
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(8))
    return str(caught.value)


def test_the_death_of_a_rank_ends_waits_for_staged_messages(world: Ranks) -> None:
    outcomes = world.outcomes(killed, ranks=3)
    assert outcomes.pop(1) == ("gone", "SIGKILL")
    assert {"rank 1 is gone" in text for _, text in outcomes} == {True}


def raising(group: Any) -> str:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("boom")

    pipe = zb.Pipeline(build, "1f1b", 8, loss, group=group, transport="staged", timeout=100.0)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(8))
    return str(caught.value)


def test_an_error_is_reported_to_ranks_that_wait_for_staged_messages(world: Ranks) -> None:
    assert {"ValueError: boom" in text for text in world.run(raising, ranks=3)} == {True}


def failing_copy(group: Any) -> str:
    """Rank 0's first copy fails once the device runs it, as after a device-side assertion."""

    class Never:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def copy(tensor: Tensor) -> staged._Staged:
        return staged._Staged(tensor.detach().clone(), Never() if group.rank() == 0 else None)

    with mock.patch.object(staged, "_on_host", copy):
        pipe = zb.Pipeline(build, "1f1b", 8, loss_fn, group=group, transport="staged", timeout=1000.0)
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(8))
    return str(caught.value)


@cpu_only("the copy of the CPU is replaced")
def test_a_copy_that_fails_ends_waits_of_all_ranks(world: Ranks) -> None:
    """The ranks would otherwise wait for each other until the timeout, which is longer than this test waits."""
    for text in world.run(failing_copy, ranks=3):
        states(text, "rank 0", foreign="device-side assert")


@pytest.mark.parametrize(
    ("uuids", "name", "expected"),
    [(["a", "b"], "auto", "nccl"), (["a", "a"], "auto", "staged"), (["a", "a"], "nccl", ""), (["a", "a"], "staged", "staged")],
)
def test_ranks_that_share_a_gpu_stage_their_messages(monkeypatch: pytest.MonkeyPatch, uuids: str, name: str, expected: str) -> None:
    class Properties:
        uuid = uuids[0]

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(choice, "has_nccl", lambda: True)
    monkeypatch.setattr(choice, "gather_objects", lambda topics, value: uuids)
    monkeypatch.setitem(choice.MAKERS, "nccl", lambda topics: "nccl")
    monkeypatch.setitem(choice.MAKERS, "staged", lambda topics: "staged")
    control = SimpleNamespace(group=SimpleNamespace(ranks=range(2)))
    if expected:
        assert choice._choice(name, control, torch.device("cuda"), [])[0] == expected  # type: ignore[arg-type]
    else:
        with raises(zb.InputError, "ranks 0, 1", "GPU a"):
            choice._choice(name, control, torch.device("cuda"), [])  # type: ignore[arg-type]
