"""Divides a model over the GPUs of a cluster: bounds all ways, and simulates as many as needed to prove the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any

from zerobubble.arguments import BYTES, WHOLE, either, instance, optional, takes
from zerobubble.cost_model.assumptions import main_assumptions_of
from zerobubble.cost_model.candidates import MOST_SEQUENCES, MOST_STAGES_OF_A_RANK, SCHEDULES, DivisionCandidate
from zerobubble.cost_model.configuration import known_model
from zerobubble.cost_model.estimate import Estimate
from zerobubble.cost_model.gpus import GPU, known_gpu
from zerobubble.cost_model.kernels import Efficiency
from zerobubble.cost_model.models import Model
from zerobubble.cost_model.remedies import MARGIN, DivideQuestion, PlayedMemory, options_that_fit
from zerobubble.cost_model.setting import RECOMPUTE, Setting
from zerobubble.cost_model.step import LONG, Shapes, StepEstimate
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Schedule
from zerobubble.units import as_bytes, show_bytes, show_percent

LEFT = f"{100 * MARGIN:g} %"
DivideProgress = Callable[[int, int, "Division | None"], object]
"""Called before each simulated step with the number of ways considered, the total, and the best result so far."""


@takes()
@dataclass(frozen=True, slots=True, repr=False)
class Division(Displayed):
    """A way to divide a model over GPUs, with the `estimate` of its stages and of a `step` of `num_microbatches`.

    `schedule` is the simulated one. A long step repeats its middle: `repeated` microbatches per rank were not simulated. `least_seconds` is
    a lower bound of the step time, from the work of its ranks.
    """

    estimate: Estimate
    schedule: Schedule
    num_microbatches: int
    step: StepEstimate
    repeated: int
    least_seconds: float

    @property
    def setting(self) -> Setting:
        return self.estimate.setting

    @property
    def needed_bytes(self) -> int:
        """The bytes of the fullest GPU."""
        return max(self.step.rank_bytes)

    @property
    def way(self) -> tuple[object, ...]:
        """The division of the model, regardless of the schedule and the stages per rank."""
        here = self.setting
        return here.tp, here.cp, here.ep, here.pp, here.dp, here.microbatch, here.recompute

    @property
    def call(self) -> str:
        """The call of `Pipeline` that trains this way; empty if the model's own code must divide layers, sequences or experts."""
        here, count = self.setting, self.num_microbatches
        if max(here.tp, here.cp, here.ep) > 1:
            return ""
        stages = f", stages_per_rank={here.v}" if here.v > 2 else ""
        schedule = f"zb.make({self.step.schedule!r}, {here.pp}, {count}{stages})".replace("'", '"')
        shape = f'({here.dp}, {here.pp}), mesh_dim_names=("dp", "pp")'
        mesh = f', mesh=init_device_mesh("cuda", {shape})' if here.dp > 1 else ""
        return f"zb.Pipeline(zb.split(model), {schedule}, {count}, loss_fn{mesh})"

    def to_dict(self) -> dict[str, Any]:
        """The division of the model, and the time and memory of the step."""
        names = ("tp", "cp", "ep", "pp", "v", "dp", "microbatch", "recompute")
        return {name: getattr(self.setting, name) for name in names} | {
            "schedule": self.step.schedule,
            "call": self.call,
            "num_microbatches": self.num_microbatches,
            "layers": list(self.estimate.layers),
            "seconds": self.step.seconds,
            "least_seconds": self.least_seconds,
            "tokens_per_second": self.step.tokens_per_second,
            "flops_per_gpu": self.step.flops_per_gpu,
            "utilization": self.step.utilization,
            "rank_bytes": list(self.step.rank_bytes),
            "rank_activations": list(self.step.rank_activations),
        }

    def _summary(self) -> str:
        here = self.setting
        shape = (
            f"tp {here.tp}, cp {here.cp}, ep {here.ep}, pp {here.pp} x {here.v}, dp {here.dp}, microbatch {here.microbatch}, "
            f"recompute {here.recompute}"
        )
        figures = f"{self.step.seconds:.4g} s, {show_percent(self.step.utilization)}, {show_bytes(max(self.step.rank_bytes))}"
        return f"{shape}, {self.step.schedule}: {figures}"


