"""What plugs into training steps: `StepHook`, the public protocol, and `StepHooks`, which calls those of one pipeline in order.

A hook is attached to a pipeline on each rank and hears of this rank's training steps: when one begins, when the gradients of a stage are
ready, before an optimizer uses gradients, and when the step ends. Evaluation, `Pipeline.profile` and `Pipeline.describe` call no hook.
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

from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.ir import Op, Schedule
from zerobubble.runtime.stage.divided import DividedTensors
from zerobubble.runtime.step.forecast import MemoryForecasts
from zerobubble.runtime.step.optimizers import SteppingOptimizers
from zerobubble.runtime.step.scaling import GradientScaling
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.timeline import Timeline


@dataclass
class TrainingStep:
    """One training step of this rank, as its hooks see it.

    `number` counts the pipeline's training steps from 0, `schedule` is what this one plays. `memo` is one dict for all steps whose inputs
    have the same shapes: a hook may keep there, under a key of its own, what it worked out about such a step. A hook that sets
    `measures_memory` when the step begins has the bytes held for backward recorded in the timeline of the step. `loss`, the mean loss as a
    scalar tensor, is there when the step ends, and so is `added_losses`, the parts of it that stages added by name. `divisor` is what the
    sums of gradients are divided by when the step ends, 1 where each loss has its share in the mean before its backward pass.
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
    questions: list[Callable[[], bool]] = field(default_factory=list)
    wait_for_device: Callable[[], None] = lambda: None
    spans: Callable[[], Sequence[tuple[Op, int, int]]] = tuple

    def run_passes_in(self, context: AbstractContextManager[Any]) -> None:
        """When the step begins: let its passes run inside `context`, which is left when the last of them is over or one has failed."""
        self.contexts.enter_context(context)

    def start_over_unless(self, forwards_stand: Callable[[], bool]) -> None:
        """When the step begins: ask `forwards_stand()` at the rollback point, and run the forwards before it again if the answer is no.

        Every rank must give the same answer. It takes a hook with `needs_rollback_point`.
        """
        self.questions.append(forwards_stand)

    def times(self) -> list[tuple[int, int]]:
        """When each step of the rank's row began and ended, in `perf_counter_ns`; two overlapped passes are one step. When it ends."""
        return list(dict.fromkeys((begin, end) for _, begin, end in self.spans()))

    def seconds(self) -> float:
        """The time since the step began, after the device has finished what it was given."""
        self.wait_for_device()
        return perf_counter() - self.began


