"""Optimizers that step notify the pipelines of their parameters, even while other pipelines are deleted."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.refusals import raises
from zerobubble.errors import InputError
from zerobubble.runtime.hooks.optimizer_watch import watch_optimizers
from zerobubble.runtime.stage.cut_model import CutModel
from zerobubble.runtime.step.optimizers import optimizers_in
from zerobubble.runtime.step.runner import StepRunner


class Runner:
    """What of a runner an optimizer meets."""

    def __init__(self, *parameters: torch.nn.Parameter) -> None:
        self._parameters = parameters
        self.num_calls = 0
        self.optimizers: Any = self  # a cycle, as real runners are in: the garbage collector ends it, at any moment
        self.guard: Any = SimpleNamespace(closed=None)
        self.cut_model = CutModel({}, 0)
        self.modules: dict[int, torch.nn.Module] = {}
        self.programs = SimpleNamespace(now=SimpleNamespace(stages={}))

    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        return self._parameters

    def before_step_of(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        self.num_calls += 1


def watched(*parameters: torch.nn.Parameter) -> tuple[Runner, Any]:
    runner = Runner(*parameters)
    return runner, watch_optimizers(cast(StepRunner, runner))


def test_only_the_owner_of_a_parameter_is_reported_and_until_it_is_watched_no_more() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    (runner, unwatch), (other, _) = watched(ours), watched(theirs)
    torch.optim.SGD([ours]).step()
    assert (runner.num_calls, other.num_calls) == (1, 0)
    unwatch()
    torch.optim.SGD([ours, theirs]).step()
    assert (runner.num_calls, other.num_calls) == (1, 1)


def test_a_new_pipeline_replaces_the_closed_ones_of_its_parameters() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    (closed, _), (elsewhere, _), (is_open, _) = watched(ours), watched(theirs), watched(ours)
    closed.guard.closed = elsewhere.guard.closed = "a rank failed"
    newest, _ = watched(ours)
    torch.optim.SGD([ours, theirs]).step()
    assert [runner.num_calls for runner in (closed, elsewhere, is_open, newest)] == [0, 1, 1, 1]


@pytest.mark.long
def test_a_pipeline_that_is_collected_within_the_step_of_an_optimizer_does_not_fail_that_step() -> None:
    ours = torch.nn.Parameter(torch.ones(2))
    runner, _ = watched(ours)
    gone = [watched(torch.nn.Parameter(torch.ones(2)))]
    optimizer = torch.optim.SGD([ours])

    def collect(*_: Any) -> None:
        gone.clear()
        gc.collect()

    handles = [register_optimizer_step_pre_hook(collect), register_optimizer_step_pre_hook(lambda *_: None)]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert runner.num_calls == 1
    assert not gone


@pytest.mark.long
def test_an_optimizer_may_step_while_another_thread_makes_pipelines() -> None:
    ours = torch.nn.Parameter(torch.ones(2))
    runner, _ = watched(ours)
    optimizer = torch.optim.SGD([ours], lr=0.0)
    is_over = threading.Event()

    def make() -> None:
        others: deque[Runner] = deque(maxlen=50)
        while not is_over.is_set():
            others.append(watched()[0])
            del others[-1].optimizers  # so that it goes when the deque lets it go

    thread, interval = threading.Thread(target=make), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(8000):
            optimizer.step()
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert runner.num_calls == 8000


def test_a_parameter_twice_in_one_optimizer_or_in_two_is_refused() -> None:
    parameter, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = torch.optim.SGD([{"params": [other]}, {"params": [parameter, parameter]}])
    with raises(InputError, optimizer="SGD", number=1):
        optimizers_in(twice)
    adamw = torch.optim.AdamW([parameter])
    with raises(InputError, optimizers="AdamW, AdamW"):
        optimizers_in([adamw, torch.optim.AdamW([parameter])])
    assert optimizers_in([adamw, torch.optim.SGD([other])])[0] is adamw
