"""Runs the steps of a pipeline on one rank: splits the batch, opens the step, plays the passes, and closes the losses.

Order of a step. All that a rank can refuse by itself is checked before it sends anything: then every rank can still raise the same error
and the pipeline stays open (`refusals`). The handshake comes next, and from then on ranks depend on each other: any error ends the
pipeline. Receives for losses are posted before the passes. Hooks run when the step begins and after its losses are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerobubble.arguments import optional, require, wrong
from zerobubble.costs import Costs
from zerobubble.errors import InputError, PipelineError, raise_faults
from zerobubble.ir import Schedule
from zerobubble.lowering import RankGathers
from zerobubble.microbatch_order import with_numbers
from zerobubble.program import Program
from zerobubble.runtime.executor.batch import Batch
from zerobubble.runtime.executor.executor import Executor
from zerobubble.runtime.executor.program_cache import MICROBATCHES, ProgramCache, ReadyProgram, compiled_for
from zerobubble.runtime.failure.context import AgreedError
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.mailbox.handshake import MicrobatchCosts, StepMessages, Stepped
from zerobubble.runtime.mailbox.whole_messages import traffic_of
from zerobubble.runtime.measure import trace
from zerobubble.runtime.measure.profile import preserve_state
from zerobubble.runtime.stage.cut_model import CutModel
from zerobubble.runtime.stage.hook_reads import hook_fault
from zerobubble.runtime.stage.loss_draws import LossDraws
from zerobubble.runtime.stage.loss_reads import LossReads
from zerobubble.runtime.stage.loss_writes import LossWrites
from zerobubble.runtime.stage.rank_stages import Stages
from zerobubble.runtime.stage.sharded import ShardedTensors
from zerobubble.runtime.step.batch import StepInputs, as_target
from zerobubble.runtime.step.batch_digests import BatchDigests
from zerobubble.runtime.step.captured_step import WITHOUT_STEP, CapturedStep
from zerobubble.runtime.step.divided_loss import DividedLoss
from zerobubble.runtime.step.hook import StepHook, StepHooks, TrainingStep
from zerobubble.runtime.step.input_gradients import InputGradients, parameters_behind
from zerobubble.runtime.step.loss import StepLosses
from zerobubble.runtime.step.loss_faults import why_nothing_trains
from zerobubble.runtime.step.loss_report import SetState
from zerobubble.runtime.step.memory_forecast import MemoryForecasts, forecast_memory
from zerobubble.runtime.step.named_arguments import known_names
from zerobubble.runtime.step.optimizers import GradientScaling, SteppingOptimizers
from zerobubble.runtime.step.ordering import MicrobatchOrdering
from zerobubble.runtime.step.outputs import OutputFunction, Outputs, on_all_ranks
from zerobubble.runtime.step.rank_inputs import RankInputs
from zerobubble.runtime.step.refusals import CallRefusals
from zerobubble.runtime.step.sequence import join_sequences
from zerobubble.runtime.step.stage_rng import TRAINS, StageRng
from zerobubble.runtime.step.state_changes import hook_states, load_hook_states
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.terms import each_has
from zerobubble.runtime.values.gradients import EarlierSums, Gradients
from zerobubble.runtime.values.payload import tensors_in
from zerobubble.timeline import Timeline


class StepRunner:
    """Runs steps of one pipeline, and represents it to hooks (`AttachedPipeline`).

    Attributes:
        recording: Whether messages are timed.
        measures_memory: Whether every training step records the bytes held for backward.
        last: The executor of the last step, for `timeline`.
        schedule: The schedule of steps with the default number of microbatches.
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
        self._stages = stages
        self._losses = losses
        self._ordering = ordering
        self._parted = divided_loss
        self._captured = captured
        self._watching_copies = watching_copies
        self._played: tuple[Schedule, Sequence[int]] | None = None
        self._input_gradients = InputGradients()
        self._digests = BatchDigests(stages.device)
        self._num_steps = 0
        self._num_evaluations = 0
        self._nothing = nn.Parameter(torch.empty(0, dtype=torch.float32, device=stages.device))
        self._refusals = CallRefusals(peers, guard, programs, losses, self.gather)
        self.scaling = GradientScaling(gradients, stages.device)
        self.cut_model = CutModel(self.modules, peers.members[peers.rank], losses.loss_fn)
        last = self.schedule.num_stages - 1
        losses.comparison.is_on &= captured is None  # a replayed step calls no loss_fn
        on_several_ranks = len(self.schedule.placement.routes) > 1
        draws = LossDraws(losses.loss_fn, self.modules.get(last), on_several_ranks=on_several_ranks)
        writes = LossWrites(self.cut_model, self.modules.get(last), on_several_ranks=on_several_ranks)
        losses.reads = LossReads(self.cut_model, self.modules.get(last), stages.hook_reads(last), draws, writes)
        self.optimizers = SteppingOptimizers(guard, self.scaling, self.before_optimizer)

    @property
    def losses(self) -> Tensor | None:
        """The loss of each microbatch of the last step; None before the first one and without targets."""
        return self._losses.losses

    @property
    def added_losses(self) -> dict[str, Tensor]:
        """The parts of the last step's loss that stages added, by name."""
        return dict(self._losses.added)

    @property
    def played(self) -> Schedule | None:
        """The schedule of the last training step, with its microbatches in the order that they took; None before the first one."""
        return None if self._played is None else with_numbers(self._played[0], self._played[1])

    @property
    def gathers(self) -> RankGathers:
        """The all-gathers of this rank in a step of the current schedule."""
        return self.programs.now.executor.gathers.plan

    def parameters(self) -> Iterator[nn.Parameter]:
        shards = [stage.shards for stage in self.programs.now.stages.values()]
        held = (
            module.parameters() if shard is None else shard.at_rest() for module, shard in zip(self.modules.values(), shards, strict=True)
        )
        found = tuple(dict.fromkeys(parameter for parameters in held for parameter in parameters))
        yield from found
        if not any(parameter.requires_grad for parameter in found):
            yield self._nothing

    @property
    def levels_to_measure(self) -> tuple[str, ...]:
        """The recomputation levels that a profile measures."""
        return self._stages.levels.measured

    def fault_in_levels(self) -> str:
        """Returns why stages of this rank cannot recompute, if a profile measures levels; empty if they can."""
        return self._stages.recompute_fault() if self.levels_to_measure else ""

    @property
    def failure(self) -> PipelineError | None:
        return self.guard.failure

    @property
    def hooks(self) -> Sequence[StepHook]:
        """The attached hooks, in order."""
        return self.step_hooks.attached

    def stop_comparing_losses(self) -> None:
        """Leaves it to a training framework to find out whether `loss_fn` is a mean over samples."""
        self._losses.comparison.is_on = False

    def attach(self, hook: StepHook) -> None:
        """Calls `hook` from the next training step on."""
        self.step_hooks.attach(hook, self)
        if self.step_hooks.need_rollback_points:
            self.programs.use_rollback_points()

    def choose(self, num_microbatches: int | None, given: StepInputs | None = None, *, trains: bool = True) -> ReadyProgram:
        """Returns the program for this number of microbatches, None for the default one, and makes it current.

        If there is none, or if it must train and cannot, or if a captured step cannot train with what is `given`, the call is refused on
        every rank.
        """
        with self._refusals.of_call():
            if given is not None and self._captured is not None:
                self._captured.refuse(self.schedule.num_microbatches if num_microbatches is None else num_microbatches, given)
            if trains:
                self._refuse_to_train()
            require("num_microbatches", num_microbatches, optional(MICROBATCHES))
            count = self.schedule.num_microbatches if num_microbatches is None else num_microbatches * self.schedule.slices
            if trains:
                self.programs.refuse_to_train(count)
            compiled = self.programs.choose(count)
            self._stages.follow_models()
        self.guard.stages = compiled.stages
        return compiled

    def _refuse_to_train(self) -> None:
        if self.schedule.is_forward_only:
            message = "schedule {schedule!r} has no backward passes"
            raise InputError(message, schedule=self.schedule.name, remedy="evaluate with eval_step, or choose one that trains")
        if not torch.is_grad_enabled():
            context = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
            raise InputError("there are no gradients inside torch.{context}()", context=context, remedy="use it around eval_step only")

    def train(self, given: StepInputs, num_microbatches: int | None) -> Tensor:
        """Runs one training step with its hooks and returns the mean loss."""
        began = perf_counter()
        compiled = self.choose(num_microbatches, given)
        assert compiled.train is not None
        self.cut_model.release_if_changed()
        executor = compiled.train
        earlier = EarlierSums(self.parameters(), self.gradients)
        with self.guard.during_step(executor):
            batch, passes = self._open(executor, given, None, self._ordering, captured=self._captured)
            if passes:
                compiled = self.programs.planned(passes)
                executor = compiled.training_with(self.recording)
            with self.guard.during_step(executor):  # errors name the passes of this executor from now on
                step = self._trained(compiled, executor, batch, given, began)
        assert step.loss is not None
        try:
            self._give_back()
        except AgreedError:
            earlier.drop(all_steps=earlier.are_lost)
            raise
        self._num_steps += 1
        self._num_evaluations = 0
        with self.guard.during("while handing back the gradients of inputs"):
            self._input_gradients.hand_back(step.divisor)
        self.step_hooks.end(step, compiled.stages)
        self._refuse_loss(earlier)
        if self.cut_model.is_whole:
            self.cut_model.watch([parameter for parameter in self.parameters() if self.gradients.get(parameter) is not None])
        if not self._losses.requires_grad:
            self._refuse_to_train_nothing(compiled)
        return step.loss

    def _give_back(self) -> None:
        """Gives the model what the code around its parts has set in a call, and `loss_fn` what it has set on ranks with a last stage."""
        doing = "sharing attributes that the model has set"

        def share(value: Any) -> Any:
            return next(shared for shared in self.gather(value, doing) if shared is not None)

        self.cut_model.refuse_attributes()
        with self.agreed_errors():
            self._stages.give_back(share if SetState.MODEL in self._losses.set_state else None)
        if SetState.LOSS in self._losses.set_state:
            changes = self._losses.state.changed()
            from_all = self.gather(changes, "sharing attributes that loss_fn has set")
            with self.agreed_errors():
                self._losses.state.put(from_all, changes)

    def _trained(self, compiled: ReadyProgram, executor: Executor, batch: Batch, given: StepInputs, began: float) -> TrainingStep:
        """Plays a training step, and returns what hooks see of it."""
        self.last = executor
        self.scaling.begin(given.scaler)
        self._played = compiled.schedule, batch.order
        step = TrainingStep(
            self._num_steps,
            compiled.schedule,
            batch.known.memo,
            self.measures_memory,
            divisor=self._losses.divisor,
            began=began,
            wait_for_device=executor.records.clock.settle,
            records=executor.records.read,
            later_records=executor.records.read_later,
        )
        self.step_hooks.begin(step, compiled.stages)
        self._losses.begin_comparison(is_cut_by_user=isinstance(given.inputs, list) or isinstance(given.targets, list))
        with step.contexts:
            forwards_stand = self.step_hooks.forwards_stand if step.rollback_checks else None
            if self._captured is not None and self._captured.is_ready:
                self._captured.replay()
            else:
                self._play(compiled, executor, batch, given, forwards_stand, measures_memory=step.measures_memory, captured=self._captured)
        self._losses.comparison.finish()
        step.loss = self._losses.close()
        step.added_losses = self._losses.added
        return step

    def _refuse_to_train_nothing(self, compiled: ReadyProgram) -> NoReturn:
        """Raises why no loss requires a gradient: the same `InputError` on every rank, and the pipeline stays open."""
        flows = {index: tuple(stage.flow) for index, stage in compiled.stages.items()}
        from_all = self.gather((flows, self._losses.output_requires_grad), "finding out why nothing trains")
        with self.agreed_errors():
            raise InputError(why_nothing_trains([found for found, _ in from_all], any(requires_grad for _, requires_grad in from_all)))

    def _refuse_loss(self, earlier: EarlierSums | None = None) -> None:
        """Raises the faults of `loss_fn` in the last step: the same `InputError` on every rank. The pipeline stays open.

        Microbatches before the fault may have added to gradients. These are dropped, with the `earlier` ones on all ranks if any is lost.
        """
        if not (self._losses.is_refused or SetState.HOOKS in self._losses.set_state):
            return
        reads = self._losses.reads
        lacks = hook_fault(module) if (module := reads.hooks.stored()) else ""
        are_lost = earlier is not None and earlier.are_lost
        from_all = self.gather((str(reads.fault or ""), str(lacks), are_lost), "refusing a loss")
        found, lacking, lost = (list(dict.fromkeys(filter(None, column))) for column in zip(*from_all, strict=True))
        if not (found or lacking or self._losses.is_refused):
            return
        faults = found or lacking or ["loss_fn has a fault on another replica"]
        if lost:
            faults.append("microbatches before it have added to the gradients of earlier steps, so all gradients are dropped")
        if earlier is not None:
            earlier.drop(all_steps=bool(lost))
        with self.agreed_errors():
            raise_faults(faults)

    def order_ahead(self, inputs: list[Any], *, asked: bool) -> None:
        """See `Pipeline.order_ahead`; `asked` says whether the pipeline orders microbatches."""
        if not asked:
            raise InputError(
                "order_ahead is for pipelines that order microbatches", remedy="give order_by to Pipeline, or leave order_ahead out"
            )
        if not isinstance(inputs, list):
            raise wrong("inputs", inputs, "the list of microbatches of the next step", call="order_ahead")
        if self._ordering is not None:
            self._ordering.begin(self.schedule, inputs, self.programs.compile_ahead)

    def _play(
        self,
        compiled: ReadyProgram,
        executor: Executor,
        batch: Batch,
        given: StepInputs,
        forwards_stand: Callable[[], bool] | None = None,
        *,
        measures_memory: bool,
        captured: CapturedStep | None = None,
    ) -> None:
        """Plays the passes of a training step, or captures them."""
        meter = self._stages.meter(given.inputs, given.targets, given.kwargs) if measures_memory else None
        executor.records.meter = meter
        with self.rng.isolated(), self._stages.training(compiled.stages, meter):
            if captured is None:
                executor.run(batch, forwards_stand)
            else:
                captured.play(batch, executor.run, self._losses.captured)

    def train_without_hooks(self, compiled: ReadyProgram, given: StepInputs, *, measures_memory: bool = False) -> Tensor:
        """Runs a training step without hooks and returns the mean loss."""
        executor = compiled.train
        assert executor is not None
        with self.guard.during_step(executor):
            batch, _ = self._open(executor, given, None)
            self._play(compiled, executor, batch, given, measures_memory=measures_memory)
            loss = self._losses.close()
        assert loss is not None
        self._refuse_loss()
        return loss

    def evaluate(
        self, given: StepInputs, num_microbatches: int | None, output_fn: OutputFunction | None = None, *, has_loss: bool = True
    ) -> tuple[Tensor | None, list[Any] | None, Sequence[int]]:
        """Runs the forwards of a step in evaluation mode. Without a loss, targets are for `output_fn` alone.

        Returns the mean loss, None without targets, what is kept of the outputs of microbatches, None on a rank without a last stage, and
        the numbers of their samples, empty if this rank does not know them.
        """
        executor = self.choose(num_microbatches, trains=False).infer
        self.cut_model.release_if_changed()
        if self.schedule.is_forward_only:
            self.last = executor
        divided = self._parted if has_loss else None
        outputs = Outputs(executor.program.num_microbatches, output_fn, keeps_all=divided is not None)
        with self._stages.evaluating(), self.guard.during_step(executor):
            batch, _ = self._open(executor, given, outputs, evaluation=self._num_evaluations, has_loss=has_loss)
            with self.rng.isolated(), self._watching_copies():
                executor.run(batch)
            if divided is not None:
                divided.evaluate(self.peers, self.schedule, outputs.kept)
            if self.rank in executor.ends[1]:
                outputs.finish()
            loss = self._losses.close()
        self._give_back()
        self._num_evaluations += 1
        self._refuse_loss()
        if self.rank not in executor.ends[1]:
            return loss, None, ()
        slices = executor.program.slices
        return loss, join_sequences(outputs.kept, slices) if slices > 1 else outputs.kept, batch.sizes

    def on_all_ranks(self, outputs: Any) -> Any:
        """Returns the `outputs` of the rank of the last stage on every rank, which all call it."""
        with self.guard.during("while copying outputs to all ranks"), self.agreed_errors():
            return on_all_ranks(self.peers, outputs, self.schedule.placement.routes[0][-1])

    def _open(
        self,
        executor: Executor,
        given: StepInputs,
        outputs: Outputs | None,
        ordering: MicrobatchOrdering | None = None,
        evaluation: int = TRAINS,
        captured: CapturedStep | None = None,
        *,
        has_loss: bool = True,
    ) -> tuple[Batch, tuple[int, ...]]:
        """Splits what was given and opens the step with the other ranks.

        Returns the inputs of the executor, and the passes if the step plays others than the schedule's. The inputs of a `captured` step are
        where its graph reads them.
        """
        executor.recording = self.recording
        self._input_gradients.begin(len(executor.program.placement.routes))
        mine = RankInputs(given, executor, self.rank, self.modules, self._input_gradients, captured)
        self._refusals.of_unknown_dims(given.batch_dims, partial(known_names, given, self.modules))
        with self._refusals.of_batch(executor, outputs):
            self._refuse_changes()
            given.refuse_missing(self.peers.members[self.rank], is_first=mine.is_first, needs_targets=mine.is_last and outputs is None)
            mine.cut()
            costs = None if ordering is None else ordering.costs_of(self.programs.now.schedule, mine.batch.microbatches)
            if mine.is_first:
                self._stages.refuse_calls(mine.arguments, mine.named)
        with self._refusals.of_others(executor, outputs):
            opened = self._shake_hands(executor, given, mine, costs, trains=outputs is None)
        mine.know_size(opened.batch_size, self.peers.members[executor.ends[0][0]])
        # Before any pass: it posts the receives of losses, so that those sent with the last forward need not be waited for later.
        if outputs is None and self._num_steps == 0:
            self.optimizers.elsewhere = self._trained_elsewhere(given, mine)
        if outputs is not None:
            outputs.targets = [as_target(target) for target in mine.targets.microbatches]
        targets = mine.targets.microbatches if has_loss else None
        self._losses.open(executor.ends[1], targets or None, mine.targets.sizes, outputs)
        return self._batch(executor, given, mine, opened, evaluation), opened.passes

    def _trained_elsewhere(self, given: StepInputs, mine: RankInputs) -> dict[Tensor, str]:
        """Returns the parameters outside of this rank's stages behind inputs and targets that another rank uses, with what they make."""
        unused = {"inputs": None if mine.is_first else given.inputs, "targets": None if mine.is_last else given.targets}
        own = set(self.parameters())
        return {parameter: name for name, value in unused.items() for parameter in parameters_behind(tensors_in(value)) - own}

    def _refuse_changes(self) -> None:
        """Raises `InputError` for changes of this rank's stages that a step would miss."""
        self._stages.refuse_replaced()
        self._stages.refuse_hooks()

    def _shake_hands(
        self, executor: Executor, given: StepInputs, mine: RankInputs, costs: MicrobatchCosts | None, *, trains: bool
    ) -> StepMessages:
        """Opens the step with the other ranks, and returns what they agree on."""
        form = (*executor.trained, self._stages.num_changes)
        stepped = self._stepped() if trains else Stepped.UNKNOWN
        firsts, lasts = executor.ends
        pairs_ranks = {self.rank} < {*firsts, *lasts} and given.inputs is not None and given.targets is not None
        batch, is_first_step = (given.inputs, given.targets), trains and self._num_steps == 0
        data = self._digests.of(self.guard.num_calls, batch, waits=is_first_step) if pairs_ranks else 0
        opened = executor.handshake.open(self.guard.num_calls, mine.arguments, mine.batch.batch_size, form, costs, stepped, data)
        self._digests.compare(opened.data, data, (self.peers.members[firsts[0]], self.peers.members[self.rank]))
        if trains:  # in a call that is refused, other ranks did not ask
            self.optimizers.has_stepped = False
        return opened

    def _batch(self, executor: Executor, given: StepInputs, mine: RankInputs, opened: StepMessages, evaluation: int) -> Batch:
        """Returns the inputs of the executor for a step that is open on all ranks."""
        seed = partial(self.scaling.seed, given.scaler)
        if self._parted is not None:
            self._parted.begin(seed)
        return Batch(
            mine.arguments,
            self._losses.finish if self._parted is None else self._losses.store_output,
            partial(self._losses.gradient_of, seed),
            opened.known,
            opened.announced,
            mine.named,
            opened.order,
            self.rng.seed_pass_of(self._num_steps, executor.program.num_microbatches, evaluation),
            self._parted,
            mine.sizes(opened.batch_size),
            self._losses.comparison.arrive,
        )

    def _stepped(self) -> Stepped:
        """Returns whether an optimizer of this rank has stepped since the last training step, if any ever has."""
        if self.optimizers.validated or not self.optimizers.seen:
            return Stepped.UNKNOWN
        return Stepped.YES if self.optimizers.has_stepped else Stepped.NO

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """A context for steps that leave nothing behind, down to the last bit, and do not call `on_loss`.

        Raises `InputError` on every rank, after the steps, if a rank cannot put back what they have changed.
        """
        with preserve_state(self.modules.values(), self._stages.loss_fn, self.device, self.gradients) as faults, self._losses.muted():
            yield
        with self.agreed_errors():
            raise_faults(chain.from_iterable(self.gather(faults, "restoring the state of stages")))

    def activity(self, when: str) -> AbstractContextManager[None]:
        return self.guard.during(when)

    def agreed_errors(self) -> AbstractContextManager[None]:
        return self.guard.agreed_errors()

    def refusing(self) -> AbstractContextManager[None]:
        """A context for checks of a call: an exception inside refuses the call on every rank."""
        return self._refusals.of_call()

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
        if self._captured is not None:
            with self.agreed_errors():
                raise InputError("the passes of a captured step have no times", remedy=WITHOUT_STEP)
        if not self.last.records.spans:
            with self.agreed_errors():
                raise InputError("there is no timeline before the first step", remedy="call step, or eval_step if none trains")
        return self.timeline_of(self.last)

    def timeline_of(self, executor: Executor) -> Timeline:
        """Returns what every rank did in the last step of `executor`; all ranks must call it."""
        with self.peers.collective("gathering a timeline"):
            return trace.gather(executor.program.name, executor.records.read(), self.peers)

    def record_optimizer(self) -> AbstractContextManager[None]:
        return self.last.records.noting_optimizer()

    def record_reduction(self, stage: int, began: int, ended: int) -> None:
        self.last.records.note_reduction(stage, began, ended)

    def change_schedule(self, schedule: Schedule, costs: Costs) -> None:
        self.programs.play(compiled_for(schedule, costs))
        self.schedule = schedule

    def memory_forecast_of(self, schedule: Schedule, costs: Costs) -> MemoryForecasts:
        return self._memory_forecast(schedule, self.programs.program_for(schedule, costs), costs)

    def memory_forecast(self, costs: Costs) -> MemoryForecasts:
        """Returns what each rank holds in the current steps; all ranks must call it."""
        now = self.programs.now
        return self._memory_forecast(now.schedule, now.executor.program, costs)

    def _memory_forecast(self, schedule: Schedule, program: Program, costs: Costs) -> MemoryForecasts:
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
            self.step_hooks.settle()

    def before_close(self) -> None:
        """Makes everything final before the connections close; all ranks call it."""
        self.step_hooks.settle()
        self.step_hooks.before_close()

    def num_steps(self) -> int:
        """Returns the number of training steps, once what they left pending is final."""
        self.settle()
        return self._num_steps

    def take_over(self, num_steps: int, draws_seed: int | None) -> None:
        """Continues at this step, with this seed for the random numbers of stages; None keeps the current one."""
        self._num_steps = num_steps
        self._num_evaluations = 0
        if draws_seed is not None:
            self.rng.seed = draws_seed

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of training steps, and the states of hooks."""
        self.settle()
        return {"num_steps": self._num_steps, "draws_seed": self.rng.seed, "hooks": hook_states(self.step_hooks.attached)}

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
            rest.callback(self._losses.clear)
            rest.callback(self.step_hooks.close)
            if self._ordering is not None:
                rest.callback(self._ordering.wait)
            self.programs.close()
