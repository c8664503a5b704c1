"""A custom transport through the public protocol: threads of one process as ranks match one device.

A transport is one file.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only, use_device
from tests.procs.endpoints import ThreadEndpoint, Threads
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import states
from zerobubble.runtime.transport.gather import gather_objects

M = 8


def in_threads(ranks: int, job: Any) -> list[Any]:
    """What `job(endpoint)` gives in each of `ranks` threads."""
    threads = Threads(ranks)

    def run(rank: int) -> Any:
        use_device()
        return job(ThreadEndpoint(threads, rank))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def one_device(num_stages: int, steps: int) -> tuple[list[float], list[nn.Module]]:
    stages = [build(stage, num_stages) for stage in range(num_stages)]
    losses = []
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(*(part.chunk(M) for part in batch(M, seed=step)), strict=True):
            for stage in stages:
                x = stage(x)
            share = loss_fn(x, y) / M
            share.backward()
            total += share.detach()
        losses.append(total.item())
    return losses, stages


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_threads_of_one_process_train_as_one_device(name: str) -> None:
    losses, stages = one_device(zb.make(name, 2, M).num_stages, 2)
    lock = Lock()

    def build_alone(stage: int, num_stages: int) -> nn.Module:
        with lock:  # it draws from torch's random state, which threads share
            return build(stage, num_stages)

    def train(endpoint: ThreadEndpoint) -> tuple[list[float], Tensor, dict[int, list[Tensor | None]]]:
        with zb.Pipeline(build_alone, name, M, loss_fn, transport=endpoint) as pipe:
            seen = [pipe.step(*batch(M, seed=step)).item() for step in range(2)]
            norm = pipe.clip_grad_norm_(1e9)
            return seen, norm, {stage: [p.grad for p in module.parameters()] for stage, module in pipe.modules.items()}

    norm = nn.utils.get_total_norm([p.grad for stage in stages for p in stage.parameters() if p.grad is not None])
    for seen, total, gradients in in_threads(2, train):
        torch.testing.assert_close(seen, losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(total, norm, rtol=1e-12, atol=0)
        for stage, mine in gradients.items():
            for gradient, parameter in zip(mine, stages[stage].parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-15)


def test_the_failure_of_one_thread_is_every_threads_error() -> None:
    def fail(endpoint: ThreadEndpoint) -> str:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            raise ValueError("boom")

        pipe = zb.Pipeline(build, "1f1b", M, loss, transport=endpoint)
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(M))
        return str(caught.value)

    (text,) = set(in_threads(2, fail))
    states(text, "rank 1", "1F0", "ValueError", "boom")


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        (
            "glo",
            "transport must be an Endpoint or one of 'auto', 'gloo', 'nccl', 'shared-memory', 'staged', got 'glo'",
        ),
        (["gloo"], "transport must be a str or an Endpoint, got ['gloo']"),
        pytest.param(
            "nccl",
            "transport 'nccl' carries tensors on cuda, and the stages are on cpu; move them, or choose another transport",
            marks=cpu_only("it refuses a CPU"),
        ),
    ],
)
def test_a_transport_that_cannot_be_is_refused_on_every_rank(world: Ranks, transport: Any, message: str) -> None:
    for text in world.run(refused, transport, ranks=2):
        assert message in text


def refused(group: Any, transport: Any) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b", M, loss_fn, group=group, transport=transport)
    return str(caught.value)


def test_a_thread_that_closes_is_named_by_the_one_that_waits_for_it() -> None:
    def leave(endpoint: ThreadEndpoint) -> str:
        pipe = zb.Pipeline(build, "1f1b", M, loss_fn, transport=endpoint)
        if pipe.rank == 1:
            pipe.close()
            return ""
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(M))
        return str(caught.value)

    found, _ = in_threads(2, leave)
    states(found, "rank 1", "rank 0")
    states(found, "closed", "thread")


@pytest.mark.parametrize("lengths", [(1, 2, 3), (2015, 2040, 2070), (0, 10_000, 5)])
def test_values_of_any_size_are_gathered(lengths: tuple[int, ...]) -> None:
    """In one exchange if all are small, and then with the rest in another."""
    values = [os.urandom(length) for length in lengths]
    for found in in_threads(len(values), lambda endpoint: gather_objects(endpoint, values[endpoint.group.rank])):
        assert found == values


def test_a_value_of_each_size_about_the_limit_is_gathered() -> None:
    values = [os.urandom(length) for length in range(2000, 2060)]
    found = in_threads(2, lambda endpoint: [gather_objects(endpoint, value) for value in values])
    assert found == [[[value] * 2 for value in values]] * 2