@dataclass(frozen=True, slots=True, repr=False)
class Divisions(Displayed):
    """The fastest ways to divide a model over GPUs, best first, each with its best schedule.

    Of the `ways` considered, `too_large` exceed `memory_bytes`, `simulated` were simulated, and lower bounds prove that the others are
    slower than the last of `choices`. A step has `batch` sequences. If `pipeline_only`, only ways without tensor, context and expert
    parallelism were considered.
    """

    choices: tuple[Division, ...]
    batch: int
    memory_bytes: int
    ways: int
    too_large: int
    simulated: int
    pipeline_only: bool = False

    @property
    def best(self) -> Division:
        return self.choices[0]

    @property
    def needed_bytes(self) -> int:
        """The bytes of the fullest GPU in the best way."""
        return self.best.needed_bytes

    @property
    def left_bytes(self) -> int:
        """The bytes of the fullest GPU in the best way that are left for what estimates do not count."""
        return self.memory_bytes - self.needed_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the best way leaves less than a tenth of the memory for what estimates do not count, so that it may not fit."""
        return not self._is_roomy(self.best)

    def _is_roomy(self, choice: Division) -> bool:
        return choice.needed_bytes <= (1 - MARGIN) * self.memory_bytes

    @property
    def fit(self) -> str:
        """Returns a sentence that says whether the model fits, with the memory of the fullest GPU and what it leaves."""
        place = self.fitting or 1
        needed = self.choices[place - 1].needed_bytes
        taken = f"{show_bytes(needed)} of {show_bytes(self.memory_bytes)} on the fullest GPU in "
        taken += "the fastest way" if place == 1 else f"way {place} of the table"
        free = self.memory_bytes - needed
        left = f"{show_bytes(free)} ({show_percent(free / self.memory_bytes)}) left"
        left += " for temporary memory of passes and fragmentation, which are not counted"
        if self.fitting is None:
            advice = f"none of these ways leaves {LEFT}; more GPUs or shorter sequences (--sequence) need less"
            return f"may not fit: {taken}, only {left}; {advice}"
        fastest = f"; the fastest way, {show_bytes(self.needed_bytes)}, may not fit" if self.is_tight else ""
        return f"fits: {taken}, {left}{fastest}"

    @property
    def fitting(self) -> int | None:
        """The place (from 1) of the fastest of `choices` that leaves a tenth of the memory; None if there is none."""
        return next((place for place, choice in enumerate(self.choices, start=1) if self._is_roomy(choice)), None)

    @property
    def too_long(self) -> str:
        """Returns a sentence if sequences exceed the positions in the model's configuration; else empty."""
        model = self.best.setting.model
        if model.positions is None or model.sequence <= model.positions:
            return ""
        positions = f"the {model.positions:,} positions (max_position_embeddings) of {model.name}"
        return f"Sequences of {model.sequence:,} tokens exceed {positions}, which was not made for them: give a shorter --sequence."

    @property
    def needs_own_code(self) -> str:
        """Returns a sentence if the best way divides layers, sequences or experts, which the model's own code must do; else empty."""
        here = self.best.setting
        counts = [f"{name} {getattr(here, name)}" for name in ("tp", "cp", "ep") if getattr(here, name) > 1]
        if not counts:
            return ""
        return (
            f"{' and '.join(counts)} of the fastest way must be in the model's own code: zb.split adds no tensor, context or expert "
            "parallelism. For an unchanged model, add --pipeline-only."
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Returns a sentence for each assumption about the best way, and about the search; `main_assumptions` are three of them."""
        groups = "tp, cp and ep 1, powers of two for" if self.pipeline_only else "powers of two for tp, cp, ep and"
        schedules = ", ".join(tried.name for tried in SCHEDULES)
        return (
            *self.best.estimate.assumptions,
            f"Search space: {groups} sequences per microbatch (up to {MOST_SEQUENCES}), every number of ranks, up "
            f"to {MOST_STAGES_OF_A_RANK} stages per rank, recompute {', '.join(RECOMPUTE)}, schedules {schedules}.",
            f"Steps of more than {LONG} microbatches per rank are simulated in part: their steady state repeats every p microbatches.",
            f"The memory limit of a GPU is {show_bytes(self.memory_bytes)}.",
        )

    @property
    def main_assumptions(self) -> tuple[str, ...]:
        """Returns the assumptions on memory and times that matter most."""
        return main_assumptions_of(self.best.setting)

    def to_dict(self) -> dict[str, Any]:
        """Returns the question, the method, all assumptions, and the choices, as text."""
        here = self.best.setting
        return {
            "model": here.model.name,
            "gpu": here.gpu.name,
            "gpus": here.gpus,
            "batch": self.batch,
            "precision": here.precision,
            "gradients": here.gradients,
            "pipeline_only": self.pipeline_only,
            "fsdp": here.shard_weights,
            "fits": True,
            "is_tight": self.is_tight,
            "fitting": self.fitting,
            "too_long": self.too_long,
            "needs_own_code": self.needs_own_code,
            "needed_bytes": self.needed_bytes,
            "left_bytes": self.left_bytes,
            "memory_bytes": self.memory_bytes,
            "ways": self.ways,
            "too_large": self.too_large,
            "simulated": self.simulated,
            "choices": [choice.to_dict() for choice in self.choices],
            "assumptions": list(self.assumptions),
        }

    def _summary(self) -> str:
        here, step = self.best.setting, self.best.step
        size = f"{self.batch:,} x {here.model.sequence:,} tokens"
        figures = f"{step.seconds:.4g} s for {size}, {show_percent(step.utilization)} of the peak FLOP/s"
        return f"of {here.model.name} over {here.gpus:,} {here.gpu.name}: {figures}, {self.ways:,} ways tried"

    @property
    def title(self) -> str:
        """The summary, as a heading."""
        return f"Divisions {self._summary()}"

    def table(self) -> str:
        """Returns the choices, one per line."""
        return "\n".join([HEADING, *map(_row, self.choices)])

    def _details(self) -> Iterator[str]:
        yield from self.table().splitlines()


HEADING = " tp  cp  ep  pp  v    dp  mb     m  recompute schedule           seconds  TFLOP/s      MFU    memory"
"""Heading of the table of choices."""
LEGEND = (
    "tp, cp, ep: GPUs that share a layer, a sequence, or the experts of a layer; pp, v: ranks and stages per rank; dp: replicas; mb: "
    "sequences per microbatch; m: microbatches of a replica; TFLOP/s: model FLOP/s of a GPU, and MFU their share of the data sheet; "
    "memory: of the GPU that holds most."
)
"""The meanings of its columns."""


def _row(choice: Division) -> str:
    here, step = choice.setting, choice.step
    shape = f"{here.tp:3}{here.cp:4}{here.ep:4}{here.pp:4}{here.v:3}{here.dp:6}{here.microbatch:4}{choice.num_microbatches:6}"
    figures = (
        f"{step.seconds:8.4g}{step.flops_per_gpu / 1e12:9.0f}{show_percent(step.utilization):>9}{show_bytes(max(step.rank_bytes)):>10}"
    )
    return f"{shape}  {here.recompute:<10}{step.schedule:<18}{figures}"


@takes(
    model=either(str, Model),
    gpu=either(str, GPU),
    gpus=WHOLE,
    batch=optional(WHOLE),
    precision=str,
    gradients=optional(str),
    overlap_tp=bool,
    pipeline_only=bool,
    fsdp=bool,
    memory=optional(BYTES),
    top=WHOLE,
    efficiency=instance(Efficiency),
)
@garbage_collection_paused()
def divide(
    model: str | Model,
    *,
    gpu: str | GPU,
    gpus: int,
    batch: int | None = None,
    precision: str = "bf16",
    gradients: str | None = None,
    overlap_tp: bool = False,
    pipeline_only: bool = False,
    fsdp: bool = False,
    memory: int | str | None = None,
    top: int = 10,
    efficiency: Efficiency = Efficiency(),  # noqa: B008 - frozen
    progress: DivideProgress | None = None,
) -> Divisions:
    """Finds the fastest ways to divide a model over GPUs, with schedule and recomputation, by estimated step times.

    Steps are simulated in the order of their lower bounds, until no other can be among the `top` fastest that fit into memory. Raises
    `InputError`, listing all faults, for an unknown model or GPU, for counts below 1, and if nothing fits.

    Arguments:
        model: a name of `MODELS`, a config.json of Transformers or a folder with one, or a `Model`.
        gpu: a name of `GPUS`, a file of `zerobubble doctor --measure`, or a `GPU`.
        gpus: number of GPUs.
        batch: sequences per step, over all replicas; by default that of the model's published training.
        precision: "bf16", or "fp8" for the products of linear layers.
        gradients: precision of weight gradients and their sums, "fp32" or "bf16"; by default "fp32", and with `pipeline_only` "bf16",
                    the precision of weights.
        overlap_tp: whether tensor-parallel communication overlaps with matrix products wherever possible.
        pipeline_only: whether only pipelines and their replicas are tried, as `zb.Pipeline` runs an unchanged model: tp, cp and ep
                    are 1, and each replica keeps the whole optimizer state.
        fsdp: whether FSDP2 shards weights, gradients and the optimizer state over the replicas of `pipeline_only`.
        memory: memory limit per GPU, in bytes or as text such as "70GB"; by default all of its memory.
        top: number of results.
        efficiency: fractions of the data sheet figures that operations reach.
        progress: called with the number of ways considered, the total, and the best result so far.

    >>> import zerobubble as zb
    >>> zb.cost_model.divide("megatron-22b", gpu="A100", gpus=64, batch=256)
    <Divisions of megatron-22b over 64 A100: 7.144 s for 256 x 2,048 tokens, 51.30 % of the peak FLOP/s, 5,934 ways tried>
    """
    batch = _batch_of(model) if batch is None else batch
    if fsdp and not pipeline_only:
        raise InputError("{argument} needs {needed}", argument="fsdp=True", needed="pipeline_only=True", remedy="give both")
    whole = _whole_model(model, gpu, gpus, batch, precision, gradients, overlap_tp, top)
    limit = whole.gpu.memory_bytes if memory is None else as_bytes(memory)
    question = DivideQuestion(whole, gpus, batch, limit, gradients, pipeline_only, fsdp)
    ways = sorted(question.candidates(efficiency), key=attrgetter("seconds"))
    if not ways:
        raise _indivisible(question, efficiency)
    shapes, too_large, simulated, least = Shapes(), 0, 0, inf
    best: list[Division] = []
    for judged, candidate in enumerate(ways):
        if len(best) == top and best[-1].step.seconds <= candidate.seconds:
            break
        if progress is not None:
            progress(judged, len(ways), next(iter(best), None))
        memory_of = PlayedMemory.of(candidate, efficiency, shapes) if candidate.rank_bytes <= limit else None
        needed = candidate.rank_bytes if memory_of is None else max(memory_of.rank_bytes)
        least = min(least, needed)
        if memory_of is None or needed > limit:
            too_large += 1
            continue
        best = _with(best, _played(candidate, memory_of))[:top]
        simulated += 1
    if not best:
        raise _too_large(question, efficiency, len(ways), least)
    return Divisions(tuple(best), batch, limit, len(ways), too_large, simulated, pipeline_only)


def _with(best: list[Division], division: Division) -> list[Division]:
    """Inserts a choice, best first; keeps only the fastest schedule of each division."""
    return sorted({choice.way: choice for choice in sorted([*best, division], key=_seconds, reverse=True)}.values(), key=_seconds)


def _seconds(choice: Division) -> float:
    return choice.step.seconds


def _played(candidate: DivisionCandidate, memory: PlayedMemory) -> Division:
    """Returns the candidate with its step."""
    estimate, long = memory.estimate, memory.long
    step = estimate.as_step(long.whole.schedule, long.makespan(estimate.costs), memory.activations, candidate.num_microbatches)
    return Division(estimate, long.whole.schedule, candidate.num_microbatches, step, long.repeated, candidate.seconds)


def _batch_of(model: str | Model) -> int:
    """Returns the batch size of the model's published training; raises `InputError` if unknown."""
    resolved = known_model(model)
    if resolved.batch is None:
        raise InputError("{name} has no published batch size", name=resolved.name, remedy="give one, such as batch=512 (--batch 512)")
    return resolved.batch


def _whole_model(
    model: str | Model,
    gpu: str | GPU,
    gpus: int,
    batch: int,
    precision: str,
    gradients: str | None,
    overlap_tp: bool,
    top: int,
) -> Setting:
    """Returns the undivided setting, with gradients in float32 if not given; raises `InputError` with all faults of the arguments."""
    counts = {"gpus": gpus, "batch": batch, "top": top}
    faults = [f"{name} must be at least 1, got {count}" for name, count in counts.items() if count < 1]
    for look_up in (lambda: known_model(model), lambda: known_gpu(gpu)):
        try:
            look_up()
        except InputError as error:
            faults.append(str(error))
    if not faults:
        return Setting(
            model=known_model(model),
            gpu=known_gpu(gpu),
            overlap_tp=overlap_tp,
            precision=precision,
            gradients=gradients or "fp32",
        )
    raise InputError("{faults}", faults="; ".join(faults))


def _indivisible(question: DivideQuestion, efficiency: Efficiency) -> InputError:
    options = options_that_fit(question, efficiency, fewer=True)
    return InputError(
        "{name} cannot be divided over {gpus} GPUs for a batch of {batch} sequences, because no number of replicas divides the batch, "
        "with {groups} and at most {layers} ranks",
        name=question.base.model.name,
        groups="tp and cp 1" if question.pipeline_only else "powers of two for tp and cp",
        gpus=question.gpus,
        batch=question.batch,
        layers=question.base.model.layers,
        options=options,
        remedy=_advice(options),
    )


def _too_large(question: DivideQuestion, efficiency: Efficiency, ways: int, least: float) -> InputError:
    options = options_that_fit(question, efficiency)
    return InputError(
        "{name} does not fit on {gpus} {gpu}: the smallest of {ways:,} ways to divide it needs {needed} per GPU, more than {limit}",
        name=question.base.model.name,
        gpus=question.gpus,
        gpu=question.base.gpu.name,
        ways=ways,
        needed=show_bytes(round(least)),
        limit=show_bytes(question.limit),
        options=options,
        remedy=_advice(options),
    )


def _advice(options: tuple[str, ...]) -> str:
    if not options:
        return f"nothing that was tried fits and leaves {LEFT} (GPUs, batch, sequence, gradients, other GPUs); take a smaller model"
    return f"it fits and leaves {LEFT} {', or '.join(options)}"
