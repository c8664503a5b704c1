"""`Pipeline`: the front of the runtime. Stages, a schedule and a loss in; steps with the gradients of one device out."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobubble.costs import Costs
from zerobubble.errors import InputError, PipelineError, ProgramError, ZeroBubbleError
from zerobubble.ir import Schedule
from zerobubble.lower import lower
from zerobubble.program import Program
from zerobubble.runtime.batch import join_outputs, split_batch
from zerobubble.runtime.copies import Copies
from zerobubble.runtime.executor import Batch, Executor, Overlap
from zerobubble.runtime.failure import GRACE_S, Note, NoticeBoard, error_of
from zerobubble.runtime.gradients import Gradients
from zerobubble.runtime.loss import LossBook
from zerobubble.runtime.measure import profile, trace
from zerobubble.runtime.measure.memory import Meter
from zerobubble.runtime.messages.meeting import meeting
from zerobubble.runtime.messages.opening import Opening
from zerobubble.runtime.messages.transport import LostContactError, Transport
from zerobubble.runtime.optimizer import clip
from zerobubble.runtime.pace import Pace
from zerobubble.runtime.split.choice import make_stage, ways_of
from zerobubble.runtime.split.deferred import shadowing
from zerobubble.runtime.split.report import SplitReports
from zerobubble.runtime.split.work import stop_collecting
from zerobubble.runtime.stage import Stage
from zerobubble.schedules import make
from zerobubble.timeline import Timeline
from zerobubble.verify_program import program_faults

LossFunction = Callable[[Any, Any], Tensor]
Build = Callable[[int, int], nn.Module]
Progress = Callable[[int, int], object]


class Pipeline:
    """Trains a model cut into stages over the ranks of a process group.

    Every rank of `group` (default: all) makes one, after `torch.distributed.init_process_group`, with the same arguments but its own
    modules. `build_or_modules` is a function `build(stage_index, num_stages) -> nn.Module`, or this rank's modules by ascending
    stage. `schedule` is a published name or a `Schedule`. `loss_fn(output, target)` gives the mean loss of one microbatch.

    `timeout` bounds in seconds how long a rank waits for a message. `pace` stretches every training pass to the given times, which
    shows a schedule's effect where ranks share cores. With `metering`, steps count the bytes held for backward (`timeline` tells).

    `overlap(first, second)` runs the two passes of an overlapped step (DualPipe), each an `Overlapped`; without it they run one after
    the other. A bidirectional schedule has a copy of a stage on each route: copies start with the parameters of the first route's, and
    `step` leaves the sum of their gradients in each.

    With `main_grad`, such as torch.float32 for a model in bfloat16, gradients are summed in `parameter.main_grad` of that type, and `.grad`
    stays None; set it to None to begin anew.

    `split` says how backward passes come apart, for all stages or for some of this rank's by index (others are "deferred"): "deferred"
    (eager, Linears wait), "graph" (the traced graph of the stage is cut), "compiled" (its parts are compiled, too) or "whole" (B does
    all, W nothing).

    Raises `InputError` on every rank when an argument is wrong on one, or when they disagree.
    """

    def __init__(
        self,
        build_or_modules: Build | nn.Module | Sequence[nn.Module],
        schedule: str | Schedule,
        num_microbatches: int,
        loss_fn: LossFunction,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = 120.0,
        pace: Costs | None = None,
        overlap: Overlap | None = None,
        main_grad: torch.dtype | None = None,
        split: str | Mapping[int, str] = "deferred",
    ) -> None:
        self._closed: str | None = None
        self._openings: dict[Executor, Opening] = {}
        self.metering = False
        self._transport = Transport(group, timeout)
        self.rank, ranks = self._transport.rank, self._transport.size
        fault = ""
        try:
            self.schedule = _schedule(schedule, ranks, num_microbatches)
            self.modules = _modules(build_or_modules, self.schedule, self.rank)
            self.device = _device(self.modules)
            if pace is not None and self.device.type != "cpu":
                raise InputError(f"pace is for rehearsals on CPUs; passes on {self.device} take the time they take")
            self._gradients = Gradients(main_grad)
            self._ways = ways_of(split, self.modules)
            splits = self.schedule.split_stages
            self._stages = {s: make_stage(self._ways[s], m, s, s in splits, self._gradients) for s, m in self.modules.items()}
            programs = _proved(self.schedule), _proved(self.schedule.forward_only())
        except ZeroBubbleError as error:
            fault = str(error)
        except Exception as error:  # noqa: BLE001 - the user's build function may raise anything, and every rank has to hear of it
            fault = f"{type(error).__name__}: {error}"
        self._agree(fault)
        self._transport.open(self.device, sorted({channel for program in programs for _, _, channel, _ in program.channels()}))
        self._board = NoticeBoard(self._transport.store, ranks)
        self._copies = self._level()
        self.pace = Pace(pace) if pace is not None else None
        self._train = Executor(programs[0], self._stages, self._transport, self.pace, overlap)
        self._infer = Executor(programs[1], self._stages, self._transport, None)
        for executor in (self._train, self._infer):
            self._openings[executor] = Opening(self.schedule.placement, self._transport)
        self._losses = LossBook(self._transport, loss_fn)

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """Forward and backward of one batch: gradients are added to `.grad`, the mean loss comes back on every rank.

        `inputs` (needed on the first stage's rank) and `targets` (on the last's) are tensors or tuples of tensors whose first
        dimension is the batch, a multiple of the number of microbatches; a bidirectional schedule has one such rank per route. Raises
        `PipelineError` on every rank when any rank fails.
        """
        return self._train_with(self._train, self._stages, inputs, targets, self._meter() if self.metering else None)

    def eval_step(self, inputs: Any = None, targets: Any = None) -> tuple[Tensor | None, Any]:
        """Forward of one batch in evaluation mode: (mean loss on every rank, None without targets; outputs).

        The outputs of all microbatches come back concatenated on the last stage's rank, and None elsewhere. A bidirectional schedule
        evaluates on its first route.
        """
        outputs: list[Any] = [None] * self.schedule.num_microbatches
        modes = [(part, part.training) for module in self.modules.values() for part in module.modules()]
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad():
                loss = self._run(self._infer, inputs, targets, outputs)
        finally:
            for part, mode in modes:
                part.training = mode
        return loss, join_outputs(outputs) if self.rank in _ends(self._infer)[1] else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return nn.ModuleList(self.modules.values()).parameters()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` for the whole model: its gradients' norm, by which every rank scales its own. All must call it.

        Every parameter counts once, whatever number of stages or copies of a stage share it. A norm that is not finite scales gradients
        as it does in torch; with `error_if_nonfinite` they stay, and every rank raises `InputError` naming the stages it comes from.
        Raises `PipelineError` on every rank when any rank fails.
        """
        with self._ending_all("while clipping gradients"):
            norms = clip.gather_norms(clip.norms_of(self.modules, norm_type, self._gradients), self._transport)
        total = clip.total_norm(norms, norm_type, error_if_nonfinite=error_if_nonfinite).to(self.device)
        clip.scale(self.parameters(), max_norm, total, self._gradients)
        return total

    def profile(self, inputs: Any = None, targets: Any = None, *, steps: int = 3, progress: Progress | None = None) -> Costs:
        """What the passes and messages of each stage take on these ranks and what they hold, the same `Costs` on every rank.

        Runs a step that warms up and counts bytes, then `steps` that are timed. Microbatches go through the model one by one, so that
        passes and messages are measured undisturbed, B apart from W, in the memory of one microbatch. Times are medians over
        microbatches and steps. Gradients, buffers and torch's random state are put back after it, to the bit. Every rank must call it;
        `progress(done, total)` hears of every step. Raises `InputError` for less than 1 step, and `PipelineError` as `step` does.
        """
        if steps < 1:
            raise InputError(f"a profile takes at least 1 step, got {steps}")
        timelines: list[Timeline] = []
        with self._ending_all("while profiling"), profile.untouched(self.modules.values(), self.device):
            stages = {s: make_stage(self._ways[s], m, s, True) for s, m in self.modules.items()}
            executor = Executor(_proved(profile.one_by_one(self.schedule)), stages, self._transport, self.pace)
            self._openings[executor] = Opening(self.schedule.placement, self._transport)
            while len(timelines) <= steps:
                self._train_with(executor, stages, inputs, targets, None if timelines else self._meter(inputs, targets))
                timelines.append(self._timeline(executor))
                if progress is not None:
                    progress(len(timelines), steps + 1)
            del self._openings[executor]
        return profile.costs_of(timelines[0], timelines[1:])

    def timeline(self) -> Timeline:
        """What every rank did in the last `step`, with the bytes held if it was metered. Every rank must call it."""
        with self._ending_all("while gathering a timeline"):
            return self._timeline(self._train)

    def describe(self) -> SplitReports:
        """How each stage splits its backward pass, the same on every rank; every rank must call it.

        After a training step it tells how much of the weight gradients W did, and which parameters got theirs in B. Of the copies of a
        stage, the first rank's is told. Raises `PipelineError` as `step` does.
        """
        with self._ending_all("while describing the split"), meeting("describing the split"):
            told = self._transport.gather_objects([stage.report() for stage in self._stages.values()])
        found = {report.stage: report for reports in reversed(told) for report in reports}
        return SplitReports(found[stage] for stage in sorted(found))

    def close(self) -> None:
        """Close the pipeline's connections; every rank should. Later use raises `PipelineError`."""
        if self._closed is None:
            self._shut("the pipeline is closed")

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _agree(self, fault: str) -> None:
        """Compare arguments with every rank; where something is wrong, raise the same error on all."""
        mine = "" if fault else f"{self.schedule.name} of {self.schedule.num_microbatches} microbatches"
        digest = "" if fault else hashlib.sha256(self.schedule.to_text().encode()).hexdigest()
        told = self._transport.gather_objects((fault, mine, digest))
        faults = [f"rank {rank}: {entry[0]}" for rank, entry in enumerate(told) if entry[0]]
        if not faults and len({entry[2] for entry in told}) > 1:
            faults = ["ranks disagree on the schedule: " + ", ".join(f"rank {r} has {entry[1]}" for r, entry in enumerate(told))]
        if faults:
            self._shut("the pipeline was never opened")
            raise InputError("; ".join(faults))

    def _level(self) -> Copies:
        """The stages that other ranks hold too, all copies made equal."""
        copies = Copies(self.schedule.placement, self.modules, self._transport, self._gradients)
        try:
            if len(self.schedule.placement.routes) > 1:
                copies.level()
        except InputError:
            self._shut("the pipeline was never opened")
            raise
        except LostContactError as error:
            self._shut("the pipeline was never opened")
            raise PipelineError(str(error), rank=error.peer) from error
        return copies

    def _meter(self, *batch: Any) -> Meter:
        """Counts what passes hold, without parameters, buffers and the tensors of `batch`."""
        own = [tensor for module in self.modules.values() for tensor in (*module.parameters(), *module.buffers())]
        given = [tensor for part in batch for tensor in (part if isinstance(part, (tuple, list)) else (part,))]
        return Meter([*own, *(tensor for tensor in given if isinstance(tensor, Tensor))])

    def _train_with(self, executor: Executor, stages: dict[int, Stage], inputs: Any, targets: Any, meter: Meter | None) -> Tensor:
        """One step of forward and backward passes; the mean loss."""
        executor.meter = meter
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.callback(stop_collecting)
            for stage in stages.values():
                stage.meter = meter
                if stage.split and self._ways[stage.index] == "deferred":
                    stack.enter_context(shadowing(stage.module))
            loss = self._run(executor, inputs, targets, None)
        assert loss is not None
        return loss

    def _timeline(self, executor: Executor) -> Timeline:
        with meeting("gathering a timeline"):
            return trace.gather(executor.program.name, executor.spans, executor.memory, self._transport)

    def _run(self, executor: Executor, inputs: Any, targets: Any, outputs: list[Any] | None) -> Tensor | None:
        self._refuse_if_closed()
        executor.at = -1
        try:
            batch = self._open(executor, inputs, targets, outputs)
            if executor is self._train:
                self._copies.set_aside()
            executor.run(batch)
            if executor is self._train:
                self._copies.sum()
            return self._losses.close()
        except BaseException as error:  # noqa: BLE001 - whatever stops this rank stops them all
            action = str(executor.row[executor.at]) if 0 <= executor.at < len(executor.row) else ""
            when = f"at '{action}'" if action else "before its first pass" if executor.at < 0 else "after its last pass"
            self._fail(error, when, action)

    @contextmanager
    def _ending_all(self, when: str) -> Iterator[None]:
        """Between steps, too, whatever stops this rank stops them all."""
        self._refuse_if_closed()
        try:
            yield
        except PipelineError:
            raise
        except BaseException as error:  # noqa: BLE001 - a rank that is told nothing would wait for this one
            self._fail(error, when)

    def _refuse_if_closed(self) -> None:
        if self._closed is not None:
            raise PipelineError(f"{self._closed}; make a new Pipeline to go on")

    def _open(self, executor: Executor, inputs: Any, targets: Any, outputs: list[Any] | None) -> Batch:
        count = self.schedule.num_microbatches
        entries, exits = _ends(executor)
        is_first, is_last = self.rank in entries, self.rank in exits
        for what, value, needed in (("inputs", inputs, is_first), ("targets", targets, is_last and outputs is None)):
            if needed and value is None:
                where = "first" if what == "inputs" else "last"
                raise InputError(f"{what} are missing: this rank holds the {where} stage and needs them")
        cut = split_batch(inputs, count, "inputs") if is_first else []
        aims = split_batch(targets, count, "targets") if is_last and targets is not None else None
        self._losses.open(exits, aims, outputs)
        known, announcing = self._openings[executor].open(cut)
        return Batch(cut, self._losses.finish, known, announcing)

    def _fail(self, error: BaseException, when: str, action: str = "") -> NoReturn:
        if isinstance(error, LostContactError):
            traceback.clear_frames(error.__traceback__)
            note = self._board.look(GRACE_S) or self._board.publish(Note(error.peer, action, f"rank {self.rank} {error}"))
        else:
            note = self._board.publish(Note(self.rank, action, f"rank {self.rank} failed {when}: {type(error).__name__}: {error}"))
        for executor in self._openings:
            executor.clear()
        self._losses.clear()
        self._shut(note.message)
        self._board.farewell()
        raise error_of(note) from (None if isinstance(error, LostContactError) else error)

    def _shut(self, reason: str) -> None:
        self._closed = reason
        self._openings.clear()  # a message that was sent keeps its connection open
        self._transport.close()


