"""What the steps of a pipeline on one rank use, and what they leave for later steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from zerobubble.costs import Costs
from zerobubble.errors import InputError, PipelineError
from zerobubble.ir import Schedule
from zerobubble.program import Program
from zerobubble.runtime.executor.program_cache import ProgramCache, compiled_for
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.mailbox.whole_messages import traffic_of
from zerobubble.runtime.measure import trace
from zerobubble.runtime.stage.cut_model import CutModel
from zerobubble.runtime.stage.loss_draws import LossDraws
from zerobubble.runtime.stage.loss_reads import LossReads
from zerobubble.runtime.stage.loss_writes import LossWrites
from zerobubble.runtime.stage.rank_stages import Stages
from zerobubble.runtime.stage.sharded import ShardedTensors
from zerobubble.runtime.step.batch_digests import BatchDigests
from zerobubble.runtime.step.captured_step import WITHOUT_STEP, CapturedStep
from zerobubble.runtime.step.divided_loss import DividedLoss
from zerobubble.runtime.step.hook import StepHook, StepHooks
from zerobubble.runtime.step.input_gradients import InputGradients
from zerobubble.runtime.step.loss import StepLosses
from zerobubble.runtime.step.memory_forecast import MemoryForecasts, forecast_memory
from zerobubble.runtime.step.optimizers import GradientScaling, SteppingOptimizers
from zerobubble.runtime.step.ordering import MicrobatchOrdering
from zerobubble.runtime.step.refusals import CallRefusals
from zerobubble.runtime.step.stage_rng import StageRng
from zerobubble.runtime.step.state_changes import hook_states, load_hook_states
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.terms import each_has
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.timeline import Timeline


class StepRunner:
    """What steps of one pipeline use on this rank: what is connected, and what survives between steps.

    Hooks see it as an `AttachedPipeline`. Functions run the steps: `opening`, `playing` and `profiling`.

    Attributes:
        recording: Whether messages are timed.
        measures_memory: Whether every training step records the bytes held for backward.
        last: The executor of the last step, for `timeline`.
        schedule: The schedule of steps with the default number of microbatches.
        played: The schedule of the last training step and the order of its microbatches; None before the first one.
        num_steps: The number of training steps. Call `settle` first, so that what they left pending is final.
        num_evaluations: The number of evaluations since the last of them.
    """

    def __init__(
        self,
        peers: Peers,
        guard: FailureGuard,
        stages: Stages,
        gradients: Gradients,
        losses: StepLosses,
        *,
        step_hooks: StepHooks,
        programs: ProgramCache,
        counted_elsewhere: AbstractSet[nn.Parameter],
        sharded: ShardedTensors,
        rng: StageRng,
        ordering: MicrobatchOrdering | None,
        divided_loss: DividedLoss | None,
        captured: CapturedStep | None,
        watching_copies: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.rank = peers.rank
        self.num_ranks = peers.size
        self.peers = peers
        self.guard = guard
        self.device = stages.device
        self.modules: Mapping[int, nn.Module] = stages.modules
        self.gradients = gradients
        self.counted_elsewhere = counted_elsewhere
        self.sharded = sharded
        self.rng = rng
        self.recording = True
        self.measures_memory = False
        self.ranks_meet = False
        self.step_hooks = step_hooks
        self.programs = programs
        self.schedule = programs.now.schedule
        self.last = programs.now.executor
        self.stages = stages
        self.losses = losses
        self.ordering = ordering
        self.divided_loss = divided_loss
        self.captured = captured
        self.watching_copies = watching_copies
        self.played: tuple[Schedule, Sequence[int]] | None = None
        self.input_gradients = InputGradients()
        self.digests = BatchDigests(stages.device)
        self.num_steps = 0
        self.num_evaluations = 0
        self._nothing = nn.Parameter(torch.empty(0, dtype=torch.float32, device=stages.device))
        self.refusals = CallRefusals(peers, guard, programs, losses, self.gather)
        self.scaling = GradientScaling(gradients, stages.device)
        self.cut_model = CutModel(self.modules, peers.members[peers.rank], losses.loss_fn)
        last = self.schedule.num_stages - 1
        losses.comparison.is_on &= captured is None  # a replayed step calls no loss_fn
        on_several_ranks = len(self.schedule.placement.routes) > 1
        draws = LossDraws(losses.loss_fn, self.modules.get(last), on_several_ranks=on_several_ranks)
        writes = LossWrites(self.cut_model, self.modules.get(last), on_several_ranks=on_several_ranks)
        losses.reads = LossReads(self.cut_model, self.modules.get(last), stages.hook_reads(last), draws, writes)
        self.optimizers = SteppingOptimizers(guard, self.scaling, self.before_optimizer)

    def parameters(self) -> Iterator[nn.Parameter]:
        shards = [stage.shards for stage in self.programs.now.stages.values()]
        held = (
            module.parameters() if shard is None else shard.at_rest() for module, shard in zip(self.modules.values(), shards, strict=True)
        )
        parameters = tuple(dict.fromkeys(parameter for parameters in held for parameter in parameters))
        yield from parameters
        if not any(parameter.requires_grad for parameter in parameters):
            yield self._nothing

    @property
    def failure(self) -> PipelineError | None:
        return self.guard.failure

    @property
    def hooks(self) -> Sequence[StepHook]:
        """The attached hooks, in order."""
        return self.step_hooks.attached

    def attach(self, hook: StepHook) -> None:
        """Calls `hook` from the next training step on."""
        self.step_hooks.attach(hook, self)
        if self.step_hooks.need_rollback_points:
            self.programs.use_rollback_points()

    def activity(self, when: str) -> AbstractContextManager[None]:
        return self.guard.during(when)

    def agreed_errors(self) -> AbstractContextManager[None]:
        return self.guard.agreed_errors()

    def gather(self, value: Any, doing: str) -> list[Any]:
        call = f"{doing} in call {self.guard.num_calls}"
        with self.guard.during(f"while {doing}"):
            with self.peers.collective(doing):
                from_all = self.peers.gather_objects((call, value))
            if len({theirs for theirs, _ in from_all}) > 1:
                calls = [theirs for theirs, _ in from_all]
                said = each_has(self.peers.members, calls, "is", "are")
                message = "the ranks make different calls: {calls}; {remedy}"
                raise InputError(message, calls=said, remedy="make the same calls in the same order on every rank")
        return [theirs for _, theirs in from_all]

    def timeline(self) -> Timeline:
        """Returns what every rank did in the last step; all ranks must call it."""
        if self.captured is not None:
            with self.agreed_errors():
                raise InputError("the passes of a captured step have no times", remedy=WITHOUT_STEP)
        if not self.last.records.spans:
            with self.agreed_errors():
                raise InputError("there is no timeline before the first step", remedy="call step, or eval_step if none trains")
        return trace.gather(self.last.program.name, self.last.records.read(), self.peers)

    def record_optimizer(self) -> AbstractContextManager[None]:
        return self.last.records.noting_optimizer()

    def record_reduction(self, stage: int, began: int, ended: int) -> None:
        self.last.records.note_reduction(stage, began, ended)

    def change_schedule(self, schedule: Schedule, costs: Costs) -> None:
        self.programs.play(compiled_for(schedule, costs))
        self.schedule = schedule

    def memory_forecast_of(self, schedule: Schedule, costs: Costs) -> MemoryForecasts:
        return self.forecast_memory(schedule, self.programs.program_for(schedule, costs), costs)

    def forecast_memory(self, schedule: Schedule, program: Program, costs: Costs) -> MemoryForecasts:
        """Returns what each rank holds in steps of `program`; all ranks must call it."""
        messages = self.peers.bytes_for(traffic_of(program, self.rank))
        from_all = self.gather(messages, "forecasting its memory")
        numbers = self.peers.survivors or range(self.peers.size)
        return forecast_memory(schedule, costs, from_all, self.programs.offloads_of(schedule), numbers)

    def before_optimizer(self, *, ranks_meet: bool = False) -> None:
        """Notifies every hook that gradients are about to be used, with all ranks meeting for it or on each rank by itself."""
        self.ranks_meet |= ranks_meet
        self.step_hooks.before_optimizer()

    def settle(self) -> None:
        """Makes every hook finish what is pending, before anything except a training step looks at weights or gradients.

        In a closed pipeline nothing is pending.
        """
        if self.guard.closed is None:
            self.step_hooks.call_all("settle")

    def take_over(self, num_steps: int, draws_seed: int | None) -> None:
        """Continues at this step, with this seed for the random numbers of stages; None keeps the current one."""
        self.num_steps = num_steps
        self.num_evaluations = 0
        if draws_seed is not None:
            self.rng.seed = draws_seed

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of training steps, and the states of hooks."""
        self.settle()
        return {"num_steps": self.num_steps, "draws_seed": self.rng.seed, "hooks": hook_states(self.step_hooks.attached)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.settle()
        load_hook_states(self.step_hooks.attached, state["hooks"])
        self.take_over(state["num_steps"], state.get("draws_seed"))

    def close(self) -> None:
        """Frees everything held for steps, and drops messages, which keep connections open.

        It does all of this even if a hook raises, and then raises that error.
        """
        with ExitStack() as rest:
            rest.callback(self.cut_model.close)
            rest.callback(self.losses.clear)
            rest.callback(self.step_hooks.close)
            if self.ordering is not None:
                rest.callback(self.ordering.wait)
            self.programs.close()