class AttachedPipeline(Protocol):
    """What a hook may ask of the pipeline that it is attached to.

    `modules` are this rank's, by stage. `gradients` tells where their gradients are summed (`.grad` or `.main_grad`).
    `schedule` is what is played now. `counted_elsewhere` are shared parameters that another rank, or another stage, already counts in the
    norm of the whole model, `divided` tells of which ranks hold parts. `scaling` is what the last training step did to the gradients,
    `optimizers` are those that step them. `ranks_meet` says whether all ranks have met between steps, as for a norm of all
    gradients.
    """

    rank: int
    num_ranks: int
    device: torch.device
    modules: Mapping[int, nn.Module]
    gradients: Gradients
    counted_elsewhere: AbstractSet[nn.Parameter]
    divided: DividedTensors
    peers: Peers
    schedule: Schedule
    scaling: GradientScaling
    optimizers: SteppingOptimizers
    ranks_meet: bool

    @property
    def hooks(self) -> Sequence[StepHook]:
        """The hooks attached so far, in order."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once; behind them an empty one where none of them trains."""

    def activity(self, when: str) -> AbstractContextManager[None]:
        """Whatever fails inside ends the pipeline on every rank, and is told there as what happened `when`, such as "while saving"."""

    def alike(self) -> AbstractContextManager[None]:
        """An `InputError` raised inside is raised by every rank alike, and leaves the pipeline open."""

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Everyone's `value`, in rank order, on every rank; all ranks must call it. `doing` tells a rank that waits in vain.

        The value is made of numbers, text, None and torch's dtypes, in tuples, lists, sets and dicts; tensors go by torch.distributed.
        """

    def timeline(self) -> Timeline:
        """What every rank did in the last step; all ranks must call it."""

    def before_optimizer(self, *, ranks_meet: bool = False) -> None:
        """Tell every hook that gradients are about to be used, all ranks meeting for it or each rank by itself."""

    def record_optimizer(self) -> AbstractContextManager[None]:
        """Put what runs inside into the timeline of the last step as a step of the optimizer."""

    def record_reduction(self, stage: int, began: int, ended: int) -> None:
        """Put a sum of the gradients of `stage` over replicas into the timeline of the last step; times in `perf_counter_ns`."""

    def memory_forecast_of(self, schedule: Schedule, costs: Costs) -> MemoryForecasts:
        """What each rank would hold in the steps of `schedule`, if `change_schedule` were called with it; all ranks must call it."""

    def change_schedule(self, schedule: Schedule, costs: Costs) -> None:
        """Play `schedule` from the next step on, with receives posted as early as `costs` ask for; all ranks must change alike."""


class StepHook:
    """What plugs into a pipeline's training steps: override the methods that you need, each does nothing here.

    Attach a hook with `Pipeline(hooks=[...])` or `Pipeline.attach`, on every rank alike where it communicates. Hooks are called in the
    order in which they were attached, those of the pipeline's own (shared parameters) first. Whatever a hook raises ends the step on
    every rank with one error.
    """

    needs_rollback_point = False
    """Whether steps must be able to start over (`TrainingStep.start_over_unless`); their forwards then run as early as that allows."""

    takes_gradients_early = False
    """Whether the last W's of each stage are to go parameter by parameter, for `on_gradients_complete`; gradients keep all their bits."""

    hears_of_row = False
    """Whether `before_step_of_row` is called before each step of the rank's row."""

    completes_at_end: frozenset[nn.Parameter] = frozenset()
    """Parameters whose gradients this hook completes in `on_step_end`: hooks after it hear of them as ready only then."""

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """The hook joins `pipeline`. An `InputError` raised here is told on every rank."""

    def on_step_begin(self, step: TrainingStep) -> None:
        """A training step begins: its inputs are cut and known to be legal, no pass has run."""

    def before_step_of_row(self, number: int) -> None:
        """This rank is about to wait for what step `number` of its row (from 0) uses: one pass, or two overlapped.

        Called on hooks that ask for it (`hears_of_row`). Where forwards start over, it is called again for these.
        """

    def on_gradients_complete(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """No pass of this step adds to the gradients of `parameters` any more, while the last W's of `stage` still have others to do.

        Called within these W's, on hooks that take gradients early (`takes_gradients_early`), for stages whose split lets parameters be
        done one after another: "deferred", and not divided by FSDP2. `on_stage_gradients_ready` names all parameters once more.
        """

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """The last B or W of `stage` has run on this rank, so no pass of this step adds to the gradients of `parameters` any more.

        Where FSDP2 divides the stage, its reductions are over, too; after which pass that is may differ between ranks.
        It is called between two passes, as early as the schedule allows, once for each stage; a parameter that several stages of this
        rank hold comes with the last of them. Parameters that several stages or ranks share
        come with a second call at the end of the step, once the sum of their gradients is there. On a GPU the passes are enqueued on the
        current stream, and what is enqueued there now runs behind them.
        """

    def on_start_over(self, step: TrainingStep) -> None:
        """The forwards before the rollback point are forgotten and will run again."""

    def on_step_end(self, step: TrainingStep) -> None:
        """All passes of the step are over, and `step.loss` is there. Called between two steps, so the schedule may be changed."""

    def before_optimizer(self) -> None:
        """Gradients are about to be used: by clipping, unscaling or an optimizer over this pipeline's parameters. Once after each step."""

    def settle(self) -> None:
        """Something else than a training step is about to look at weights or gradients: make what is still pending final."""

    def before_close(self) -> None:
        """`Pipeline.close` was called, on every rank: end what is under way together with the other ranks, who can still be reached."""

    def on_close(self) -> None:
        """The pipeline is closing or has failed: let go of messages and of everything else that is still under way."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should hold of this hook; nothing by default."""
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise `InputError` if `load_state_dict` could not take over `state`; change nothing.

        Every rank asks before anything is loaded. A hook that defines this is loaded last, and must not refuse then.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Any exception refuses it.

        If another hook, or the hook on another rank, refuses its state, this is called a second time, with what `state_dict` gave just
        before, so that nothing is half loaded. A hook that cannot go back defines `check_state_dict`.
        """


class StepHooks:
    """The hooks of one pipeline, in the order in which they are called.

    `modules` are this rank's by stage. `activity` is that of `AttachedPipeline`.
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
        """Call `hook` from now on. Raises `InputError` for what is no hook, or is attached already."""
        if not isinstance(hook, StepHook):
            raise InputError(f"a hook must be a zerobubble.hooks.StepHook, got {type(hook).__name__}: derive its class from StepHook")
        if hook in self._hooks:
            raise InputError(f"this {type(hook).__name__} is attached to the pipeline already; attach each hook once")
        hook.on_attach(pipeline)
        self._hooks.append(hook)

    def _parameters(self, stage: int) -> list[nn.Parameter]:
        """Those of a stage that train."""
        return [parameter for parameter in self._modules[stage].parameters() if parameter.requires_grad]

    def begin(self, step: TrainingStep, stages: Iterable[int]) -> None:
        """A training step of these stages begins."""
        self._step = step
        self._stages_under_way = set(stages)
        self._gradients_are_used = False
        for hook in self._hooks:
            with self._activity(f"in on_step_begin of {type(hook).__name__}"):
                hook.on_step_begin(step)

    def forwards_stand(self) -> bool:
        """At the rollback point: whether no hook wants the step to start over. Every question is asked."""
        assert self._step is not None
        answers = [question() for question in self._step.questions]
        if all(answers):
            return True
        for hook in self._hooks:
            hook.on_start_over(self._step)
        return False

    @property
    def takes_gradients_early(self) -> bool:
        """Whether any hook hears of gradients while the last W's of their stage run."""
        return self._step is not None and any(hook.takes_gradients_early for hook in self._hooks)

    def gradients_are_complete(self, stage: int, parameters: Collection[nn.Parameter]) -> None:
        """Nothing adds to the gradients of these parameters of `stage` any more but what other stages may."""
        used_elsewhere = self._used_by(self._stages_under_way - {stage})
        left: Sequence[nn.Parameter] = [parameter for parameter in parameters if parameter not in used_elsewhere]
        for hook in self._hooks:
            if hook.takes_gradients_early and left:
                with _noting("on_gradients_complete", hook):
                    hook.on_gradients_complete(stage, left)
            left = _without(left, hook.completes_at_end)

    def _used_by(self, stages: Iterable[int]) -> set[nn.Parameter]:
        return {parameter for stage in stages for parameter in self._parameters(stage)}

    def before_step_of_row(self, number: int) -> None:
        """Step `number` of the rank's row is the next; nothing to tell outside of training steps."""
        if self._step is not None:
            for hook in self._hooks:
                if hook.hears_of_row:
                    with _noting("before_step_of_row", hook):
                        hook.before_step_of_row(number)

    def stage_is_done(self, stage: int) -> None:
        """The last backward pass of `stage` in this step has run; nothing to tell outside of training steps."""
        if self._step is not None and self._hooks:
            self._stages_under_way.discard(stage)
            used_later = self._used_by(self._stages_under_way)
            self._tell_ready(0, stage, [parameter for parameter in self._parameters(stage) if parameter not in used_later])

    def _tell_ready(self, first: int, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Tell the hooks from number `first` on, each without the parameters that one before it has still to complete."""
        for hook in self._hooks[first:]:
            with _noting("on_stage_gradients_ready", hook):
                hook.on_stage_gradients_ready(stage, parameters)
            parameters = _without(parameters, hook.completes_at_end)

    def end(self, step: TrainingStep, stages: Iterable[int]) -> None:
        """The passes of a training step are over."""
        for stage in sorted(self._stages_under_way):  # those that had no pass in this step
            self.stage_is_done(stage)
        self._step = None
        for number, hook in enumerate(self._hooks):
            with self._activity(f"in on_step_end of {type(hook).__name__}"):
                hook.on_step_end(step)
                self._tell_completed(number, hook, stages)

    def _tell_completed(self, number: int, hook: StepHook, stages: Iterable[int]) -> None:
        """Tell the hooks after this one of the gradients that it has just completed, each parameter once."""
        left = set(hook.completes_at_end)
        for stage in stages if left else ():
            completed = [parameter for parameter in self._parameters(stage) if parameter in left]
            left.difference_update(completed)
            if completed:
                self._tell_ready(number + 1, stage, completed)

    def abandon_step(self) -> None:
        """A step has failed: nothing more is told of it."""
        self._step = None

    def before_optimizer(self) -> None:
        """Gradients are about to be used, for the first time since the last step or not."""
        if not self._gradients_are_used:
            self._gradients_are_used = True
            for hook in self._hooks:
                with self._activity(f"in before_optimizer of {type(hook).__name__}"):
                    hook.before_optimizer()

    def settle(self) -> None:
        """Make everything final that hooks have left pending."""
        for hook in self._hooks:
            with self._activity(f"in settle of {type(hook).__name__}"):
                hook.settle()

    def before_close(self) -> None:
        """End what is under way together with the other ranks."""
        for hook in self._hooks:
            with self._activity(f"in before_close of {type(hook).__name__}"):
                hook.before_close()

    def close(self) -> None:
        """Let go of everything under way, in every hook, whatever one of them raises; then it is raised."""
        self._step = None
        with ExitStack() as rest:
            for hook in reversed(self._hooks):
                rest.callback(hook.on_close)


def _without(parameters: Sequence[nn.Parameter], left_out: AbstractSet[nn.Parameter]) -> Sequence[nn.Parameter]:
    return [parameter for parameter in parameters if parameter not in left_out] if left_out else parameters


@contextmanager
def _noting(method: str, hook: StepHook) -> Iterator[None]:
    """Note on an error raised inside in which method of a hook that was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {method} of {type(hook).__name__}")
        raise
