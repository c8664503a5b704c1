"""Implements each kind of pass: the functions that the table of kinds refers to by name are looked up here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.kinds import Kind, ValueKind, checkpointed_forward, traits_of
from zerobubble.runtime.stage.head_part import Correction, GivenToHead, HeadPart, Softmax
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.values.payload import Tensors


@dataclass(slots=True)
class Task:
    """One pass to run, that of `microbatch` on `stage`. It is created with the program and receives its inputs in each step.

    Attributes:
        stage: The stage.
        microbatch: The place of the microbatch in the program.
        kept: A dictionary of values that passes of this microbatch on this stage leave for each other, for added kinds and a divided head.
        part: The index of the part of a divided head that the pass computes.
        inputs: The inputs of a forward, the gradients of a backward, the gathered values of a pass of a divided head; empty otherwise.
        finish: Turns the model's output into the scalar to differentiate; set for forwards of the last stage that compute the loss.
    """

    stage: Stage
    microbatch: int
    kept: dict[ValueKind, Any]
    part: int = 0
    inputs: Any = ()
    finish: Callable[[Any], Tensor] | None = None


Run = Callable[[Task], Any]
"""Runs a pass and returns its output for the neighbor.

That is the outputs of a forward, the input gradients of a backward, a dictionary by value kind for a pass of a divided head, and None for
other kinds.
"""

_RUNS: dict[str, Run] = {}


def runs(name: str) -> Callable[[Run], Run]:
    """Registers the decorated function under `name`, the `run` of a kind in the table of kinds. Every rank must do so before it trains.

    Raises `InputError` if the name is taken.
    """

    def register(run: Run) -> Run:
        if name in _RUNS:
            raise InputError("a function is already registered under {name!r}", name=name, remedy="choose another name")
        _RUNS[name] = run
        return run

    return register


def run_of(kind: Kind, recompute_kind: Kind | None = None) -> Run:
    """Returns the function that runs passes of `kind`. Raises `InputError` if none is registered under its name.

    A forward that a pass of kind `recompute_kind` recomputes has its own function, which saves less.
    """
    traits = traits_of(kind)
    checkpointed = checkpointed_forward(kind, recompute_kind)
    name = traits.run if checkpointed is None else checkpointed.run
    if name not in _RUNS:
        raise InputError(
            "passes of kind {kind} run by {name!r}, which is not registered; the registered names are {known}",
            kind=str(kind),
            name=name,
            known=", ".join(map(repr, _RUNS)),
            remedy="register the function with zerobubble.runtime.executor.runs.runs on every rank",
        )
    return _RUNS[name]


@runs("forward")
def _forward(task: Task) -> Any:
    return task.stage.forward(task.microbatch, task.inputs, task.finish)


@runs("backward")
def _backward(task: Task) -> Any:
    return task.stage.backward(task.microbatch, task.inputs)


@runs("weight")
def _weight(task: Task) -> None:
    task.stage.weight(task.microbatch)


@runs("backward with weight")
def _backward_with_weight(task: Task) -> Any:
    gradients = task.stage.backward(task.microbatch, task.inputs)
    if task.stage.splitter.splits:
        task.stage.weight(task.microbatch)
    return gradients


@runs("forward that keeps its input")
def _checkpointed_forward(task: Task) -> Any:
    return task.stage.checkpointed_forward(task.microbatch, task.inputs, task.finish)


@runs("recompute")
def _recompute(task: Task) -> None:
    task.stage.recompute(task.microbatch)


def _part_of_head(task: Task) -> HeadPart:
    """Returns the part of the head that belongs to the stage of a pass."""
    assert task.stage.head is not None
    return task.stage.head


def _softmax(task: Task) -> Softmax:
    (inputs,) = task.inputs
    return _part_of_head(task).softmax(GivenToHead(*inputs), task.stage.meter)


@runs("part of the softmax and input gradient")
def _softmax_and_input_gradient(task: Task) -> dict[ValueKind, Tensors]:
    softmax = task.kept[ValueKind.HEAD_WORK] = _softmax(task)
    return {ValueKind.SOFTMAX_SUMS: (softmax.sums,), ValueKind.GRADIENT_PART: _part_of_head(task).gradient_to_correct(softmax)}


@runs("weight gradient of the head")
def _weight_gradient_of_head(task: Task) -> dict[ValueKind, Tensors]:
    head, softmax = _part_of_head(task), task.kept.pop(ValueKind.HEAD_WORK)
    head.correct(softmax, Correction.from_sums([sums for (sums,) in task.inputs]), task.part)
    head.add_weight_gradients(softmax)
    return {}


@runs("part of the softmax")
def _softmax_alone(task: Task) -> dict[ValueKind, Tensors]:
    softmax = task.kept[ValueKind.HEAD_LOGITS] = _softmax(task)
    return {ValueKind.SOFTMAX_SUMS: (softmax.sums,)}


@runs("backward of the head")
def _backward_of_head(task: Task) -> dict[ValueKind, Tensors]:
    head, softmax = _part_of_head(task), task.kept.pop(ValueKind.HEAD_LOGITS)
    head.correct(softmax, Correction.from_sums([sums for (sums,) in task.inputs]), task.part)
    gradient = head.gradient(softmax)
    head.add_weight_gradients(softmax)
    return {ValueKind.GRADIENT_PART: gradient}
