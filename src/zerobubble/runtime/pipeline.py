"""`Pipeline`: the front of the runtime. Stages, a schedule and a loss in; steps with the gradients of one device out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobubble.costs import Costs
from zerobubble.errors import InputError, ZeroBubbleError
from zerobubble.ir import Placement, Schedule
from zerobubble.planning import Solved
from zerobubble.runtime.executor.executor import Batch, Executor, Overlap
from zerobubble.runtime.executor.pace import Pace
from zerobubble.runtime.executor.program_cache import CompiledProgram, MakeSchedule, ProgramCache, compose, every_channel, proved
from zerobubble.runtime.hooks import clip, gradient_scaling
from zerobubble.runtime.hooks.auto import Auto
from zerobubble.runtime.hooks.shared_gradients import Copies
from zerobubble.runtime.hooks.shared_parameters import Place, Tied, read_tied
from zerobubble.runtime.hooks.telemetry import FlopBook, OnStep, StepReport, busy_seconds
from zerobubble.runtime.measure import profile, trace
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.session import Session, seal
from zerobubble.runtime.split.report import SplitReports
from zerobubble.runtime.stage.rank_stages import Build, Stages, modules_of
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.step.batch import UNCUT, Cut, arguments, join_outputs, refuse_other_size, split_batch
from zerobubble.runtime.step.handshake import StepHandshake
from zerobubble.runtime.step.input_gradients import InputGradients
from zerobubble.runtime.step.loss import LossBook, LossFunction, LossWeight, OnLoss
from zerobubble.runtime.step.named_arguments import spread_kwargs
from zerobubble.runtime.transport.choice import AUTO, refuse_unknown
from zerobubble.runtime.transport.endpoint import Endpoint
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import Cotangents
from zerobubble.timeline import Timeline

if TYPE_CHECKING:
    from zerobubble.runtime.hooks.post_validation import PostValidation


class _Given(NamedTuple):
    """What the user gave for one step."""

    inputs: Any
    targets: Any
    kwargs: Any
    scaler: torch.amp.GradScaler | None = None


class Pipeline:
    """Trains a model cut into stages over the ranks of a process group.

    Every rank of `group` (default: all) makes one, after `torch.distributed.init_process_group`, with the same arguments but its own
    modules. `build_or_modules` is a function `build(stage_index, num_stages) -> nn.Module`, or this rank's modules by ascending
    stage. `schedule` is a published name, a function `(num_ranks, num_microbatches) -> Schedule`, a `Schedule`, which has one number
    of microbatches, or "auto"; one without backward passes, such as "forward-only", serves `eval_step`.
    `loss_fn(output, target)` gives the mean loss of one microbatch. Microbatches count by their samples, or by
    `loss_weight(target)`: the number of tokens that count, say. `on_loss(microbatch, loss)` hears of each loss where it is computed,
    without waiting for other ranks.

    `timeout` bounds in seconds how long a rank waits for a message. `pace` stretches every training pass to the given times, which
    shows a schedule's effect where ranks share cores. With `metering`, steps count the bytes held for backward (`timeline` tells).
    `recording`, on by default, times messages, too.

    `on_step` is called with a `StepReport` after each `step`; with `peak_flops`, what this rank computes at most in a second, it has the
    MFU, for which the operations of the first step of each input shape are counted.

    `overlap(first, second)` runs the two passes of an overlapped step (DualPipe), each an `Overlapped`; without it they run one after
    the other. A bidirectional schedule has a copy of a stage on each route: copies start with the parameters of the first route's, and
    `step` leaves the sum of their gradients in each.

    With "auto", the first steps train with microbatches one by one and are measured; then the shortest schedule over `placement` (as
    `zerobubble plan` names them) with no more than `memory_limit` bytes of activations (of each rank, or all alike) is planned beside the
    training and changed to between two steps, and planned anew when passes come to take another time. `plan` tells which.

    `tied` makes parameters of several stages one: groups such as `[(0, "tok.weight"), (3, "head.weight")]` of stages and names of
    parameters or whole modules in them, "" for a whole stage. They start with the values of the first of their group, `step` leaves the
    sum of all their gradients in each, and a norm counts them once.

    With `main_grad`, such as torch.float32 for a model in bfloat16, gradients are summed in `parameter.main_grad` of that type, and `.grad`
    stays None; set it to None to begin anew.

    `split` says how backward passes come apart, for all stages or for some of this rank's by index (others are "deferred"): "deferred"
    (eager, layers leave their weight gradients to W), "graph" (the traced graph of the stage is cut), "compiled" (its parts are compiled,
    too) or "whole" (B does all, W nothing). With `cuda_graphs`, the passes of stages split by their graph are captured once and replayed.

    `transport` names what carries tensors between ranks: "gloo", "nccl" or "shared-memory"; "auto" is the fastest there is. An `Endpoint`
    of `zerobubble.runtime.transport`, this rank's end of a transport of your own, carries everything, and needs no process group.

    Raises `InputError` on every rank when an argument is wrong on one, or when they disagree.
    """

    def __init__(
        self,
        build_or_modules: Build | nn.Module | Sequence[nn.Module],
        schedule: str | Schedule | MakeSchedule,
        num_microbatches: int,
        loss_fn: LossFunction,
        *,
        loss_weight: LossWeight | None = None,
        on_loss: OnLoss | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: float = 120.0,
        pace: Costs | None = None,
        overlap: Overlap | None = None,
        on_step: OnStep | None = None,
        peak_flops: float | None = None,
        memory_limit: int | Sequence[int] | None = None,
        placement: str | Placement = "linear",
        tied: Tied = (),
        main_grad: torch.dtype | None = None,
        split: str | Mapping[int, str] = "deferred",
        cuda_graphs: bool = False,
        transport: str | Endpoint = AUTO,
    ) -> None:
        self.on_step = on_step
        self.metering = False
        self.recording = True
        self._steps = 0
        self._auto: Auto | None = None
        self._validation: PostValidation | None = None
        self._handshakes: dict[Executor, StepHandshake] = {}
        self._session = Session(group, timeout, self._part, transport)
        self._transport = self._session.transport
        self.rank, ranks = self._transport.rank, self._transport.size
        self._copies = Copies.none(self._transport)
        self._losses = LossBook(self._transport, loss_fn, loss_weight, on_loss)
        self._input_gradients = InputGradients()
        self._session.meet()
        self._session.inside = "while building its stages"
        terms = {"timeout": f"{timeout:g} s", "pace": seal(pace), "overlap function": "one" if overlap else "none"}
        terms["type of main_grad"] = str(main_grad)
        terms["transport"] = transport if isinstance(transport, str) else type(transport).__name__
        fault = ""
        try:
            if isinstance(transport, str):
                refuse_unknown(transport)
            if schedule == "auto":
                self._auto = Auto.from_options(placement, ranks, num_microbatches, memory_limit)
                schedule = self._auto.schedule
            self.schedule = compose(schedule, ranks, num_microbatches)
            if memory_limit is not None and self._auto is None:
                raise InputError(f"memory_limit is for schedule='auto', which plans with it; {self.schedule.name!r} takes what it takes")
            self.modules = modules_of(build_or_modules, self.schedule, self.rank)
            self._gradients = Gradients(main_grad)
            self._stages = Stages(self.modules, split, self._gradients, cuda_graphs=cuda_graphs)
            self.device = self._stages.device
            if pace is not None and self.device.type != "cpu":
                raise InputError(f"pace is for rehearsals on CPUs; passes on {self.device} take the time they take")
            self._flops = FlopBook(peak_flops) if peak_flops is not None else None
            self._stages.of(self.schedule)
            proved(self.schedule)
            ties = read_tied(tied, self.schedule.num_stages)
            order = seal(self.schedule.to_text())
            terms |= {"schedule": f"{self.schedule.name} of {num_microbatches} microbatches #{order}", "kind of device": self.device.type}
        except ZeroBubbleError as error:
            fault = str(error)
        except Exception as error:  # noqa: BLE001 - the user's build function may raise anything, and every rank has to hear of it
            fault = f"{type(error).__name__}: {error}"
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt and SystemExit stop the others, too
            self._session.fail(error, "while building its stages")
        self._session.agree(fault, terms)
        with self._session.opening("while connecting the ranks"), self._transport.collective("connecting the ranks"):
            self._transport.open(self.device, every_channel(self.schedule.placement))
        self._copies = self._level(ties)
        self.pace = Pace(pace) if pace is not None else None
        self._programs = ProgramCache(
            schedule, self._stages, self._transport, self._handshakes, self.pace, overlap, self._copies.on_last_backward
        )
        self._programs.play(self.schedule)
        self._measured = self._now.train or self._now.infer
        self._seed = torch.ones((), device=self.device)
        self._session.inside = None

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Any = None,
        num_microbatches: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Forward and backward of one batch: gradients are added to `.grad`, the mean loss comes back on every rank.

        `inputs` (needed on the first stage's rank) are what the first stage is called with: a tensor, a tuple of arguments or a dict of
        named ones. Tensors have the batch as their first dimension and are cut, the first microbatches being the bigger ones; all else
        goes to every microbatch. A list holds the microbatches themselves, of any shapes. `targets` (on the last stage's rank) likewise.
        A bidirectional schedule has one such rank per route. `kwargs` are named arguments for the stages of this rank that take them:
        tensors as long as the batch are cut, or a list has a dict for each microbatch. Any of these tensors that requires a gradient gets
        it after the last pass, on the rank that gives it.

        Another `num_microbatches` than the pipeline's plays the same named schedule for that number. With a `scaler`, gradients are
        scaled; call `unscale_` after it. Raises `InputError` for a schedule without backward passes, and `PipelineError` on every rank
        when any rank fails.
        """
        self._refuse_to_train()
        begin = perf_counter()
        given = _Given(inputs, targets, kwargs, scaler)
        executor, stages = self._choose(num_microbatches).train, self._now.stages
        assert executor is not None
        self._measured = executor
        metering = self.metering or (self._auto is not None and self._auto.is_counting_bytes)
        loss = self._train_with(executor, stages, given, self._stages.meter(inputs, targets, kwargs) if metering else None)
        with self._session.ending_all("while handing back the gradients of inputs"):
            self._input_gradients.hand_back()
        if self.on_step is not None:
            with self._session.ending_all("in on_step"):
                executor.settle()
                self.on_step(self._report(perf_counter() - begin, loss))
        self._steps += 1
        if self._auto is not None:
            self._follow(self._auto)
        return loss

    @property
    def plan(self) -> Solved | None:
        """The plan that `schedule="auto"` follows, with its costs and bound; None before there is one."""
        return None if self._auto is None else self._auto.solved

    def eval_step(
        self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None, num_microbatches: int | None = None
    ) -> tuple[Tensor | None, Any]:
        """Forward of one batch, given as to `step`, in evaluation mode: (mean loss on every rank, None without targets; outputs).

        The outputs of all microbatches come back joined on the last stage's rank, and None elsewhere: tensors concatenated along the
        batch, those without dimensions stacked, what is equal in all microbatches once, anything else as a list of one for each. A
        bidirectional schedule evaluates on its first route.
        """
        self._settle()
        infer = self._choose(num_microbatches).infer
        if self.schedule.is_forward_only:
            self._measured = infer
        outputs: list[Any] = [None] * infer.program.num_microbatches
        with self._stages.evaluating():
            loss = self._run(infer, _Given(inputs, targets, kwargs), outputs)
        return loss, join_outputs(outputs) if self.rank in infer.ends[1] else None

    @property
    def losses(self) -> Tensor | None:
        """The loss of each microbatch of the last step, on every rank; None before one and without targets."""
        return self._losses.losses

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return nn.ModuleList(self.modules.values()).parameters()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` for the whole model: its gradients' norm, by which every rank scales its own. All must call it.

        Every parameter counts once, whatever number of stages share it, copy it or are tied in it. A norm that is not finite scales
        gradients as it does in torch; with `error_if_nonfinite` they stay, and every rank raises `InputError` naming the stages and
        parameters it comes from, and the microbatches of the last step whose loss is not finite. Raises `PipelineError` on every rank
        when any rank fails.
        """
        self._settle()
        with self._session.ending_all("while clipping gradients"):
            parts = clip.counted(self.modules, self._copies.elsewhere)
            mine = clip.norms_of(parts, norm_type, self._gradients)
            arguments = clip.ClipArguments.of(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
            spoilt_here = clip.spoilt_in(self.modules, parts, mine, self._gradients)
            norms, spoilt, told = clip.gather_norms(mine, spoilt_here, arguments, self._transport)
        clip.refuse_other_arguments(told)
        total = clip.total_norm(norms, norm_type).to(self.device)
        if error_if_nonfinite:
            clip.refuse(total, norm_type, spoilt, self.losses)
        clip.scale(self.parameters(), max_norm, total, self._gradients)
        return total

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.unscale_(optimizer)`, after which `scaler.step` and `scaler.update` do the same on every rank. All must call it.

        Each rank has a scaler of its own, made alike, for this rank's optimizer; a gradient that is not finite on one rank makes every
        rank leave out the step, as on one device. Raises `PipelineError` on every rank when any rank fails or their scales differ.
        """
        if scaler.is_enabled():
            with self._session.ending_all("while unscaling gradients"):
                gradient_scaling.unscale(scaler, optimizer, self._transport, self.parameters(), self._gradients)

    def profile(
        self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None, steps: int = 3, progress: profile.Progress | None = None
    ) -> Costs:
        """What the passes and messages of each stage take on these ranks and what they hold, the same `Costs` on every rank.

        Runs a step that warms up and counts bytes, then `steps` that are timed. Microbatches go through the model one by one, so that
        passes and messages are measured undisturbed, B apart from W, in the memory of one microbatch. Times are medians over
        microbatches and steps. Gradients, buffers and torch's random state are put back after it, to the bit, `losses` stay what they
        were, and `on_loss` hears of none. Every rank must call it. `progress(done, total)` hears of every step; without one, a bar on
        rank 0's terminal does. Raises `InputError` for less than 1 step, and `PipelineError` as `step` does.
        """
        if steps < 1:
            raise InputError(f"a profile takes at least 1 step, got {steps}")
        self._refuse_to_train()
        given = _Given(inputs, targets, kwargs)
        self._settle()
        timelines: list[Timeline] = []
        with self._session.ending_all("while profiling"), self._untouched(), profile.telling(progress, self.rank) as tell:
            executor, stages = self._programs.one_by_one()
            while len(timelines) <= steps:
                self._train_with(executor, stages, given, None if timelines else self._stages.meter(inputs, targets, kwargs))
                timelines.append(self._timeline(executor))
                tell(len(timelines), steps + 1)
            del self._handshakes[executor]
        return profile.costs_of(self.schedule.placement, timelines[0], timelines[1:])

    @contextmanager
    def recording_optimizer(self) -> Iterator[None]:
        """Put what runs inside, the optimizer's step, into the timeline of the last `step`."""
        with self._measured.recording_optimizer():
            yield

    def timeline(self) -> Timeline:
        """What every rank did in the last `step`, with the bytes held if it was metered. Every rank must call it.

        Its marks tell of messages, if the step was `recording`, and of the optimizer's step if it ran in `recording_optimizer` or is a
        `PostValidation`'s. Of a schedule without backward passes it is the last `eval_step`.
        """
        with self._session.ending_all("while gathering a timeline"):
            return self._timeline(self._measured)

    def describe(self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None) -> SplitReports:
        """How each stage splits its backward pass on this batch: how much of the weight gradients W does, and which B does, and why.

        Runs a step whose gradients and traces in buffers and the random state are taken back, as `profile` does. The same on every rank,
        and every rank must call it. Of the copies of a stage, the first rank's is told. Raises as `profile` does.
        """
        self._refuse_to_train()
        self._settle()
        piece = self._choose(None)
        assert piece.train is not None
        with self._session.ending_all("while describing the split"):
            with self._untouched():
                for stage in piece.stages.values():
                    stage.count()
                self._train_with(piece.train, piece.stages, _Given(inputs, targets, kwargs), None)
            with self._transport.collective("describing the split"):
                told = self._transport.gather_objects([stage.report() for stage in piece.stages.values()])
        found = {report.stage: report for reports in reversed(told) for report in reports}
        return SplitReports(found[stage] for stage in sorted(found))

    def close(self) -> None:
        """Close the pipeline's connections; every rank should. Later use raises `PipelineError`.

        An optimizer's step still to be validated is made final first.
        """
        if self._session.closed is None:
            self._settle()
            self._session.part("the pipeline is closed")

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            self.close()
        elif self._session.closed is None:
            self._session.part("the pipeline is closed")

    @property
    def _now(self) -> CompiledProgram:
        return self._programs.now

    def _choose(self, num_microbatches: int | None) -> CompiledProgram:
        """What is played for this number of microbatches."""
        self._session.refuse_if_closed()
        count = self.schedule.num_microbatches if num_microbatches is None else num_microbatches
        with self._session.ending_all(f"while making the schedule of {count} microbatches"):
            piece = self._programs.choose(count)
        self._session.stages = piece.stages
        return piece

    def _refuse_to_train(self) -> None:
        if self.schedule.is_forward_only:
            raise InputError(f"schedule {self.schedule.name!r} has no backward passes: evaluate with eval_step, or choose one that trains")

    def _level(self, tied: tuple[tuple[Place, ...], ...]) -> Copies:
        """The parameters that are held elsewhere, too, all made equal."""
        copies = Copies(self.schedule.placement, self.modules, self._transport, tied, self._gradients)
        with self._session.opening("while making the copies of stages equal"):
            copies.broadcast_initial_values()
        return copies

    def _follow(self, auto: Auto) -> None:
        """After a step: change to the schedule that `auto` finds better, if any."""
        with self._session.ending_all("while choosing a schedule"):
            better = auto.after_step(lambda: self._timeline(self._measured), self._transport)
            if better is not None:
                assert auto.solved is not None
                self.schedule = better
                self._programs.play(better, auto.solved.problem.costs)

    def _train_with(self, executor: Executor, stages: dict[int, Stage], given: _Given, meter: Meter | None) -> Tensor:
        """One step of forward and backward passes; the mean loss."""
        executor.meter = meter
        with self._stages.training(stages, meter):
            loss = self._run(executor, given, None)
        assert loss is not None
        return loss

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Steps that run inside leave nothing behind, and nobody hears of their losses."""
        with profile.untouched(self.modules.values(), self.device, self._gradients), self._losses.unheard():
            yield

    def _timeline(self, executor: Executor) -> Timeline:
        with self._transport.collective("gathering a timeline"):
            return trace.gather(executor.program.name, executor.records, self._transport)

    def _report(self, seconds: float, loss: Tensor) -> StepReport:
        mfu = self._flops.mfu(seconds) if self._flops is not None else None
        return StepReport(self._steps, seconds, 1 - busy_seconds(self._measured.records.spans) / seconds, loss.item(), mfu)

    def _run(self, executor: Executor, given: _Given, outputs: list[Any] | None) -> Tensor | None:
        sums = executor is self._now.train
        with self._session.playing(executor):
            executor.recording = self.recording
            batch = self._open(executor, given, outputs)
            stands = self._validation.question() if self._validation is not None and sums else None
            if stands is not None and self._flops is not None:
                stands = self._flops.counting_last(stands)
            if sums:
                self._copies.set_aside()
            with self._flops.counting(batch.known) if self._flops is not None and sums else nullcontext():
                executor.run(batch, stands)
            if sums:
                self._copies.sum()
            return self._losses.close()

    def _validate_with(self, validation: PostValidation) -> None:
        """Let `validation` ask at the rollback point of a step whether its forwards stand; every rank must be given one."""
        self._validation = validation
        self._programs.with_rollback_points()

    def _settle(self) -> None:
        """Make the optimizer's last step final before anything but a step looks at weights or gradients."""
        if self._validation is not None:
            self._validation.settle()

    def _open(self, executor: Executor, given: _Given, outputs: list[Any] | None) -> Batch:
        count = executor.program.num_microbatches
        entries, exits = executor.ends
        is_first, is_last = self.rank in entries, self.rank in exits
        for what, value, needed in (("inputs", given.inputs, is_first), ("targets", given.targets, is_last and outputs is None)):
            if needed and value is None:
                where = "first" if what == "inputs" else "last"
                raise InputError(f"{what} are missing: this rank holds the {where} stage and needs them")
        gradients = self._input_gradients
        gradients.begin(len(executor.program.placement.routes))
        cut = split_batch(given.inputs, count, "inputs", gradients) if is_first else Cut([], [], UNCUT)
        aims = split_batch(given.targets, count, "targets", gradients) if is_last and given.targets is not None else Cut([], [], UNCUT)
        inputs = [arguments(part) for part in cut.parts]
        known, announcing, size = self._handshakes[executor].open(inputs, cut.whole)
        refuse_other_size(aims.whole, size)
        extras = {} if given.kwargs is None else spread_kwargs(given.kwargs, self.modules, count, size, gradients)
        self._losses.open(exits, aims.parts or None, aims.sizes, outputs)
        return Batch(inputs, self._losses.finish, self._seed_by(given.scaler), known, announcing, extras)

    def _seed_by(self, scaler: torch.amp.GradScaler | None) -> Cotangents:
        """What the backward pass starts from; every rank's scaler begins with it, too."""
        return (self._seed if scaler is None else scaler.scale(self._seed),)

    def _part(self, failed: bool) -> None:
        """Let go of what keeps connections open: messages that were sent; after a failure, of everything in flight."""
        if failed:
            for executor in self._handshakes:
                executor.clear()
            self._copies.clear()
        self._handshakes.clear()
        if self._auto is not None:
            self._auto.close()
        if self._validation is not None:
            self._validation.clear()
        self._losses.clear()
