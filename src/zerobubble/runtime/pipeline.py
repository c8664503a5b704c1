"""`Pipeline`, the user's entry point: stages, a schedule and a loss function in, training steps with the gradients of one device out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerobubble.arguments import Wanted, optional, require, takes, wrong
from zerobubble.costs import Costs
from zerobubble.display import clipped
from zerobubble.error_reports.uncaught import explain_none, report_exit
from zerobubble.errors import InputError, PipelineError
from zerobubble.ir import Schedule
from zerobubble.lowering import RankGathers
from zerobubble.microbatch_order import with_numbers
from zerobubble.offload import HostLink, RankOffloads
from zerobubble.partition import Layer
from zerobubble.runtime.calls import collective_call, counted_collective_call, repeated_by_survivors
from zerobubble.runtime.executor.overrides import Overlap, Pace
from zerobubble.runtime.failure.guard import CLOSED
from zerobubble.runtime.hooks import clip
from zerobubble.runtime.hooks.gradient_scaling import Unscaling
from zerobubble.runtime.hooks.optimizer_watch import watch_optimizers
from zerobubble.runtime.hooks.replicas import BUCKET_BYTES
from zerobubble.runtime.hooks.shared_parameters import Tied
from zerobubble.runtime.hooks.torch_calls import refuse_calls_for_one_rank
from zerobubble.runtime.measure.profile import Progress
from zerobubble.runtime.module_calls import RefusesModuleCalls, StageModules, called_first
from zerobubble.runtime.options import LOSS, TIMEOUT, PipelineOptions, Plays
from zerobubble.runtime.session import Session, connect
from zerobubble.runtime.split.report import SplitReports
from zerobubble.runtime.stage.levels import GivenLevels
from zerobubble.runtime.stage.rank_stages import Build
from zerobubble.runtime.starting import attach_first, runner_of
from zerobubble.runtime.step import profiling
from zerobubble.runtime.step.batch import OUTPUTS, BatchDims, StepInputs, join_outputs
from zerobubble.runtime.step.captured_step import WITHOUT_STEP
from zerobubble.runtime.step.hook import StepHook
from zerobubble.runtime.step.loss import LossFunction, LossWeight, OnLoss
from zerobubble.runtime.step.memory_forecast import MemoryForecasts
from zerobubble.runtime.step.optimizers import Optimizers, optimizers_in
from zerobubble.runtime.step.ordering import CostOf
from zerobubble.runtime.step.outputs import OutputFunction
from zerobubble.runtime.step.planner import Switch
from zerobubble.runtime.step.playing import evaluate, outputs_on_all_ranks, train
from zerobubble.runtime.step.profiling import profile_layers
from zerobubble.runtime.survival.survivors import Survival
from zerobubble.runtime.transport.choice import AUTO
from zerobubble.runtime.transport.endpoint import Endpoint
from zerobubble.runtime.transport.transport import Carrier
from zerobubble.runtime.values.buffers import making_tensors
from zerobubble.runtime.without_weights import refuse_copy, refused
from zerobubble.timeline import Timeline
from zerobubble.units import counted, named

R = TypeVar("R")
_RECEIVERS = Wanted("'last' or 'all'", lambda value: value in ("last", "all"))


@takes()
class Pipeline(RefusesModuleCalls):
    """Trains a model split into stages over the ranks of a process group, with the gradients of one device.

    Every rank creates one, after `torch.distributed.init_process_group`, with the same arguments except for its own modules:

        # train.py: run it with `torchrun --nproc-per-node 2 train.py`
        import torch
        import zerobubble as zb
        from torch import distributed as dist, nn

        dist.init_process_group("gloo")  # "nccl" on GPUs, and device="cuda" for the pipeline
        torch.manual_seed(0)  # the same weights on every rank
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        inputs, targets = torch.rand(8, 16), torch.rand(8, 16)
        stages = zb.split(model, example=inputs[:2])
        with zb.Pipeline(stages, "zb-h1", num_microbatches=4, loss_fn=nn.functional.mse_loss) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters())
            for _ in range(3):
                loss = pipe.step(inputs, targets)
                optimizer.step()
                optimizer.zero_grad()
        dist.destroy_process_group()

    What to train:
        build_or_modules: A function `build(stage_index, num_stages) -> nn.Module`, or this rank's modules in ascending order of stages.
            Each call of `build` is seeded by this rank's seed and the stage. Stages draw random numbers by rank 0's (docs/equivalence.md).
        schedule: The name of a published schedule ("zb-h1"); a `Schedule` or a plan, each for one number of microbatches; a function
            `(num_ranks, num_microbatches) -> Schedule`; or `zb.Auto(...)` ("auto" for short), which measures the first steps and plans. A
            schedule without backward passes, such as "forward-only", supports `eval_step` only.
        num_microbatches: The number of parts into which a batch is split. `step` may use another number if the schedule allows it.
        loss_fn: `loss_fn(output, target)` returns the mean loss of one microbatch, a tensor with one element. The parameters of an
            `nn.Module` belong to the last stage. Or `zb.nn.DividedHead(...)`, if the schedule divides the head over ranks.
        loss_weight: `loss_weight(target)` returns the weight of a microbatch in the mean, such as the number of tokens that count. By
            default it is the number of samples.
        slices: The number of slices into which each microbatch is cut along its sequence, dimension 1 of inputs and targets, for few long
            sequences (docs/long-sequences.md). By default that of a plan or `Schedule`, otherwise 1. The schedule must support it, and
            attention must be causal and join slices, as `zb.nn.CausalAttention` does.
        batch_dims: By name, the batch dimension of inputs, targets and kwargs if it is not the first; None if all microbatches share one:
            `{"position_ids": 1, "mask": None}`. With `"outputs"`, that of the outputs that `eval_step` joins.
        scale: What is scaled for the mean over microbatches: each "loss" before its backward pass, or the summed "gradients", which is
            required by autograd functions that inject the gradient of an auxiliary loss (docs/losses.md). With "none", losses and
            gradients are sums over microbatches, for losses that are already divided.
        order_by: The cost of microbatches, if they differ: "tokens", or `order_by(microbatch)`, called on the first stage's rank. Each
            training step takes microbatches in the order that makes it shortest. Inputs and outputs keep the order of the data.
        tied: Groups of tied parameters as (stage, name): `[(0, "tok.weight"), (3, "head.weight")]`. A name may also be that of a module in
            the stage, "" for the stage itself. They start with the values of the first in their group, `step` leaves the sum of all their
            gradients in each, and a norm counts them once.

    How backward passes run:
        split: How B and W are split, for all stages, or by index for some of this rank's (others are "deferred"): "deferred" (eager; layers
            defer their weight gradients to W), "graph" (the traced graph of the stage is split), "compiled" (and its parts are compiled),
            or "whole" (B does everything).
        cuda_graphs: Whether passes of stages split by their graph are captured as CUDA graphs and replayed; or "step" for each rank's whole
            step with its messages (docs/graph-split.md).
        main_grad: A dtype such as torch.float32 in which gradients are summed, in `parameter.main_grad`; `.grad` then stays None.
        overlap: `overlap(first, second)` runs the two passes of an overlapped step (DualPipe), each an `Overlapped`. By default they run
            one after the other.
        recompute: The modules that R passes recompute, by level: `{"selective": ["*.attn"]}`, with patterns of names, classes of modules or
            a function `(name, module) -> bool`, for all stages or in a dict by stage. Everything else is saved. A plan has the level of
            each stage; R passes of other schedules use the one given. "full" always exists and recomputes everything.
        offload: What each rank copies to host memory until its backward pass, from `zb.offload.plan_offloads` for this schedule. A plan
            with a host, given as the schedule, has its own.

    Ranks and messages:
        device: Where this rank's stages go before the first step, such as "cuda" for the current GPU; by default they stay where they are.
            Of a model given to `zb.split`, only this rank's stages and what runs on every stage are moved. Batches are yours to move.
        group: The process group whose ranks form the pipeline; all ranks by default.
        mesh: Instead of a group, a `DeviceMesh` of all ranks that train together, with named dimensions in any order: "pp" is the pipeline.
            Along "dp", "dp_replicate", "dp_shard", "cp" and "ep" ranks get other shares of the batch and start with the values of the
            first; `step` returns the mean loss of the whole batch, and leaves its gradients. Along "ep" each rank has other experts, along
            "tp" parts.
        gathered_bytes: The memory of a rank for gathered weights of stages sharded by FSDP2; by default that of the plan, or else each
            stage is gathered once per step. With less memory, stages are freed and gathered more often; `pipe.gathers` shows when.
        bucket_bytes: The bytes of gradients that are summed over replicas together.
        timeout: The seconds that a rank waits for a message before all ranks raise `PipelineError`.
        transport: Carries tensors between ranks: "gloo", "nccl", "shared-memory" or "staged"; "auto" is the fastest between all ranks, and
            `pipe.transport` shows which and why. A `zb.transport.Endpoint`, this rank's end of your own transport, carries everything and
            needs no process group.
        survive: Whether to continue without a lost rank, if another one holds its stages. The remaining ranks repeat the call in which it
            was lost, and share its work. Every rank then gets the inputs, targets and kwargs of its replica.

    Hooks and measurements:
        hooks: `StepHook`s, called in every training step in this order: `zb.hooks.Telemetry`, your own.
        on_loss: `on_loss(microbatch, loss)` is called with each loss where it is computed, without waiting for other ranks.
        pace: `Costs` whose times every training pass is stretched to. This shows the effect of a schedule if ranks share cores.
        link: The `zb.offload.HostLink` whose times offload copies are stretched to, on CPUs, where host and device share memory.

    Copies of a stage, on the routes of a bidirectional schedule, start equal, and `step` leaves the sum of their gradients in each.

    Raises `InputError` on every rank if an argument is wrong on any rank, or if arguments differ.
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
        cuda_graphs: bool | str = False,
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
        device: torch.device | str | None = None,
        slices: int | None = None,
    ) -> None:
        options = PipelineOptions(**{name: value for name, value in locals().items() if name != "self"})
        session = connect(options)
        self._num_ranks = session.peers.size
        self.rank = session.peers.rank
        """This rank's number in the pipeline, from 0."""
        self.modules = StageModules(session.setup.stages.modules)
        """This rank's modules, a dict by stage."""
        self.device = session.setup.stages.device
        """The device of this rank's stages, where batches and targets must be."""
        self.pace = Pace(pace) if pace is not None else None
        """The times that passes are stretched to; None without `pace`."""
        self._options = options
        self._survival = Survival(session) if survive else None
        self._play(session)

    def __repr__(self) -> str:
        schedule, split = self.schedule, self._options.split
        stages = ", ".join(map(str, sorted(self.modules)))
        ways = split if isinstance(split, str) else ", ".join(f"{way} in stage {stage}" for stage, way in split.items())
        microbatches = counted(schedule.whole_microbatches, "microbatch")
        microbatches += f" of {schedule.slices} slices" if schedule.slices > 1 else ""
        lost = "" if self._survival is None or not self._survival.lost else f", without {named('rank', sorted(self._survival.lost))}"
        closed = "" if self._session.guard.closed is None else ", closed"
        return clipped(
            f"<Pipeline {schedule.name}: rank {self.rank} of {self._num_ranks}{lost}, stage{'s' * (len(self.modules) > 1)} {stages} of "
            f"{schedule.num_stages}, {microbatches}, split {ways}, on {self.device}{closed}>",
            ">",
        )

    def _play(self, session: Session) -> None:
        """Prepares the steps of `session`."""
        self._session = session
        session.guard.schedule = session.setup.schedule.name
        with session.guard.during("while making its programs"):
            self._steps = runner_of(session, self.pace)
        self._unscaling = Unscaling(self._steps)
        session.guard.on_closing(self._steps.close)
        self._auto = session.setup.planner
        attach_first(session, self._steps)
        self._unwatch_optimizers = watch_optimizers(self._steps)
        refuse_calls_for_one_rank()

    def _inputs(
        self, inputs: Any, targets: Any, kwargs: Any, num_microbatches: int | None = None, scaler: torch.amp.GradScaler | None = None
    ) -> tuple[StepInputs, int | None]:
        """Returns the inputs of a step and its number of microbatches. Survivors of a lost rank play those of all replicas."""
        step_inputs = StepInputs(inputs, targets, kwargs, self._options.batch_dims or {}, scaler)
        if self._survival is None:
            return step_inputs, num_microbatches
        return self._survival.lend(step_inputs, num_microbatches or self._options.num_microbatches, self._session)

    def _with_recovery(self, call: Callable[[], R], *, adds_gradients: bool = False) -> R:
        """Returns the result of `call`, such as `zb.save`, which the survivors repeat if a rank is lost and the pipeline survives that."""
        if self._survival is None:
            return call()
        self._steps.settle()
        recover = partial(self._recover, self._steps.num_steps)
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
        self._steps.take_over(before if repeats else steps.num_steps, steps.rng.seed)
        return repeats

    @repeated_by_survivors
    @counted_collective_call
    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Any = None,
        num_microbatches: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Runs forward and backward of one batch: adds gradients to `.grad` and returns the mean loss on every rank.

        The backward pass has run when `step` returns. Do not call `backward` on the loss: it is a number without a graph.

        Args:
            inputs: Arguments of the first stage, needed on its rank: a tensor, a tuple of arguments or a dict of named ones. Tensors have
                the batch in dimension 0, or where `batch_dims` says, and are split, with larger microbatches first. All other values, and
                tensors of size 1 there, go to every microbatch. A list holds the microbatches themselves, of any shapes.
            targets: Targets in the same forms, needed on the rank of the last stage. A bidirectional schedule has one such rank per route.
                Ranks that are given inputs and targets need the same batch; the first step warns if the first and the last have others.
            kwargs: Named arguments for stages of this rank. Tensors of the batch size are split; a list has a dict for each microbatch.
            num_microbatches: Another number of microbatches, for which the named schedule is played.
            scaler: Scales gradients; call `unscale_` after the step.

        Any given tensor that requires a gradient gets it after the last pass, on the rank that gives it.

        Raises `InputError`, and the pipeline stays open, if no rank can make the call: for an unknown argument, a schedule without backward
        passes or without this number of microbatches, inputs or targets that cannot be split, inside `torch.no_grad()`, and if another
        thread uses the pipeline; also after a step in which no loss requires a gradient. Raises `PipelineError` on every rank if any rank
        fails, or is called differently from the others. Targets and `kwargs` of another batch size than the inputs are such a failure,
        which closes the pipeline, unless the first rank gets them, too: other ranks compare sizes once the step has begun. So are targets
        that cannot be split if the first rank was not given any.
        """
        with self._steps.refusals.of_call():
            require("scaler", scaler, optional(torch.amp.GradScaler))
        return train(self._steps, *self._inputs(inputs, targets, kwargs, num_microbatches, scaler))

    def order_ahead(self, inputs: list[Any]) -> None:
        """Orders `inputs`, the list of microbatches of a later `step`, and plans their passes in a thread until then; see `played`.

        Only the rank of the first stage needs to call it. A step with other microbatches orders them itself and plays the passes of
        `schedule`. Raises `InputError` for costs that are not numbers above 0, for anything but a list of microbatches, and without
        `order_by`.
        """
        if self._options.order_by is None:
            raise InputError(
                "order_ahead is for pipelines that order microbatches", remedy="give order_by to Pipeline, or leave order_ahead out"
            )
        if not isinstance(inputs, list):
            raise wrong("inputs", inputs, "the list of microbatches of the next step", call="order_ahead")
        if self._steps.ordering is not None:
            self._steps.ordering.begin(self.schedule, inputs, self._steps.programs.compile_ahead)

    @repeated_by_survivors
    @counted_collective_call
    @making_tensors()
    def eval_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Any = None,
        num_microbatches: int | None = None,
        output_fn: OutputFunction | None = None,
    ) -> tuple[Tensor | None, Any]:
        """Runs forward of one batch, in the forms of `step`, in evaluation mode. Returns the mean loss and the outputs.

        Args:
            inputs, kwargs, num_microbatches: As in `step`.
            targets: Targets, as in `step`; None for outputs alone.
            output_fn: As in `predict`.

        The loss is None without targets, and otherwise the same on every rank. The outputs are those of `predict`, on the rank of the last
        stage, and None elsewhere.
        """
        self._steps.settle()
        loss, outputs, sizes = evaluate(self._steps, *self._inputs(inputs, targets, kwargs, num_microbatches), output_fn)
        if loss is None:
            explain_none("loss", "eval_step(inputs) returns no loss: give it targets, too")
        return loss, self._joined(outputs, sizes, "eval_step")

    @repeated_by_survivors
    @counted_collective_call
    @making_tensors()
    def predict(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        output_fn: OutputFunction | None = None,
        kwargs: Any = None,
        num_microbatches: int | None = None,
        to: str = "last",
    ) -> Any:
        """Runs forward of one batch, in the forms of `step`, in evaluation mode. Returns the outputs, or what `output_fn` makes of them.

        Log-probabilities of labels, where the logits of one microbatch at a time are in memory:

            def log_probs(output, labels):
                return torch.gather(output.logits.log_softmax(-1), -1, labels[..., None])[..., 0]

            scores = pipe.predict(tokens, labels, output_fn=log_probs, to="all")

        Args:
            inputs, kwargs, num_microbatches: As in `step`.
            targets: Second arguments of `output_fn`, in the forms of `step`. No loss is computed.
            output_fn: `output_fn(output)`, or `output_fn(output, target)` if there are targets. It is called for each microbatch, on the
                rank of the last stage and without gradients, and only what it returns is kept.
            to: "last" for the rank of the last stage, None elsewhere; "all" for all ranks, which must be tensors, numbers and text.

        The outputs of all microbatches are joined in the order of the data: tensors are concatenated along the batch, which is in dimension
        0, in the one that `batch_dims` has for "outputs", or in the only one with the size of the microbatch; those without dimensions are
        stacked, equal constants and one object kept once, and anything else becomes a list with one item each; tuples, dicts and
        dataclasses are joined item by item. Outputs of a single microbatch are returned as they are. A bidirectional schedule runs its
        first route. Raises like `step`, and `InputError` for another `to`.
        """
        self._steps.settle()
        with self._steps.refusals.of_call():
            require("to", to, _RECEIVERS)
        _, outputs, sizes = evaluate(self._steps, *self._inputs(inputs, targets, kwargs, num_microbatches), output_fn, has_loss=False)
        joined = self._joined(outputs, sizes, "predict")
        return joined if to == "last" else outputs_on_all_ranks(self._steps, joined)

    def _joined(self, outputs: list[Any] | None, sizes: Sequence[int], method: str) -> Any:
        """Joins what is kept of the outputs of microbatches; None if this rank has none."""
        if outputs is None:
            explain_none("outputs", f"{method} returns None for the outputs on rank {self.rank}: the rank of the last stage has them")
            return None
        dims = self._options.batch_dims or {}
        return join_outputs(outputs, sizes, dims.get(OUTPUTS) or 0, takes_first=dims.get(OUTPUTS) == 0)

    @property
    def schedule(self) -> Schedule:
        """The current schedule."""
        return self._steps.schedule

    @property
    def played(self) -> Schedule | None:
        """The schedule of the last `step`, with the order and passes from `order_by`, on every rank; None before the first step."""
        played = self._steps.played
        return None if played is None else with_numbers(*played)

    @property
    def plan(self) -> Any:
        """The `zb.planning.Plan` of `schedule=zb.Auto(...)`, with its costs and bound; None before there is one."""
        return None if self._auto is None else self._auto.plan

    @property
    def switches(self) -> tuple[Switch, ...]:
        """The changes of schedule that `zb.Auto` has made, with what each cost; a change counts from the second step after it."""
        return () if self._auto is None else tuple(self._auto.switches)

    @property
    def gathers(self) -> RankGathers:
        """The all-gathers of this rank in a training step, for weights sharded by FSDP2, by step of its row, counted from 0."""
        return self._steps.programs.now.executor.gathers.plan

    @property
    def transport(self) -> Carrier:
        """The transport of tensors between ranks: its `name`, `why` it was chosen, and the bytes that it holds on this rank."""
        return self._session.transport.carrier

    @property
    def losses(self) -> Tensor | None:
        """The loss of each microbatch of the last step including what stages added, on every rank; None before one and without targets."""
        return self._steps.losses.losses

    @property
    def added_losses(self) -> dict[str, Tensor]:
        """The parts of the last step's loss that stages added with `zb.nn.add_loss`, by name, as scalar tensors on every rank."""
        return dict(self._steps.losses.added)

    @called_first
    def parameters(self) -> Iterator[nn.Parameter]:
        """Returns the parameters of this rank's stages, each once.

        If none of them requires a gradient, an empty parameter that does comes last, because torch refuses an optimizer without parameters.
        """
        return self._steps.parameters()

    def attach(self, hook: StepHook) -> None:
        """Calls `hook` from the next training step on, after those already attached.

        Every rank must attach hooks that communicate, in the same order. Raises `InputError` if it is not a `StepHook`, if it is already
        attached, or if the pipeline has `survive=True`. Errors of its `on_attach` are passed on.
        """
        with self._session.guard.during("in attach"), self._session.guard.agreed_errors():
            if self._survival is not None:
                raise InputError(
                    "a pipeline with survive=True has no hooks, because they would end with a rank", remedy="leave out one of the two"
                )
            if self._options.captures_steps:
                raise InputError("a captured step calls no hook between passes", remedy=WITHOUT_STEP)
            self._steps.attach(hook)

    @collective_call
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clips the gradients of all ranks by the norm of the whole model, like `torch.nn.utils.clip_grad_norm_`, and returns the norm.

        Args:
            max_norm: The norm down to which gradients are scaled; smaller gradients are unchanged.
            norm_type: The order of the norm; `float("inf")` for the largest absolute value.
            error_if_nonfinite: Whether a norm that is not finite leaves gradients unchanged and raises `InputError` on every rank, with the
                stages, parameters and microbatches that it comes from. By default it scales gradients as in torch.

        All ranks must call it. A parameter counts once, even if several stages share it. Raises `PipelineError` on every rank if any rank
        fails.
        """
        total = self._norm_to_clip_by(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        with self._session.guard.during("while clipping gradients"):
            clip.scale(self._steps.parameters(), max_norm, total, self._steps.gradients)
        return total

    @repeated_by_survivors
    def _norm_to_clip_by(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Returns the norm to clip by; all ranks know it before any of them scales its gradients."""
        with self._session.guard.during("in clip_grad_norm_"):
            self._steps.settle()
            self._steps.before_optimizer(ranks_meet=True)
            return clip.norm_to_clip_by(self._steps, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, losses=self.losses)

    @collective_call
    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: Optimizers) -> None:
        """Unscales the gradients of `optimizer`, which is this rank's or a list of them, by `scaler`. Every rank must call it.

        Each rank has a scaler of its own, created with the same arguments. If a gradient is not finite on any rank, `scaler.step` skips the
        step on every rank, for all optimizers of the list, and `scaler.update` lowers the scale on every rank. Raises `PipelineError` on
        every rank if any rank fails, if `step` did not get the scaler, if scales differ, or if only some scalers are enabled.
        """
        self._unscaling.unscale(scaler, optimizers_in(optimizer))

    @counted_collective_call
    def profile(
        self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None, steps: int = 3, progress: Progress | None = None
    ) -> Costs:
        """Measures times and bytes of the passes and messages of each stage. Every rank must call it and gets the same `Costs`.

        Runs one step that warms up and counts bytes, then `steps` that are timed. Microbatches go through the model one by one, so passes
        and messages are measured undisturbed, B separate from W, in the memory of one microbatch. Times are medians over microbatches and
        steps. Afterwards, gradients, buffers, random states, the Python state of stages and `losses` are as before, down to the last bit;
        neither `on_loss` nor hooks are called.

        Args:
            inputs, targets, kwargs: As in `step`.
            steps: The number of timed steps.
            progress: `progress(done, total)` is called after every step; by default, rank 0 shows a progress bar.

        The same number of steps each also measures BW, if the schedule has both BW and B (`costs.fused`); all stages at each level of
        `recompute` and in full, if it is given, even as {} (`costs.levels`, for `zb.plan(costs, recompute="auto")`); and both algorithms,
        if ranks divide the head, with each part on its rank (`Costs.with_divided_head`).

        Raises `InputError` for less than 1 step, for levels of stages that cannot run twice, and for a stage whose state cannot be put
        back, such as an iterator; `PipelineError` like `step`.
        """
        return profiling.profile(self._steps, self._inputs(inputs, targets, kwargs)[0], steps, progress)

    @counted_collective_call
    def profile_layers(
        self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None, steps: int = 3, progress: Progress | None = None
    ) -> tuple[Layer, ...]:
        """Measures each part of a model split by `zb.split` for one microbatch; returns them in the model's order, the same on every rank.

        Each rank runs its own parts, one by one, with the arguments that they get in a step. The loss counts as part of the last one. A
        block that is split inside is reported by its parts. `zb.partition.layers_to_dict` converts them for `zerobubble plan --layers`, and
        `zb.plan` plans with them. Like `profile`, it changes nothing and every rank must call it. Raises like `profile`, and `InputError`
        for other stages.

        Args:
            inputs, targets, kwargs: As in `step`.
            steps: How often each part is timed.
            progress: As in `profile`.
        """
        return profile_layers(self._steps, self._inputs(inputs, targets, kwargs)[0], steps, progress)

    @collective_call
    def memory_forecast(self, costs: Costs) -> MemoryForecasts:
        """Returns the peak bytes that each rank holds in a `step`: activations according to `costs`, and buffers for messages, separately.

        `costs` must come from `profile`, after which messages have their final sizes. Only buffers of rings in shared memory are counted;
        other transports hold none beyond a message, or do not report them. Every rank must call it and gets the same. Raises `InputError`
        for costs of other stages.
        """
        now = self._steps.programs.now
        return self._steps.forecast_memory(now.schedule, now.executor.program, costs)

    @counted_collective_call
    def describe(self, inputs: Any = None, targets: Any = None, *, kwargs: Any = None) -> SplitReports:
        """Reports how each stage splits its backward pass on this batch: the share of weight gradients in W, and what remains in B and why.

        Runs a step and restores what it changes, as `profile` does. Every rank must call it and gets the same reports. For copies of a
        stage, the report is that of the first rank. Raises like `profile`.

        Args:
            inputs, targets, kwargs: As in `step`.
        """
        return profiling.describe(self._steps, self._inputs(inputs, targets, kwargs)[0])

    @contextmanager
    def recording_optimizer(self) -> Iterator[None]:
        """A context whose time is recorded in the timeline of the last `step` as the step of the optimizer."""
        with self._session.guard.during("in recording_optimizer"):
            self._steps.before_optimizer()
        with self._steps.last.records.noting_optimizer():
            yield

    @collective_call
    def timeline(self) -> Timeline:
        """Returns what every rank did in the last `step`, with the bytes held if it was metered. Every rank must call it.

        Marks show messages, if the step was `recording`, and the optimizer's step if it ran in `recording_optimizer` or a `PostValidation`.
        For a schedule without backward passes, it is the last `eval_step`.
        """
        with self._session.guard.during("while gathering a timeline"):
            return self._steps.timeline()

    def step_state(self) -> dict[str, Any]:
        """Returns this rank's number of steps, random seed and states of hooks, not its weights. Pending optimizer steps are made final."""
        return self._steps.state_dict()

    def load_step_state(self, state: Mapping[str, Any]) -> None:
        """Restores the `state` that `step_state` returned, on every rank. Raises `InputError` for that of a hook that is not attached."""
        self._steps.load_state_dict(state)

    state_dict, load_state_dict = refused("state_dict", "save"), refused("load_state_dict", "load")
    __deepcopy__ = __reduce_ex__ = refuse_copy

    @property
    def recording(self) -> bool:
        """Whether the times of messages are recorded for `timeline`; True by default."""
        return self._steps.recording

    @recording.setter
    def recording(self, value: bool) -> None:
        self._steps.recording = value

    @property
    def metering(self) -> bool:
        """Whether steps record the bytes held for backward, for `timeline`; False by default."""
        return self._steps.measures_memory

    @metering.setter
    def metering(self, value: bool) -> None:
        self._steps.measures_memory = value

    def close(self) -> None:
        """Closes the connections of the pipeline; every rank should call it. Later calls raise `PipelineError`.

        Pending steps of optimizers are made final first, and a checkpoint in progress is completed. If that fails, every rank raises
        `InputError` once the pipeline is closed.
        """
        if self._session.guard.closed is None:
            self._with_recovery(lambda: None)  # other ranks may still repeat the previous call, in which a rank was lost
            is_refused = True
            try:
                with self._session.guard.during("while closing the pipeline"):
                    is_refused = False
                    self._steps.step_hooks.call_all("settle")
                    self._steps.step_hooks.call_all("before_close")
            except InputError as error:
                if not is_refused:  # otherwise another thread uses the pipeline, and continues
                    self._session.guard.close_after(error, CLOSED)
                raise
            self._session.guard.close(CLOSED)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, failed: BaseException | None, trace: object) -> None:
        if failed is None:
            self.close()
        elif self._session.guard.closed is None:
            if isinstance(failed, SystemExit):
                report_exit(failed)
            self._session.guard.close_after(failed, CLOSED)
