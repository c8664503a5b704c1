"""A kind of pass that a test adds runs on real ranks by its own function, and gives one device's gradients.

A kind is written once, in `kinds.py`. A kind that a test adds is checked, simulated, lowered, drawn and run; an unknown one is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_gradients import worst_errors
from tests.recomputing import recomputing, with_recomputation
from tests.refusals import states
from zerobubble.kinds import ValueKind, change_kind, traits_of
from zerobubble.runtime.executor.runs import Task, runs

RAN: list[str] = []


@runs("own lean forward")
def forward_lean(task: Task) -> Any:
    """Runs the forward and keeps only its inputs."""
    RAN.append(f"{task.stage.index}C{task.microbatch}")
    task.kept[ValueKind("k")] = task.inputs
    with torch.no_grad():
        outputs = task.stage.infer(task.inputs, task.finish)
    return tuple(output.detach().requires_grad_() for output in outputs)


@runs("forward computed again")
def forward_again(task: Task) -> None:
    """Recomputes the values that B needs from the kept inputs."""
    RAN.append(f"{task.stage.index}A{task.microbatch}")
    task.stage.forward(task.microbatch, task.kept.pop(ValueKind("k")))


def train(group: Any, name: str, microbatches: int) -> tuple[dict[str, float], list[str], list[str]]:
    RAN.clear()
    with recomputing():
        schedule = with_recomputation(zb.make(name, group.size(), microbatches))
        errors = worst_errors(group, schedule, steps=1)
        return errors, sorted(RAN), sorted(str(op) for op in schedule.rows[group.rank()] if op.kind in ("C", "A"))


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("1f1b", 3, 5), ("zb-h1", 2, 4), ("zb-v", 2, 6), ("dualpipe", 2, 4)])
def test_an_added_kind_trains_with_the_numbers_of_one_device(world: Ranks, name: str, ranks: int, microbatches: int) -> None:
    results = world.run(train, name, microbatches, ranks=ranks)
    assert any(ran for _, ran, _ in results)
    for errors, ran, planned in results:
        assert max(errors.values()) <= 1e-12
        assert ran == planned


def evaluate_and_draw(group: Any) -> tuple[float, float, set[str]]:
    """The losses of evaluation and training, and the kinds of passes in the measured timeline."""
    with recomputing():
        schedule = with_recomputation(zb.make("1f1b", 2, 4))
        with zb.Pipeline(build, schedule, 4, loss_fn, group=group) as pipe:
            inputs, targets = batch(4)
            trained = pipe.step(inputs, targets)
            timeline = pipe.timeline()
            evaluated = pipe.eval_step(inputs, targets)
        return trained.item(), evaluated[0].item(), {str(span.op.kind) for _, span in timeline.spans()}


def test_an_added_kind_is_measured_and_left_out_of_evaluation(world: Ranks) -> None:
    for trained, evaluated, kinds in world.run(evaluate_and_draw, ranks=2):
        assert evaluated == pytest.approx(trained, rel=1e-12)
        assert kinds == {"C", "A", "F", "BW"}


def start_without_a_function(group: Any) -> str:
    with recomputing():
        lean = zb.Kind("C")
        change_kind(lean, replace(traits_of(lean), run="nothing"))
        schedule = with_recomputation(zb.make("1f1b", 2, 4))
        with pytest.raises(zb.PipelineError) as caught:
            zb.Pipeline(build, schedule, 4, loss_fn, group=group)
        return str(caught.value)


def test_a_kind_without_a_function_is_refused_on_every_rank(world: Ranks) -> None:
    for result in world.run(start_without_a_function, ranks=2):
        states(result, "kind C", "nothing", "forward", "backward")
