"""Runs the steps of a pipeline on one rank: opens a step, plays the passes, and closes the losses.

Order of a step. All that a rank can refuse by itself is checked before it sends anything: then every rank can still raise the same error
and the pipeline stays open (`refusals`). The handshake comes next, and from then on ranks depend on each other: any error ends the
pipeline. Receives for losses are posted before the passes. Hooks run when the step begins and after its losses are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NoReturn

from torch import Tensor

from zerobubble.errors import InputError, raise_faults
from zerobubble.runtime.executor.batch import Batch
from zerobubble.runtime.executor.executor import Executor
from zerobubble.runtime.executor.program_cache import ReadyProgram
from zerobubble.runtime.failure.context import AgreedError
from zerobubble.runtime.stage.hook_reads import hook_fault
from zerobubble.runtime.step.batch import StepInputs
from zerobubble.runtime.step.captured_step import CapturedStep
from zerobubble.runtime.step.hook import TrainingStep
from zerobubble.runtime.step.loss_faults import why_nothing_trains
from zerobubble.runtime.step.loss_report import SetState
from zerobubble.runtime.step.opening import choose, open_step
from zerobubble.runtime.step.outputs import OutputFunction, Outputs, on_all_ranks
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.runtime.step.sequence import join_sequences
from zerobubble.runtime.values.gradients import EarlierSums


def train(runner: StepRunner, step_inputs: StepInputs, num_microbatches: int | None) -> Tensor:
    """Runs one training step with its hooks and returns the mean loss."""
    began = perf_counter()
    compiled = choose(runner, num_microbatches, step_inputs)
    assert compiled.train is not None
    runner.cut_model.release_if_changed()
    executor = compiled.train
    earlier = EarlierSums(runner.parameters(), runner.gradients)
    with runner.guard.during_step(executor):
        batch, passes = open_step(runner, executor, step_inputs, None, runner.ordering, captured=runner.captured)
        if passes:
            compiled = runner.programs.planned(passes)
            executor = compiled.training_with(runner.recording)
        with runner.guard.during_step(executor):  # errors name the passes of this executor from now on
            step = _trained(runner, compiled, executor, batch, step_inputs, began)
    assert step.loss is not None
    try:
        give_back(runner)
    except AgreedError:
        earlier.drop(all_steps=earlier.are_lost)
        raise
    runner.num_steps += 1
    runner.num_evaluations = 0
    with runner.guard.during("while handing back the gradients of inputs"):
        runner.input_gradients.hand_back(step.divisor)
    runner.step_hooks.end(step, compiled.stages)
    refuse_loss(runner, earlier)
    if runner.cut_model.is_whole:
        runner.cut_model.watch([parameter for parameter in runner.parameters() if runner.gradients.get(parameter) is not None])
    if not runner.losses.requires_grad:
        refuse_to_train_nothing(runner, compiled)
    return step.loss


def _trained(
    runner: StepRunner, compiled: ReadyProgram, executor: Executor, batch: Batch, step_inputs: StepInputs, began: float
) -> TrainingStep:
    """Plays a training step, and returns what hooks see of it."""
    runner.last = executor
    runner.scaling.begin(step_inputs.scaler)
    runner.played = compiled.schedule, batch.order
    step = TrainingStep(
        runner.num_steps,
        compiled.schedule,
        batch.known.memo,
        runner.measures_memory,
        divisor=runner.losses.divisor,
        began=began,
        wait_for_device=executor.records.clock.settle,
        records=executor.records.read,
        later_records=executor.records.read_later,
    )
    runner.step_hooks.begin(step, compiled.stages)
    runner.losses.begin_comparison(is_cut_by_user=isinstance(step_inputs.inputs, list) or isinstance(step_inputs.targets, list))
    with step.contexts:
        forwards_stand = runner.step_hooks.forwards_stand if step.rollback_checks else None
        if runner.captured is not None and runner.captured.is_ready:
            runner.captured.replay()
        else:
            _play(
                runner,
                compiled,
                executor,
                batch,
                step_inputs,
                forwards_stand,
                measures_memory=step.measures_memory,
                captured=runner.captured,
            )
    runner.losses.comparison.finish()
    step.loss = runner.losses.close()
    step.added_losses = runner.losses.added
    return step


def train_without_hooks(runner: StepRunner, compiled: ReadyProgram, step_inputs: StepInputs, *, measures_memory: bool = False) -> Tensor:
    """Runs a training step without hooks and returns the mean loss."""
    executor = compiled.train
    assert executor is not None
    with runner.guard.during_step(executor):
        batch, _ = open_step(runner, executor, step_inputs, None)
        _play(runner, compiled, executor, batch, step_inputs, measures_memory=measures_memory)
        loss = runner.losses.close()
    assert loss is not None
    refuse_loss(runner)
    return loss


def _play(
    runner: StepRunner,
    compiled: ReadyProgram,
    executor: Executor,
    batch: Batch,
    step_inputs: StepInputs,
    forwards_stand: Callable[[], bool] | None = None,
    *,
    measures_memory: bool,
    captured: CapturedStep | None = None,
) -> None:
    """Plays the passes of a training step, or captures them."""
    meter = runner.stages.meter(step_inputs.inputs, step_inputs.targets, step_inputs.kwargs) if measures_memory else None
    executor.records.meter = meter
    with runner.rng.isolated(), runner.stages.training(compiled.stages, meter):
        if captured is None:
            executor.run(batch, forwards_stand)
        else:
            captured.play(batch, executor.run, runner.losses.captured)


def evaluate(
    runner: StepRunner,
    step_inputs: StepInputs,
    num_microbatches: int | None,
    output_fn: OutputFunction | None = None,
    *,
    has_loss: bool = True,
) -> tuple[Tensor | None, list[Any] | None, Sequence[int]]:
    """Runs the forwards of a step in evaluation mode. Without a loss, targets are for `output_fn` alone.

    Returns the mean loss, None without targets, what is kept of the outputs of microbatches, None on a rank without a last stage, and
    the numbers of their samples, empty if this rank does not know them.
    """
    executor = choose(runner, num_microbatches, trains=False).infer
    runner.cut_model.release_if_changed()
    if runner.schedule.is_forward_only:
        runner.last = executor
    divided = runner.divided_loss if has_loss else None
    outputs = Outputs(executor.program.num_microbatches, output_fn, keeps_all=divided is not None)
    with runner.stages.evaluating(), runner.guard.during_step(executor):
        batch, _ = open_step(runner, executor, step_inputs, outputs, evaluation=runner.num_evaluations, has_loss=has_loss)
        with runner.rng.isolated(), runner.watching_copies():
            executor.run(batch)
        if divided is not None:
            divided.evaluate(runner.peers, runner.schedule, outputs.kept)
        if runner.rank in executor.ends[1]:
            outputs.finish()
        loss = runner.losses.close()
    give_back(runner)
    runner.num_evaluations += 1
    refuse_loss(runner)
    if runner.rank not in executor.ends[1]:
        return loss, None, ()
    slices = executor.program.slices
    return loss, join_sequences(outputs.kept, slices) if slices > 1 else outputs.kept, batch.sizes


def outputs_on_all_ranks(runner: StepRunner, outputs: Any) -> Any:
    """Returns the `outputs` of the rank of the last stage on every rank, which all call it."""
    with runner.guard.during("while copying outputs to all ranks"), runner.agreed_errors():
        return on_all_ranks(runner.peers, outputs, runner.schedule.placement.routes[0][-1])


def give_back(runner: StepRunner) -> None:
    """Gives the model what the code around its parts has set in a call, and `loss_fn` what it has set on ranks with a last stage."""
    doing = "sharing attributes that the model has set"

    def share(value: Any) -> Any:
        return next(shared for shared in runner.gather(value, doing) if shared is not None)

    runner.cut_model.refuse_attributes()
    with runner.agreed_errors():
        runner.stages.give_back(share if SetState.MODEL in runner.losses.set_state else None)
    if SetState.LOSS in runner.losses.set_state:
        changes = runner.losses.state.changed()
        from_all = runner.gather(changes, "sharing attributes that loss_fn has set")
        with runner.agreed_errors():
            runner.losses.state.put(from_all, changes)


def refuse_loss(runner: StepRunner, earlier: EarlierSums | None = None) -> None:
    """Raises the faults of `loss_fn` in the last step: the same `InputError` on every rank. The pipeline stays open.

    Microbatches before the fault may have added to gradients. These are dropped, with the `earlier` ones on all ranks if any is lost.
    """
    if not (runner.losses.is_refused or SetState.HOOKS in runner.losses.set_state):
        return
    reads = runner.losses.reads
    lacks = hook_fault(module) if (module := reads.hooks.stored()) else ""
    are_lost = earlier is not None and earlier.are_lost
    from_all = runner.gather((str(reads.fault or ""), str(lacks), are_lost), "refusing a loss")
    read, lacking, lost = (list(dict.fromkeys(filter(None, column))) for column in zip(*from_all, strict=True))
    if not (read or lacking or runner.losses.is_refused):
        return
    faults = read or lacking or ["loss_fn has a fault on another replica"]
    if lost:
        faults.append("microbatches before it have added to the gradients of earlier steps, so all gradients are dropped")
    if earlier is not None:
        earlier.drop(all_steps=bool(lost))
    with runner.agreed_errors():
        raise_faults(faults)


def refuse_to_train_nothing(runner: StepRunner, compiled: ReadyProgram) -> NoReturn:
    """Raises why no loss requires a gradient: the same `InputError` on every rank, and the pipeline stays open."""
    flows = {index: tuple(stage.flow) for index, stage in compiled.stages.items()}
    from_all = runner.gather((flows, runner.losses.output_requires_grad), "finding out why nothing trains")
    with runner.agreed_errors():
        raise InputError(why_nothing_trains([flow for flow, _ in from_all], any(requires_grad for _, requires_grad in from_all)))
