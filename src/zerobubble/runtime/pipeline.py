"""`Pipeline`: the front of the runtime. Stages, a schedule and a loss in; steps with the gradients of one device out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerobubble.costs import Costs
from zerobubble.errors import InputError, PipelineError
from zerobubble.ir import Schedule
from zerobubble.lowering import RankGathers
from zerobubble.offload import HostLink, RankOffloads
from zerobubble.partition import Layer
from zerobubble.planning import Plan
from zerobubble.runtime.calls import called_by_all, plays_steps, survives
from zerobubble.runtime.executor.overlapped import Overlap
from zerobubble.runtime.executor.pace import Pace
from zerobubble.runtime.hooks import clip
from zerobubble.runtime.hooks.gradient_scaling import Unscaling
from zerobubble.runtime.hooks.optimizer_watch import watch_optimizers
from zerobubble.runtime.hooks.replicas import BUCKET_BYTES
from zerobubble.runtime.hooks.shared_parameters import Tied
from zerobubble.runtime.measure.profile import Progress
from zerobubble.runtime.options import LOSS, TIMEOUT, PipelineOptions, Plays
from zerobubble.runtime.session import Session, attach_first, connect, runner_of
from zerobubble.runtime.split.report import SplitReports
from zerobubble.runtime.stage.levels import GivenLevels
from zerobubble.runtime.stage.rank_stages import Build
from zerobubble.runtime.step import profiling
from zerobubble.runtime.step.batch import BatchDims, StepInputs, join_outputs
from zerobubble.runtime.step.hook import StepHook
from zerobubble.runtime.step.loss import LossFunction, LossWeight, OnLoss
from zerobubble.runtime.step.memory_forecast import MemoryForecasts
from zerobubble.runtime.step.optimizers import Optimizers, optimizers_in
from zerobubble.runtime.step.ordering import CostOf
from zerobubble.runtime.step.profiling import profile_layers
from zerobubble.runtime.survival.survivors import Survival
from zerobubble.runtime.transport.choice import AUTO
from zerobubble.runtime.transport.endpoint import Endpoint
from zerobubble.runtime.transport.transport import Carrier
from zerobubble.timeline import Timeline

CLOSED = "the pipeline is closed"
R = TypeVar("R")


class Pipeline:
    """Trains a model cut into stages over the ranks of a process group, with the gradients of one device.

    Every rank makes one, after `torch.distributed.init_process_group`, with the same arguments but its own modules:

        pipe = zb.Pipeline(build, "zb-h1", num_microbatches=8, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for inputs, targets in batches:
            loss = pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()

    What to train:
        build_or_modules: a function `build(stage_index, num_stages) -> nn.Module`, or this rank's modules in ascending order of stages.
            Each call of `build` is seeded by this rank's seed and the stage; stages draw by a seed of rank 0 (docs/training.md).
        schedule: a published name ("zb-h1"), a `Schedule` or a plan (each has one number of microbatches), a function
            `(num_ranks, num_microbatches) -> Schedule`, or `zb.Auto(...)` ("auto" for short), which measures the first steps and plans.
            A schedule without backward passes, such as "forward-only", serves `eval_step`.
        num_microbatches: into how many parts a batch is cut; `step` may be called with another number where the schedule allows it.
        loss_fn: `loss_fn(output, target)` gives the mean loss of one microbatch, a tensor with one element. What an `nn.Module` holds
            belongs to the last stage. Or `zb.nn.DividedHead(...)`, if the schedule divides the head over ranks.
        loss_weight: `loss_weight(target)` gives the weight of a microbatch in the mean, such as the number of tokens that count;
            without it microbatches count by their samples.
        batch_dims: the dimension of the batch in inputs, targets and kwargs where it is not the first, by name; None for what all
            microbatches share: `{"position_ids": 1, "mask": None}`.
        scale: what is divided for the mean over microbatches: each "loss" before its backward pass, or the summed "gradients", which is
            right for autograd functions that inject the gradient of an auxiliary loss (docs/losses.md).
        order_by: the cost of microbatches, where it differs: "tokens", or `order_by(microbatch)`, called on the first stage's rank. Each
            training step takes them in the order that makes it shortest; what is given and handed back keeps the order of the data.
        tied: parameters of several stages that are one, as groups of (stage, name): `[(0, "tok.weight"), (3, "head.weight")]`. A name may
            be that of a whole module in the stage, "" for the stage itself. They start with the values of the first of their group, `step`
            leaves the sum of all their gradients in each, and a norm counts them once.

    How backward passes run:
        split: how B and W come apart, for all stages, or by index for some of this rank's (others are "deferred"): "deferred" (eager;
            layers leave their weight gradients to W), "graph" (the traced graph of the stage is cut), "compiled" (and its parts are
            compiled), or "whole" (B does all).
        cuda_graphs: capture the passes of stages split by their graph as CUDA graphs, and replay them.
        main_grad: a type such as torch.float32 in which gradients are summed, in `parameter.main_grad`; `.grad` then stays None.
        overlap: `overlap(first, second)` runs the two passes of an overlapped step (DualPipe), each an `Overlapped`; without it they run
            one after the other.
        recompute: which modules the R passes of a schedule compute again, by the name of the level: `{"selective": ["*.attn"]}`, patterns
            of names, classes of modules or a function `(name, module) -> bool`, for all stages or in a dict by stage. All else is kept.
            A plan tells the level of each stage; another schedule's R passes have the one that is given. "full", without a word, is all.
        offload: what each rank moves to host memory and back while it waits for its backward pass, as `zb.offload.plan_offloads` gives it
            for this schedule. A plan with a host, given as the schedule, says it itself.

    Ranks and messages:
        group: the process group whose ranks form the pipeline; all ranks by default.
        mesh: instead of a group, a `DeviceMesh` of all ranks that train together, with named dimensions in any order: "pp" is the pipeline.
            Along "dp", "dp_replicate", "dp_shard", "cp" and "ep" ranks are given other shares of the batch, start with the values of the
            first, `step` returns the mean loss of it all and leaves its gradients. Along "ep" each has other experts, along "tp" parts.
        gathered_bytes: the memory that a rank has for gathered weights of stages that FSDP2 divides; without it that of the plan, or each
            stage is gathered once in a step. With less, stages are let go and gathered again as seldom as possible: `pipe.gathers` tells.
        bucket_bytes: how many bytes of gradients are summed over replicas together.
        timeout: how long a rank waits for a message before all ranks raise `PipelineError`, in seconds.
        transport: what carries tensors between ranks, "gloo", "nccl", "shared-memory" or "staged"; "auto" is the fastest between
            all ranks, and `pipe.transport` shows which and why. A `zb.transport.Endpoint`, this rank's end of your own transport,
            carries everything and needs no process group.
        survive: go on without a rank that is gone, where another holds its stages: the call in which it went is made again by those that
            are left, who share its work. Every rank is then given the inputs, targets and kwargs of its replica.

    What plugs in and what is told:
        hooks: `StepHook`s, called in every training step in this order: `zb.hooks.Telemetry`, your own.
        on_loss: `on_loss(microbatch, loss)` hears of each loss where it is computed, without waiting for other ranks.
        pace: `Costs` to whose times every training pass is stretched, which shows a schedule's effect where ranks share cores.
        link: the `zb.offload.HostLink` to whose times copies of offloads are stretched, on CPUs, where host and device share the memory.

    A bidirectional schedule has a copy of a stage on each route: copies start with the values of the first route's, and `step` leaves the
    sum of their gradients in each.

    Set `pipe.recording = False` to leave out the times of messages from timelines, and `pipe.metering = True` to have the bytes held for
    backward in them.

    Raises `InputError` on every rank when an argument is wrong on one, or when they disagree.
    """

    def __init__(
        self,
        build_or_modules: Build | nn.Module | Sequence[nn.Module],
        schedule: Plays,
        num_microbatches: int,
        loss_fn: LossFunction,
        *,
        loss_weight: LossWeight | None = None,
        scale: str = LOSS,
        tied: Tied = (),
        split: str | Mapping[int, str] = "deferred",
        cuda_graphs: bool = False,
        main_grad: torch.dtype | None = None,
        overlap: Overlap | None = None,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        gathered_bytes: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = TIMEOUT,
        hooks: Sequence[StepHook] = (),
        on_loss: OnLoss | None = None,
        pace: Costs | None = None,
        transport: str | Endpoint = AUTO,
        survive: bool = False,
        order_by: str | CostOf | None = None,
        recompute: GivenLevels | None = None,
        offload: Sequence[RankOffloads] | None = None,
        link: HostLink | None = None,
        batch_dims: BatchDims | None = None,
    ) -> None:
        options = PipelineOptions(
            build_or_modules=build_or_modules,
            schedule=schedule,
            num_microbatches=num_microbatches,
            loss_fn=loss_fn,
            loss_weight=loss_weight,
            scale=scale,
            tied=tied,
            split=split,
            cuda_graphs=cuda_graphs,
            main_grad=main_grad,
            overlap=overlap,
            group=group,
            mesh=mesh,
            gathered_bytes=gathered_bytes,
            bucket_bytes=bucket_bytes,
            timeout=timeout,
            hooks=hooks,
            on_loss=on_loss,
            pace=pace,
            transport=transport,
            survive=survive,
            order_by=order_by,
            recompute=recompute,
            offload=offload,
            link=link,
            batch_dims=batch_dims,
        )
        session = connect(options)
        self.rank = session.peers.rank
        self.modules = session.setup.stages.modules
        self.device = session.setup.stages.device
        self.pace = Pace(pace) if pace is not None else None
        self._options = options
        self._survival = Survival(session) if survive else None
        self._play(session)

    def _play(self, session: Session) -> None:
        """Be ready for the steps of `session`."""
        options = self._options
        self._session = session
        session.guard.schedule = session.setup.schedule.name
        with session.guard.during("while making its programs"):
            self._steps = runner_of(session, options, self.pace)
        self._unscaling = Unscaling(self._steps)
        session.guard.on_closing(self._steps.close)
        self._auto = session.setup.planner
        attach_first(session, self._steps, [*session.first_hooks(), *([self._auto] if self._auto is not None else []), *options.hooks])
        self._unwatch_optimizers = watch_optimizers(self._steps)

    def _given(self, inputs: Any, targets: Any, kwargs: Any, scaler: torch.amp.GradScaler | None = None) -> StepInputs:
        return StepInputs(inputs, targets, kwargs, self._options.batch_dims or {}, scaler)

    def _lent(self, given: StepInputs, num_microbatches: int | None = None) -> tuple[StepInputs, int | None]:
        survival, count = self._survival, num_microbatches or self._options.num_microbatches
        return (given, num_microbatches) if survival is None else survival.lend(given, count, self._session)

    def surviving(self, call: Callable[[], R], *, adds_gradients: bool = False) -> R:
        """What `call`, such as `zb.save`, gives; those that are left make it again where the pipeline is to survive that a rank goes."""
        if self._survival is None:
            return call()
        recover = partial(self._recover, self._steps.num_steps())
        return self._survival.run(call, lambda: self._session, recover, adds_gradients=adds_gradients)

    def _recover(self, before: int, error: PipelineError) -> bool:
        """Reconnects the survivors of `error`. Returns whether they repeat the call, which began after `before` steps."""
        assert self._survival is not None
        steps = self._steps
        session = self._survival.recover_from(error, self._session, self._options)
        self._unwatch_optimizers()
        self._play(session)
        self._steps.recording, self._steps.measures_memory = steps.recording, steps.measures_memory
        repeats = self._survival.must_repeat_call(self._session)
        self._steps.take_over(before if repeats else steps.num_steps(), steps.rng.seed)
        return repeats

    @survives
    @plays_steps
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
        named ones. Tensors have the batch as their first dimension, or where `batch_dims` says, and are cut, the first microbatches being
        the bigger ones; all else, and tensors of size 1 there, goes to every microbatch. A list holds the microbatches themselves, of any
        shapes. `targets` (on the last stage's rank) likewise. A bidirectional schedule has one such rank per route. `kwargs` are named
        arguments for the stages of this rank that take them: tensors as long as the batch are cut, or a list has a dict for each
        microbatch. Any of these tensors that requires a gradient gets it after the last pass, on the rank that gives it.

        Another `num_microbatches` plays the same named schedule for it. With a `scaler` gradients are scaled: call `unscale_` after it.

        Raises `InputError`, and the pipeline stays open, where no rank can make the call: for a schedule without backward passes, a number
        of microbatches that has none, inputs that cannot be cut into so many, inside `torch.no_grad()`, and in a thread that comes while
        another uses the pipeline; and after a step that trains nothing, because the loss of no microbatch requires a gradient. Raises
        `PipelineError` on every rank when any rank fails, or is called otherwise than the others.
        """
        return self._steps.train(*self._lent(self._given(inputs, targets, kwargs, scaler), num_microbatches))

    def order_ahead(self, inputs: list[Any]) -> None:
        """Order the microbatches of a later `step` and plan its passes for them, on a thread alongside what runs until then: see `played`.

        Only the first stage's rank needs to call it. A step with other microbatches orders these and plays the passes of `schedule`. Raises
        `InputError` for costs that are no numbers above 0, for anything but a list of microbatches, and in a pipeline without `order_by`.
        """
        self._steps.order_ahead(inputs, asked=self._options.order_by is not None)

    @survives
    @plays_steps
    def eval_step(
        self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None, num_microbatches: int | None = None
    ) -> tuple[Tensor | None, Any]:
        """Forward of one batch, given as to `step`, in evaluation mode: (mean loss on every rank, None without targets; outputs).

        The outputs of all microbatches come back joined on the last stage's rank, and None elsewhere: tensors concatenated along the
        batch, those without dimensions stacked, equal constants and one object once, anything else as a list with one for each; tuples,
        dicts and dataclasses item by item. A bidirectional schedule evaluates on its first route.
        """
        self._steps.settle()
        loss, outputs = self._steps.evaluate(*self._lent(self._given(inputs, targets, kwargs), num_microbatches))
        return loss, None if outputs is None else join_outputs(outputs)

    @property
    def schedule(self) -> Schedule:
        """The schedule that is played now."""
        return self._steps.schedule

    @property
    def played(self) -> Schedule | None:
        """What the last `step` played, the same on every rank, in the order and passes that `order_by` led to; None before one."""
        return self._steps.played

    @property
    def plan(self) -> Plan | None:
        """The plan that `schedule=zb.Auto(...)` follows, with its costs and bound; None before there is one."""
        return None if self._auto is None else self._auto.solved

    @property
    def gathers(self) -> RankGathers:
        """What this rank gathers in a training step of weights that FSDP2 divides, and when: steps of its row, counted from 0."""
        return self._steps.gathers

    @property
    def transport(self) -> Carrier:
        """What carries tensors between ranks: its `name`, `why` it was chosen, and the bytes that it holds on this rank."""
        return self._session.transport.carrier

    @property
    def losses(self) -> Tensor | None:
        """The loss of each microbatch of the last step with all that stages added, on every rank; None before one and without targets."""
        return self._steps.losses

    @property
    def added_losses(self) -> dict[str, Tensor]:
        """The parts of the last step's loss that stages added with `zb.nn.add_loss`, by name, as scalar tensors on every rank."""
        return self._steps.added_losses

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once.

        Where none of them requires a gradient, an empty parameter that does comes last: torch refuses an optimizer of nothing at all.
        """
        return self._steps.parameters()

    def attach(self, hook: StepHook) -> None:
        """Call `hook` from the next training step on, after those that are attached already.

        Every rank must attach hooks that communicate, in the same order. Raises `InputError` for what is no `StepHook`, for one that is
        attached already, in a pipeline that is to survive the end of ranks, and whatever its `on_attach` raises.
        """
        with self._session.guard.during("in attach"), self._session.guard.alike():
            if self._survival is not None:
                raise InputError("a pipeline made with survive takes no hooks, which would end with a rank: leave one of both out")
            self._steps.attach(hook)

    @called_by_all
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` for the whole model: its gradients' norm, by which every rank scales its own. All must call it.

        Every parameter counts once, however many stages share it. A norm that is not finite scales gradients as it does in torch; with
        `error_if_nonfinite` they stay, and every rank raises `InputError` naming the stages and parameters that it comes from, and the
        microbatches whose loss is not finite. Raises `PipelineError` on every rank when any rank fails.
        """
        total = self._norm_to_clip_by(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        with self._session.guard.during("while clipping gradients"):
            clip.scale(self._steps.parameters(), max_norm, total, self._steps.gradients)
        return total

    @survives
    def _norm_to_clip_by(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """The norm by which gradients are clipped, which all ranks know when one of them begins to scale its own."""
        with self._session.guard.during("in clip_grad_norm_"):
            self._steps.settle()
            self._steps.before_optimizer(ranks_meet=True)
            return clip.norm_to_clip_by(self._steps, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, losses=self.losses)

    @called_by_all
    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: Optimizers) -> None:
        """`scaler.unscale_(optimizer)`, after which `scaler.step` and `scaler.update` do the same on every rank. All must call it.

        Each rank has a scaler of its own, made alike, for this rank's optimizer, or for a list of several. A gradient that is not finite on
        one rank makes every rank leave out the step, as on one device; those given together leave it out together. Raises `PipelineError`
        on every rank when any rank fails, `step` was not given the scaler, scales differ, or some scalers are enabled and others not.
        """
        self._unscaling.unscale(scaler, optimizers_in(optimizer))

    @plays_steps
    def profile(
        self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None, steps: int = 3, progress: Progress | None = None
    ) -> Costs:
        """What the passes and messages of each stage take on these ranks and what they hold, the same `Costs` on every rank.

        Runs a step that warms up and counts bytes, then `steps` that are timed. Microbatches go through the model one by one, so that
        passes and messages are measured undisturbed, B apart from W, in the memory of one microbatch. Times are medians over
        microbatches and steps. Gradients, buffers and torch's random state are put back after it, to the bit, `losses` stay what they
        were, and `on_loss` and hooks hear of none. Every rank must call it. `progress(done, total)` hears of every step; without one, a bar
        on rank 0's terminal does.

        In as many steps each, it also measures BW where the schedule has both BW and B (`costs.fused`); where `recompute` is given, be it
        {}, all stages at each of its levels and in full (`costs.levels`, among which `zb.plan(costs, recompute="auto")` chooses); and where
        ranks divide the head, either algorithm, each part where it is: see `Costs.with_divided_head`.

        Raises `InputError` for less than 1 step, and for levels of stages that cannot run twice, and `PipelineError` as `step` does.
        """
        return profiling.profile(self._steps, self._lent(self._given(inputs, targets, kwargs))[0], steps, progress)

    @plays_steps
    def profile_layers(
        self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None, steps: int = 3, progress: Progress | None = None
    ) -> tuple[Layer, ...]:
        """What each part of a model that `zb.split` cut takes and holds for a microbatch, in the model's order, the same on every rank.

        Each rank runs its own parts, one by one, on the arguments that they have in a step. The loss counts to the last part. Where a
        block is cut inside, its parts are told. `zb.partition.layers_to_dict` makes of it what `zerobubble plan --layers` takes, and
        `zb.plan` a plan. Leaves nothing behind, and is called and raises as `profile`, and `InputError` for other stages.
        """
        return profile_layers(self._steps, self._lent(self._given(inputs, targets, kwargs))[0], steps, progress)

    @called_by_all
    def memory_forecast(self, costs: Costs) -> MemoryForecasts:
        """The most bytes that each rank holds in a `step`: its activations, as `costs` say, and its buffers of messages, told apart.

        `costs` are those of `profile`, so that messages have been as large as they will be. Of messages are counted what lies in shared
        memory, in rings into which the rank sends; other transports hold none for longer than a message takes, or do not tell. The same
        on every rank, and every rank must call it. Raises `InputError` for costs of other stages.
        """
        return self._steps.memory_forecast(costs)

    @plays_steps
    def describe(self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None) -> SplitReports:
        """How each stage splits its backward pass on this batch: how much of the weight gradients W does, and which B does, and why.

        Runs a step whose gradients and traces in buffers and the random state are taken back, as `profile` does. The same on every rank,
        and every rank must call it. Of the copies of a stage, the first rank's is told. Raises as `profile` does.
        """
        return profiling.describe(self._steps, self._lent(self._given(inputs, targets, kwargs))[0])

    @contextmanager
    def recording_optimizer(self) -> Iterator[None]:
        """Put what runs inside, the optimizer's step, into the timeline of the last `step`."""
        with self._session.guard.during("in recording_optimizer"):
            self._steps.before_optimizer()
        with self._steps.record_optimizer():
            yield

    @called_by_all
    def timeline(self) -> Timeline:
        """What every rank did in the last `step`, with the bytes held if it was metered. Every rank must call it.

        Its marks tell of messages, if the step was `recording`, and of the optimizer's step if it ran in `recording_optimizer` or is a
        `PostValidation`'s. Of a schedule without backward passes it is the last `eval_step`.
        """
        with self._session.guard.during("while gathering a timeline"):
            return self._steps.timeline()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should hold of the pipeline beside the modules and the optimizer: the number of steps, the seed by which
        stages draw, and the hooks' states.

        It is this rank's. An optimizer's step still to be validated is made final first.
        """
        return self._steps.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; every rank must. Raises `InputError` for the state of a hook that is not attached."""
        self._steps.load_state_dict(state)

    @property
    def recording(self) -> bool:
        """Whether the times of messages are recorded for `timeline`; on at first."""
        return self._steps.recording

    @recording.setter
    def recording(self, value: bool) -> None:
        self._steps.recording = value

    @property
    def metering(self) -> bool:
        """Whether steps count the bytes held for backward, for `timeline`; off at first."""
        return self._steps.measures_memory

    @metering.setter
    def metering(self, value: bool) -> None:
        self._steps.measures_memory = value

    def close(self) -> None:
        """Close the pipeline's connections; every rank should. Later use raises `PipelineError`.

        An optimizer's step still to be validated is made final first, and a checkpoint still being written is completed; where that fails,
        `InputError` is raised on every rank, once the pipeline is closed.
        """
        if self._session.guard.closed is None:
            self.surviving(lambda: None)  # others may be left in the call before this one, in which a rank has gone
            is_refused = True
            try:
                with self._session.guard.during("while closing the pipeline"):
                    is_refused = False
                    self._steps.before_close()
            except InputError as error:
                if not is_refused:  # else another thread uses the pipeline, and goes on
                    self._session.guard.close_after(error, CLOSED)
                raise
            self._session.guard.close(CLOSED)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, failed: BaseException | None, trace: object) -> None:
        if failed is None:
            self.close()
        elif self._session.guard.closed is None:
            self._session.guard.close_after(failed, CLOSED)
