"""Notifies a pipeline when any optimizer over its parameters is about to step, regardless of the caller."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerobubble.errors import InputError
from zerobubble.runtime.hooks.optimizer_states import refuse_other_stages_state
from zerobubble.runtime.step.optimizers import parameters_of
from zerobubble.runtime.step.runner import StepRunner

_watched: weakref.WeakValueDictionary[int, StepRunner] = weakref.WeakValueDictionary()
"""The runners by a serial number. Not a `WeakSet`, which cannot be iterated over while another thread adds to it."""
_numbers = count()


def watch_optimizers(runner: StepRunner) -> Callable[[], object]:
    """Calls `runner.optimizers.before_step_of` when an optimizer over any of its parameters steps, while the runner lives.

    Pipelines of its parameters that are closed are watched no more. Returns a function that stops it.
    """
    _register_once()
    _forget_closed(set(runner.parameters()))
    number = next(_numbers)
    _watched[number] = runner
    return partial(_watched.pop, number, None)


def _forget_closed(parameters: AbstractSet[Tensor]) -> None:
    """Stops watching closed runners of any of these `parameters`: their failures concern no later step of an optimizer."""
    for reference in _watched.valuerefs():
        runner = reference()
        if runner is not None and runner.guard.closed is not None and not parameters.isdisjoint(runner.parameters()):
            _watched.pop(reference.key, None)


@cache
def _register_once() -> None:
    """Makes PyTorch call `_before_step` for every optimizer of the process.

    It is registered once and never removed. An optimizer that steps iterates over PyTorch's global dict of these functions, and the garbage
    collector may free a runner during the iteration. If runners removed their own functions, the step of any optimizer could fail.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Notifies each runner that owns a parameter of `optimizer`, and then each runner with a model that has a parameter of it."""
    parameters = list(parameters_of([optimizer]))
    owners = list(owners_of(parameters))
    for runner, _ in owners:
        _refuse_whole_model(optimizer, runner)
        _refuse_within_backward(optimizer, runner)
    if trained := [runner for runner, _ in owners if runner.guard.closed is None]:
        refuse_other_stages_state(optimizer, trained)
    for runner, stepped in owners:
        runner.optimizers.before_step_of(optimizer, stepped)
    for runner in watched_runners():
        runner.optimizers.has_stepped = True
        if runner.guard.closed is None:
            runner.cut_model.release_before(parameters)


def _refuse_whole_model(optimizer: Optimizer, runner: StepRunner) -> None:
    """Raises `InputError` if `optimizer` computes its step from all parameters or gradients together, and has one rank's share of them."""
    if isinstance(optimizer, LBFGS) and runner.num_ranks > 1 and runner.guard.closed is None:
        raise InputError(
            "{optimizer} computes each step from the gradients of the whole model, and steps the stages of one rank of {ranks}",
            optimizer=type(optimizer).__name__,
            ranks=runner.num_ranks,
            remedy="use an optimizer that computes the step of each parameter by itself, such as AdamW, SGD or Muon",
        )


def _refuse_within_backward(optimizer: Optimizer, runner: StepRunner) -> None:
    """Raises `InputError` if `optimizer` steps in a hook of a backward pass that has the gradients of one of several microbatches."""
    is_in_backward = torch._C._current_graph_task_id() != -1
    if is_in_backward and runner.guard.closed is None and (count := runner.schedule.num_microbatches) > 1:
        raise InputError(
            "{optimizer} steps within a backward pass, which has the gradients of one of {num_microbatches} microbatches",
            optimizer=type(optimizer).__name__,
            num_microbatches=count,
            remedy="call its step() after pipe.step, and remove the hook that calls it",
        )


def owners_of(parameters: Iterable[Tensor]) -> Iterator[tuple[StepRunner, list[Tensor]]]:
    """Yields each watched runner that owns any of the `parameters`, with the parameters that it owns."""
    wanted = list(parameters)
    for runner in watched_runners():
        held = set(runner.parameters())
        if owned := [parameter for parameter in wanted if parameter in held]:
            yield runner, owned


def watched_runners() -> list[StepRunner]:
    """Returns the runners that are watched."""
    return [runner for reference in _watched.valuerefs() if (runner := reference()) is not None]
