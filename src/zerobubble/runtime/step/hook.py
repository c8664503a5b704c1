"""Hooks into training steps: `StepHook`, the public protocol, and `StepHooks`, which calls the hooks of one pipeline in order.

A hook is attached to a pipeline on each rank. It is called in the training steps of this rank: when one begins, when the gradients of a
stage are ready, before an optimizer uses gradients, and when the step ends. Evaluation, `Pipeline.profile` and `Pipeline.describe` call no
hook.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zerobubble.arguments import wrong
from zerobubble.costs import Costs
from zerobubble.errors import InputError, PipelineError
from zerobubble.ir import Schedule
from zerobubble.runtime.measure.trace import Records
from zerobubble.runtime.stage.sharded import ShardedTensors
from zerobubble.runtime.step.memory_forecast import MemoryForecasts
from zerobubble.runtime.step.optimizers import GradientScaling, SteppingOptimizers
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.timeline import Timeline


@dataclass
class TrainingStep:
    """One training step of this rank, as its hooks see it.

    Attributes:
        number: The index of the step, counted from 0.
        schedule: The schedule that it plays.
        memo: One dict for all steps with the same input shapes, in which a hook may cache results under its own key.
        measures_memory: Set it to True in `on_step_begin` to have the bytes held for backward recorded in the timeline of the step.
        loss: The mean loss, a scalar tensor; set when the step ends.
        added_losses: The parts of it that stages added, by name; set when the step ends.
        divisor: Sums of gradients are divided by it when the step ends; 1 if each loss is weighted before its backward pass.
        began: The `perf_counter()` at which the step began.
        contexts: The contexts of `run_passes_in`.
        rollback_checks: The functions of `start_over_unless`.
        wait_for_device: Waits until the device has finished its work.
        records: Returns what this rank recorded in the step, once it has ended.
        later_records: Returns a function that returns the same, even during later steps.
    """

    number: int
    schedule: Schedule
    memo: dict[str, Any]
    measures_memory: bool = False
    loss: Tensor | None = None
    added_losses: Mapping[str, Tensor] = field(default_factory=dict)
    divisor: int = 1
    began: float = 0.0
    contexts: ExitStack = field(default_factory=ExitStack)
    rollback_checks: list[Callable[[], bool]] = field(default_factory=list)
    wait_for_device: Callable[[], None] = lambda: None
    records: Callable[[], Records] = lambda: Records(())
    later_records: Callable[[], Callable[[], Records]] = lambda: lambda: Records(())

    def run_passes_in(self, context: AbstractContextManager[Any]) -> None:
        """Runs the passes of the step inside `context`, which exits after the last of them or a failure. Call it in `on_step_begin`."""
        self.contexts.enter_context(context)

    def start_over_unless(self, forwards_stand: Callable[[], bool]) -> None:
        """Calls `forwards_stand()` at the rollback point; if it returns False, the forwards before it rerun. Call it in `on_step_begin`.

        Every rank must return the same result. It needs a hook with `needs_rollback_point`.
        """
        self.rollback_checks.append(forwards_stand)

    def times(self) -> list[tuple[int, int]]:
        """Returns when each step of the rank's row began and ended, in `perf_counter_ns`; two overlapped passes are one step.

        Call it once the step has ended.
        """
        return list(dict.fromkeys((begin, end) for _, begin, end in self.records().spans))

    def seconds(self) -> float:
        """Returns the seconds since the step began, after the device has finished its work."""
        self.wait_for_device()
        return perf_counter() - self.began


class AttachedPipeline(Protocol):
    """What a hook may use of the pipeline that it is attached to.

    Attributes:
        rank: The rank in the pipeline.
        num_ranks: The number of ranks in the pipeline.
        device: The device of this rank's stages.
        modules: This rank's modules, by stage.
        gradients: Where their gradients are summed (`.grad` or `.main_grad`).
        counted_elsewhere: Shared parameters that another rank or stage counts in the norm of the whole model.
        sharded: The parameters and buffers that are sharded over ranks.
        peers: The ranks of the pipeline, to exchange messages with.
        schedule: The current schedule.
        scaling: What the last training step did to the gradients.
        optimizers: The optimizers that step this rank's parameters.
        ranks_meet: Whether all ranks have synchronized between steps, as for a norm of all gradients.
    """

    rank: int
    num_ranks: int
    device: torch.device
    modules: Mapping[int, nn.Module]
    gradients: Gradients
    counted_elsewhere: AbstractSet[nn.Parameter]
    sharded: ShardedTensors
    peers: Peers
    schedule: Schedule
    scaling: GradientScaling
    optimizers: SteppingOptimizers
    ranks_meet: bool

    @property
    def failure(self) -> PipelineError | None:
        """The error that ended the pipeline; None while it is open, or if `Pipeline.close` closed it."""

    @property
    def hooks(self) -> Sequence[StepHook]:
        """The attached hooks, in order."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Returns the parameters of this rank's stages, each once; an empty one follows if none of them requires a gradient."""

    def activity(self, when: str) -> AbstractContextManager[None]:
        """Returns a context in which any failure ends the pipeline on every rank, as a failure `when`, such as "while saving"."""

    def agreed_errors(self) -> AbstractContextManager[None]:
        """Returns a context in which every rank raises the same `InputError`, which leaves the pipeline open."""

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Returns the `value` of each rank, in rank order; all ranks must call it. `doing` describes the call in errors.

        The value is made of numbers, text, None and dtypes of torch, in tuples, lists, sets and dicts. Send tensors with torch.distributed.
        """

    def timeline(self) -> Timeline:
        """Returns what every rank did in the last step; all ranks must call it."""

    def before_optimizer(self, *, ranks_meet: bool = False) -> None:
        """Notifies every hook that gradients are about to be used; `ranks_meet` says that all ranks meet for it."""

    def record_optimizer(self) -> AbstractContextManager[None]:
        """Returns a context whose time is recorded in the timeline of the last step as a step of the optimizer."""

    def record_reduction(self, stage: int, began: int, ended: int) -> None:
        """Records a sum of the gradients of `stage` over replicas in the timeline of the last step, from `began` to `ended`.

        Both are times of `perf_counter_ns`.
        """

    def memory_forecast_of(self, schedule: Schedule, costs: Costs) -> MemoryForecasts:
        """Returns what each rank would hold after `change_schedule(schedule, costs)`; all ranks must call it."""

    def change_schedule(self, schedule: Schedule, costs: Costs) -> None:
        """Plays `schedule` from the next step on, with receives posted as early as `costs` require; all ranks must make the same change."""


class StepHook:
    """The base class of hooks into a pipeline's training steps. Override the methods that you need; each does nothing here.

    Attach a hook with `Pipeline(hooks=[...])` or `Pipeline.attach`; on every rank alike if it communicates. Hooks are called in the order
    in which they were attached, after those of the pipeline itself (shared parameters). Any exception in a hook ends the step on every rank
    with one error.
    """

    needs_rollback_point = False
    """Whether steps must be able to start over (`TrainingStep.start_over_unless`). Their forwards then run as early as that allows."""

    takes_gradients_early = False
    """Whether the last W's of each stage run parameter by parameter, for `on_gradients_complete`. Gradients stay equal in every bit."""

    needs_row_steps = False
    """Whether `before_step_of_row` is called before each step of the rank's row."""

    completes_at_end: frozenset[nn.Parameter] = frozenset()
    """Parameters whose gradients this hook completes in `on_step_end`; for later hooks they become ready only then."""

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Called when the hook joins `pipeline`. An `InputError` raised here is raised on every rank."""

    def on_step_begin(self, step: TrainingStep) -> None:
        """Called when the training step `step` begins: its inputs are split and valid, and no pass has run."""

    def before_step_of_row(self, number: int) -> None:
        """Called before this rank waits for the inputs of step `number` of its row (from 0): one pass, or two overlapped ones.

        Only hooks with `needs_row_steps` are called, once more for forwards that start over.
        """

    def on_gradients_complete(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Called when the gradients of `parameters` are complete, while the last W's of `stage` still add to those of others.

        It is called within these W's, on hooks with `takes_gradients_early`, for stages whose split computes parameters one after another:
        "deferred" and not sharded by FSDP2. `on_stage_gradients_ready` has all parameters once more.
        """

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Called after the last B or W of `stage` on this rank: no pass of this step adds to the gradients of `parameters` any more.

        If FSDP2 shards the stage, its reductions are over, too; the pass after which that is so may differ between ranks.

        It is called between two passes, as early as the schedule allows, once for each stage. A parameter that several stages of this rank
        hold comes with the last of them. Parameters that several stages or ranks share come in a second call at the end of the step, once
        the sum of their gradients is known. On a GPU the passes are enqueued on the current stream, and work enqueued now runs after them.
        """

    def on_start_over(self, step: TrainingStep) -> None:
        """Called when the forwards of `step` before its rollback point are discarded and about to rerun."""

    def on_step_end(self, step: TrainingStep) -> None:
        """Called when all passes of the step are over and `step.loss` is set. It is between two steps, so the schedule may be changed."""

    def before_optimizer(self) -> None:
        """Called once after each step, before clipping, unscaling or an optimizer uses the gradients of this pipeline's parameters."""

    def settle(self) -> None:
        """Called before anything other than a training step looks at weights or gradients. Make pending changes final."""

    def before_close(self) -> None:
        """Called on every rank by `Pipeline.close`: finish what involves other ranks, while they can be reached."""

    def on_close(self) -> None:
        """Called when the pipeline closes or has failed: drop messages and everything else in progress."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint should hold of this hook; nothing by default."""
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `InputError` if `load_state_dict` would refuse `state`; changes nothing.

        Every rank calls it before anything is loaded. A hook that overrides it is loaded last, and must not refuse then.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`, which an earlier `state_dict` returned. To refuse it, raise any exception.

        If any hook on any rank refuses its state, nothing is loaded: `load_state_dict` is called once more, with the state that the hook
        had before. A hook that cannot return to its earlier state overrides `check_state_dict`.
        """


class StepHooks:
    """The hooks of one pipeline, in the order in which they are called.

    `modules` are this rank's modules by stage. `activity` is that of `AttachedPipeline`.
    """

    def __init__(self, modules: Mapping[int, nn.Module], activity: Callable[[str], AbstractContextManager[None]]) -> None:
        self._hooks: list[StepHook] = []
        self._modules = modules
        self._activity = activity
        self._step: TrainingStep | None = None
        self._stages_under_way: set[int] = set()
        self._gradients_are_used = True

    @property
    def need_rollback_points(self) -> bool:
        """Whether any hook lets steps start over."""
        return any(hook.needs_rollback_point for hook in self._hooks)

    @property
    def attached(self) -> Sequence[StepHook]:
        """The hooks, in the order in which they are called."""
        return tuple(self._hooks)

    def attach(self, hook: StepHook, pipeline: AttachedPipeline) -> None:
        """Adds `hook`. Raises `InputError` if it is not a hook, or is already attached."""
        if not isinstance(hook, StepHook):
            raise wrong("a hook", hook, "a zerobubble.hooks.StepHook", "derive its class from StepHook")
        if hook in self._hooks:
            raise InputError("this {hook} is already attached to the pipeline; {remedy}", hook=type(hook).__name__, remedy="attach it once")
        hook.on_attach(pipeline)
        self._hooks.append(hook)

    def _parameters(self, stage: int) -> list[nn.Parameter]:
        """Returns the parameters of a stage that require a gradient."""
        return [parameter for parameter in self._modules[stage].parameters() if parameter.requires_grad]

    def begin(self, step: TrainingStep, stages: Iterable[int]) -> None:
        """Begins a training step of these stages."""
        self._step = step
        self._stages_under_way = set(stages)
        self._gradients_are_used = False
        self.call_all("on_step_begin", step)

    def call_all(self, method: str, *args: Any) -> None:
        """Calls `method` of every hook, in order."""
        for hook in self._hooks:
            with self._activity(f"in {method} of {type(hook).__name__}"):
                getattr(hook, method)(*args)

    def forwards_stand(self) -> bool:
        """Whether no hook wants the step to start over, at the rollback point. All hooks are asked."""
        assert self._step is not None
        answers = [check() for check in self._step.rollback_checks]
        if all(answers):
            return True
        for hook in self._hooks:
            hook.on_start_over(self._step)
        return False

    @property
    def _use_ready_gradients(self) -> bool:
        """Whether any hook uses the gradients of a stage as soon as they are ready."""
        unused = StepHook.on_stage_gradients_ready
        return any(getattr(hook.on_stage_gradients_ready, "__func__", None) is not unused for hook in self._hooks)

    @property
    def takes_gradients_early(self) -> bool:
        """Whether any hook takes gradients while the last W's of their stage run."""
        return self._step is not None and any(hook.takes_gradients_early for hook in self._hooks)

    def gradients_are_complete(self, stage: int, parameters: Collection[nn.Parameter]) -> None:
        """Notifies hooks that nothing in `stage` adds to the gradients of these parameters any more, except those that other stages use."""
        used_elsewhere = self._used_by(self._stages_under_way - {stage})
        left: Sequence[nn.Parameter] = [parameter for parameter in parameters if parameter not in used_elsewhere]
        for hook in self._hooks:
            if hook.takes_gradients_early and left:
                with _note_method("on_gradients_complete", hook):
                    hook.on_gradients_complete(stage, left)
            left = _without(left, hook.completes_at_end)

    def _used_by(self, stages: Iterable[int]) -> set[nn.Parameter]:
        return {parameter for stage in stages for parameter in self._parameters(stage)}

    def before_step_of_row(self, number: int) -> None:
        """Notifies hooks of the next step of the rank's row; does nothing outside of training steps."""
        if self._step is not None:
            for hook in self._hooks:
                if hook.needs_row_steps:
                    with _note_method("before_step_of_row", hook):
                        hook.before_step_of_row(number)

    def stage_is_done(self, stage: int) -> None:
        """Notifies hooks that the last backward pass of `stage` has run; does nothing outside of training steps."""
        self._stages_under_way.discard(stage)
        if self._step is not None and self._use_ready_gradients:
            used_later = self._used_by(self._stages_under_way)
            self._notify_ready(0, stage, [parameter for parameter in self._parameters(stage) if parameter not in used_later])

    def _notify_ready(self, first: int, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Notifies the hooks from index `first` on, each without the parameters that an earlier one still completes."""
        for hook in self._hooks[first:]:
            with _note_method("on_stage_gradients_ready", hook):
                hook.on_stage_gradients_ready(stage, parameters)
            parameters = _without(parameters, hook.completes_at_end)

    def end(self, step: TrainingStep, stages: Iterable[int]) -> None:
        """Ends a training step after its passes."""
        for stage in sorted(self._stages_under_way):  # stages without a pass in this step
            self.stage_is_done(stage)
        self._step = None
        for number, hook in enumerate(self._hooks):
            with self._activity(f"in on_step_end of {type(hook).__name__}"):
                hook.on_step_end(step)
                self._notify_completed(number, hook, stages)

    def _notify_completed(self, number: int, hook: StepHook, stages: Iterable[int]) -> None:
        """Notifies the hooks after this one of the gradients that it has just completed, each parameter once."""
        left = set(hook.completes_at_end)
        for stage in stages if left else ():
            completed = [parameter for parameter in self._parameters(stage) if parameter in left]
            left.difference_update(completed)
            if completed:
                self._notify_ready(number + 1, stage, completed)

    def before_optimizer(self) -> None:
        """Notifies hooks that gradients are about to be used, unless that has happened since the last step."""
        if not self._gradients_are_used:
            self._gradients_are_used = True
            self.call_all("before_optimizer")

    def close(self) -> None:
        """Closes every hook, whatever one of them raises; then raises it."""
        self._step = None
        with ExitStack() as rest:
            for hook in reversed(self._hooks):
                rest.callback(hook.on_close)


def _without(parameters: Sequence[nn.Parameter], left_out: AbstractSet[nn.Parameter]) -> Sequence[nn.Parameter]:
    return [parameter for parameter in parameters if parameter not in left_out] if left_out else parameters


@contextmanager
def _note_method(method: str, hook: StepHook) -> Iterator[None]:
    """Adds a note with the method of the hook to an error raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {method} of {type(hook).__name__}")
        raise
