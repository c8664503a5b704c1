"""Compiles the passes of a row: each becomes a call that takes its inputs, and one that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from zerobubble.ir import Kind, Op
from zerobubble.kinds import SENT_BETWEEN_STAGES, ValueKind, traits_of
from zerobubble.program import Program
from zerobubble.rules import Value
from zerobubble.runtime.executor.batch import Batch
from zerobubble.runtime.executor.row_values import GATHERED, RowValues
from zerobubble.runtime.executor.runs import Task, run_of
from zerobubble.runtime.stage.slice_proof import prove_slices
from zerobubble.runtime.stage.slices import StageSlices
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.values.payload import Cotangents, Tensors, with_keywords


class Pass(NamedTuple):
    """A pass that is ready to run: `take` waits for its inputs, `work` computes it."""

    op: Op
    take: Callable[[], Any]
    work: Callable[[Any], object]


class RowPasses:
    """Compiles the passes of `program` on `stages`, this rank's stages by index. They read `batch`, the inputs of the current step."""

    def __init__(self, program: Program, stages: Mapping[int, Stage], values: RowValues) -> None:
        for kind in program.kinds:  # of all rows: every rank refuses a missing kind, and none begins a step that another refuses
            run_of(kind)
        for recompute_kind in {*program.recomputed.values()}:
            run_of(Kind.F, recompute_kind)
        self.batch: Batch | None = None
        self._program = program
        self._trains = not program.is_forward_only
        self._stages = stages
        self._values = values
        self._kept: dict[tuple[int, int], dict[ValueKind, Any]] = {}
        self._slices = _slices_of(program, stages, self._trains) if program.slices > 1 else {}

    def discard(self) -> None:
        """Drops the results of passes."""
        self.batch = None
        self._values.made.clear()
        for kept in self._kept.values():
            kept.clear()
        for stage in self._stages.values():
            stage.clear()
        for slices in self._slices.values():
            slices.clear()

    def compile(self, op: Op) -> Pass:
        """Returns the calls of a pass, on its slice of a sequence if microbatches are cut."""
        compiled = self._whole(op)
        return compiled._replace(work=self._slices[op.stage].wrap(op, compiled.work)) if self._slices else compiled

    def _whole(self, op: Op) -> Pass:
        traits = traits_of(op.kind)
        if traits.gathers:
            return self._part(op)
        if ValueKind.ACTIVATION in traits.makes:
            return self._forward(op)
        if any(value_kind is ValueKind.GRADIENT for value_kind, _ in traits.uses):
            return self._backward(op)
        task, run = self._task(op), run_of(op.kind)
        return Pass(op, tuple, lambda _: run(task))  # waits for no other stage, such as W

    def _task(self, op: Op, part: int = 0) -> Task:
        return Task(self._stages[op.stage], op.microbatch, self._kept.setdefault((op.stage, op.microbatch), {}), part)

    def _forward(self, op: Op) -> Pass:
        stage, microbatch, values = self._stages[op.stage], op.microbatch, self._values.made
        task = self._task(op)
        source, target = _between_stages(self._program.uses((op,))), _between_stages(self._program.makes((op,)))
        to_head = [value for value in self._program.makes((op,)) if value.value_kind in GATHERED]
        run = run_of(op.kind, self._program.recomputed.get(op[1:]))
        received = None if source is None else self._values.taking(source, self._values.inputs)

        def take() -> Tensors:
            assert self.batch is not None
            number, named = self.batch.order[microbatch], self.batch.named_arguments
            inputs = self.batch.inputs[number] if received is None else received()
            return with_keywords(inputs, named[op.stage][number]) if op.stage in named else inputs

        def train(inputs: Tensors) -> None:
            batch = self.batch
            assert batch is not None
            number = batch.order[microbatch]
            batch.seed_pass(op.stage, number, False)
            task.inputs = inputs
            if target is None and not to_head:
                task.finish = partial(batch.finish, number)
                batch.arrive(stage, inputs)
            try:
                outputs = run(task)
            finally:
                task.finish = None
                task.inputs = ()
            if target is not None:
                values[target] = outputs
            for value in to_head:
                assert batch.divided_loss is not None
                values[value] = batch.divided_loss.head_inputs(number, outputs)

        def infer(inputs: Tensors) -> None:
            batch = self.batch
            assert batch is not None
            number = batch.order[microbatch]
            batch.seed_pass(op.stage, number, False)
            outputs = stage.infer(inputs, partial(batch.finish, number) if target is None else None)
            if target is not None:
                values[target] = outputs

        return Pass(op, take, train if self._trains else infer)

    def _backward(self, op: Op) -> Pass:
        task, values, run = self._task(op), self._values.made, run_of(op.kind)
        source, target = _between_stages(self._program.uses((op,))), _between_stages(self._program.makes((op,)))

        def seed() -> Cotangents:
            assert self.batch is not None
            return (self.batch.seed(self.batch.order[op.microbatch]),)

        def work(gradients: Cotangents) -> None:
            assert self.batch is not None
            self.batch.seed_pass(op.stage, self.batch.order[op.microbatch], True)
            task.inputs = gradients
            try:
                outputs = run(task)
            finally:
                task.inputs = ()
            if target is not None:
                values[target] = outputs

        def work_on_parts(parts: Sequence[Tensors]) -> None:
            assert self.batch is not None
            assert self.batch.divided_loss is not None
            work(self.batch.divided_loss.output_gradient(self.batch.order[op.microbatch], parts))

        if any(value.value_kind in GATHERED for value in self._program.uses((op,))):
            return Pass(op, self._values.collecting(op), work_on_parts)
        return Pass(op, seed if source is None else self._values.taking(source), work)

    def _part(self, op: Op) -> Pass:
        """Compiles a pass of a divided head."""
        task, values, run = self._task(op, self._program.head_parts.index(op.stage)), self._values.made, run_of(op.kind)
        targets = [value for value in self._program.makes((op,)) if value.value_kind in GATHERED]

        def work(gathered: Sequence[Tensors]) -> None:
            task.inputs = gathered
            try:
                results = run(task)
            finally:
                task.inputs = ()
            for value in targets:
                values[value] = results[value.value_kind]

        return Pass(op, self._values.collecting(op), work)


def _between_stages(values: Sequence[Value]) -> Value | None:
    """Returns the value among these that a pass takes from its neighbor or makes for the next; None at the ends of the model."""
    return next((value for value in values if value.value_kind in SENT_BETWEEN_STAGES), None)


def _slices_of(program: Program, stages: Mapping[int, Stage], trains: bool) -> dict[int, StageSlices]:
    """Returns what slices leave to later ones, by stage."""
    last = program.num_stages - 1
    return {
        index: StageSlices(index, program.slices, trains, partial(prove_slices, stage, index == last)) for index, stage in stages.items()
    }