def _schedule(schedule: str | Schedule, ranks: int, num_microbatches: int) -> Schedule:
    made = make(schedule, ranks, num_microbatches) if isinstance(schedule, str) else schedule
    if made.num_ranks != ranks:
        raise InputError(f"schedule {made.name!r} is for {made.num_ranks} ranks, the process group has {ranks}")
    if made.num_microbatches != num_microbatches:
        raise InputError(f"schedule {made.name!r} has {made.num_microbatches} microbatches, num_microbatches is {num_microbatches}")
    if made.is_forward_only:
        raise InputError(f"schedule {made.name!r} has no backward passes; Pipeline trains, and evaluates with the same schedule")
    return made


def _ends(executor: Executor) -> tuple[list[int], list[int]]:
    """For each microbatch, the rank where it enters the model and the rank where its loss is."""
    routes = executor.program.placement.routes
    taken = [routes[k] for k in executor.program.microbatch_routes or (0,) * executor.program.num_microbatches]
    return [route[0] for route in taken], [route[-1] for route in taken]


def _proved(schedule: Schedule) -> Program:
    """The schedule's program, proved to match its messages and never to stop before a rank runs it."""
    program = lower(schedule)
    faults = program_faults(program)
    if faults:
        raise ProgramError(faults, program.name)
    return program


def _modules(given: Build | nn.Module | Sequence[nn.Module], schedule: Schedule, rank: int) -> dict[int, nn.Module]:
    indices = sorted({stage for _, stage in schedule.placement.stages(rank)})
    if isinstance(given, nn.Module):
        given = [given]
    if isinstance(given, Sequence):
        if len(given) != len(indices):
            raise InputError(f"schedule {schedule.name!r} puts stages {indices} on this rank, got {len(given)} modules")
        built: list[Any] = list(given)
    else:
        built = [given(index, schedule.num_stages) for index in indices]
    for index, module in zip(indices, built, strict=True):
        if not isinstance(module, nn.Module):
            raise InputError(f"stage {index} must be an nn.Module, got {type(module).__name__}")
    return dict(zip(indices, built, strict=True))


def _device(modules: dict[int, nn.Module]) -> torch.device:
    devices = {tensor.device for module in modules.values() for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        raise InputError(f"the stages of a rank must be on one device, got {', '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else torch.device("cpu")
