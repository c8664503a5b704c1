"""How each kind of pass runs: the functions that the table of kinds names, looked up here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.kinds import Kind, ValueKind, traits_of
from zerobubble.runtime.stage.head_part import Correction, GivenToHead, HeadPart, Softmax
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.values.payload import Tensors


@dataclass(slots=True)
class Task:
    """One pass to run: that of `microbatch` on `stage`. It is made with the program, and given what it works on in each step.

    `taken` is what came from the neighbour: a forward's inputs, the gradients of a backward, for a pass of a divided head what each pass
    gave that it gathers from, an empty tuple for any other kind and when the pass is over. `finish` is given to the forwards of the last
    stage where it ends in the loss: it turns the model's output into the scalar to go back from. `part` is the number of the part of a
    divided head that a pass of it computes. `kept` is one dictionary for all passes of this microbatch on this stage, where those of added
    kinds, and of a divided head, leave things for each other.
    """

    stage: Stage
    microbatch: int
    kept: dict[ValueKind, Any]
    part: int = 0
    taken: Any = ()
    finish: Callable[[Any], Tensor] | None = None


Run = Callable[[Task], Any]
"""Runs a pass and gives what goes on to the neighbour: a forward's outputs, a backward's gradients of the inputs, for a pass of a
divided head what it gives by the value kind it is, None for the rest."""

_RUNS: dict[str, Run] = {}


def runs(name: str) -> Callable[[Run], Run]:
    """Register the decorated function under `name`, the `run` of a kind in the table of kinds. Every rank needs it before it trains.

    Raises `InputError` for a name that is taken.
    """

    def register(run: Run) -> Run:
        if name in _RUNS:
            raise InputError(f"passes that run by {name!r} are registered already: choose another name")
        _RUNS[name] = run
        return run

    return register


def run_of(kind: Kind, again: Kind | None = None) -> Run:
    """The function that runs passes of `kind`; raises `InputError` where none is registered under the name in the table.

    Where a pass of kind `again` computes the forward of the same stage and microbatch again, that forward is run by another one.
    """
    traits = traits_of(kind)
    lean = None if again is None else traits_of(again).forward
    name = traits.run if lean is None or ValueKind.ACTIVATION not in traits.makes else lean.run
    if name not in _RUNS:
        known = ", ".join(map(repr, _RUNS))
        raise InputError(
            f"passes of kind {kind} run by {name!r}, which is not registered; known are {known}: see zerobubble.runtime.executor.runs"
        )
    return _RUNS[name]


@runs("forward")
def _forward(task: Task) -> Any:
    return task.stage.forward(task.microbatch, task.taken, task.finish)


@runs("backward")
def _backward(task: Task) -> Any:
    return task.stage.backward(task.microbatch, task.taken)


@runs("weight")
def _weight(task: Task) -> None:
    task.stage.weight(task.microbatch)


@runs("backward with weight")
def _backward_with_weight(task: Task) -> Any:
    gradients = task.stage.backward(task.microbatch, task.taken)
    if task.stage.splitter.splits:
        task.stage.weight(task.microbatch)
    return gradients


@runs("forward that keeps its input")
def _checkpointed_forward(task: Task) -> Any:
    return task.stage.checkpointed_forward(task.microbatch, task.taken, task.finish)


@runs("recompute")
def _recompute(task: Task) -> None:
    task.stage.recompute(task.microbatch)


def _part_of_head(task: Task) -> HeadPart:
    """The part of the head that goes by the stage of a pass."""
    assert task.stage.head is not None
    return task.stage.head


def _softmax(task: Task) -> Softmax:
    (given,) = task.taken
    return _part_of_head(task).softmax(GivenToHead(*given), task.stage.meter)


@runs("part of the softmax and input gradient")
def _softmax_and_input_gradient(task: Task) -> dict[ValueKind, Tensors]:
    found = task.kept[ValueKind.HEAD_WORK] = _softmax(task)
    return {ValueKind.SOFTMAX_SUMS: (found.sums,), ValueKind.GRADIENT_PART: _part_of_head(task).gradient_to_correct(found)}


@runs("weight gradient of the head")
def _weight_gradient_of_head(task: Task) -> dict[ValueKind, Tensors]:
    head, found = _part_of_head(task), task.kept.pop(ValueKind.HEAD_WORK)
    head.correct(found, Correction.of([sums for (sums,) in task.taken]), task.part)
    head.add_weight_gradients(found)
    return {}


@runs("part of the softmax")
def _softmax_alone(task: Task) -> dict[ValueKind, Tensors]:
    found = task.kept[ValueKind.HEAD_LOGITS] = _softmax(task)
    return {ValueKind.SOFTMAX_SUMS: (found.sums,)}


@runs("backward of the head")
def _backward_of_head(task: Task) -> dict[ValueKind, Tensors]:
    head, found = _part_of_head(task), task.kept.pop(ValueKind.HEAD_LOGITS)
    head.correct(found, Correction.of([sums for (sums,) in task.taken]), task.part)
    given = head.gradient(found)
    head.add_weight_gradients(found)
    return {ValueKind.GRADIENT_PART: given}
