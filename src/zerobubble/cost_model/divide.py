"""A model divided over the GPUs of a cluster: all ways are bounded, and as many played as it takes to know the quickest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from zerobubble.arguments import WHOLE, either, instance, optional, takes
from zerobubble.cost_model.contenders import MOST_SEQUENCES, MOST_STAGES_OF_A_RANK, SCHEDULES, Contender, contenders
from zerobubble.cost_model.estimate import Estimate, estimate_of
from zerobubble.cost_model.gpus import GPU, known_gpu
from zerobubble.cost_model.kernels import Efficiency
from zerobubble.cost_model.models import Model, known_model
from zerobubble.cost_model.repetition import LONG, LongStep, Shapes
from zerobubble.cost_model.setting import RECOMPUTE, Setting
from zerobubble.cost_model.step import StepEstimate
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Schedule
from zerobubble.units import show_bytes, show_percent

DivideProgress = Callable[[int, int, "Division | None"], object]
"""What is called before each step is played: with how many ways were judged, how many there are, and the best so far."""


@dataclass(frozen=True, slots=True, repr=False)
class Division(Displayed):
    """One way to divide a model over GPUs, with its estimate and a step of `num_microbatches`.

    `schedule` is the one that was played, of which a long step repeats the middle: `repeated` microbatches a rank were not played.
    `least_seconds` is what the step cannot fall below, by the work of its ranks.
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
    def way(self) -> tuple[object, ...]:
        """How the model is divided, whatever its schedule and the stages of a rank."""
        here = self.setting
        return here.tp, here.cp, here.ep, here.pp, here.dp, here.microbatch, here.recompute

    def to_dict(self) -> dict[str, Any]:
        """How the model is divided, and what the step takes and holds."""
        names = ("tp", "cp", "ep", "pp", "v", "dp", "microbatch", "recompute")
        return {name: getattr(self.setting, name) for name in names} | {
            "schedule": self.step.schedule,
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
    """The quickest ways to divide a model over GPUs, the best first, each with its best schedule.

    `ways` were judged, all of them by what their steps take and hold at least: `without_room` of them hold too much for `memory_bytes`,
    `played` were played, and the others take longer than the last of `choices`.
    """

    choices: tuple[Division, ...]
    batch: int
    memory_bytes: int
    ways: int
    without_room: int
    played: int

    @property
    def best(self) -> Division:
        return self.choices[0]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """A sentence for everything that was assumed of the best, and of the search."""
        schedules = ", ".join(tried.name for tried in SCHEDULES)
        return (
            *self.best.estimate.assumptions,
            f"Tried are powers of two for tp, cp, ep and sequences of a microbatch (up to {MOST_SEQUENCES}), every number of ranks and up "
            f"to {MOST_STAGES_OF_A_RANK} stages on each, recomputation of {', '.join(RECOMPUTE)}, and the schedules {schedules}.",
            f"Steps of more than {LONG} microbatches a rank are played in part: what p more microbatches take is the same each time.",
            f"A GPU has room for {show_bytes(self.memory_bytes)}.",
        )

    def to_dict(self) -> dict[str, Any]:
        """What was asked, how it was found out, everything assumed, and the choices."""
        here = self.best.setting
        return {
            "model": here.model.name,
            "gpu": here.gpu.name,
            "gpus": here.gpus,
            "batch": self.batch,
            "precision": here.precision,
            "gradients": here.gradients,
            "memory_bytes": self.memory_bytes,
            "ways": self.ways,
            "without_room": self.without_room,
            "played": self.played,
            "choices": [choice.to_dict() for choice in self.choices],
            "assumptions": list(self.assumptions),
        }

    def _summary(self) -> str:
        here, step = self.best.setting, self.best.step
        figures = f"{step.seconds:.4g} s a step, {show_percent(step.utilization)} of the peak FLOP/s"
        return f"of {here.model.name} over {here.gpus:,} {here.gpu.name}: {figures}, {self.ways:,} ways tried"

    def table(self) -> str:
        """All choices, a line each."""
        return "\n".join([HEADING, *map(_row, self.choices)])

    def _details(self) -> Iterator[str]:
        yield from self.table().splitlines()


HEADING = " tp  cp  ep  pp  v    dp  mb     m  recompute schedule           seconds  TFLOP/s     MFU    memory"
"""Of the table of choices; the TFLOP/s are those of each GPU that training needs, and MFU is their share of the data sheet."""


def _row(choice: Division) -> str:
    here, step = choice.setting, choice.step
    shape = f"{here.tp:3}{here.cp:4}{here.ep:4}{here.pp:4}{here.v:3}{here.dp:6}{here.microbatch:4}{choice.num_microbatches:6}"
    figures = (
        f"{step.seconds:8.4g}{step.flops_per_gpu / 1e12:9.0f}{show_percent(step.utilization):>8}{show_bytes(max(step.rank_bytes)):>10}"
    )
    return f"{shape}  {here.recompute:<10}{step.schedule:<18}{figures}"


@takes(
    model=either(str, Model),
    gpu=either(str, GPU),
    gpus=WHOLE,
    batch=optional(WHOLE),
    precision=str,
    gradients=str,
    overlap_tp=bool,
    memory_bytes=optional(WHOLE),
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
    gradients: str = "fp32",
    overlap_tp: bool = False,
    memory_bytes: int | None = None,
    top: int = 10,
    efficiency: Efficiency = Efficiency(),  # noqa: B008 - frozen
    progress: DivideProgress | None = None,
) -> Divisions:
    """The quickest ways to divide a model over GPUs, with schedule and recomputation, by estimated steps.

    Steps are played in the order of what they take at least, until no other can be among the `top` quickest that fit into the memory.
    Raises `InputError`, with all that is wrong, for an unknown model or GPU, for counts below 1, and where nothing fits.

    Arguments:
        model: a name of `MODELS`, or a `Model`.
        gpu: a name of `GPUS`, or a `GPU`.
        gpus: how many there are.
        batch: sequences of a step, over all replicas; those of the model's published training by default.
        precision: "bf16", or "fp8" for the products of linear layers.
        gradients: "fp32", or "bf16", in which weights' gradients are kept and summed.
        overlap_tp: whether gathers and sums of tensor-parallel groups are hidden beside matrix products wherever they can be.
        memory_bytes: what a GPU has room for; all that it has by default.
        top: how many to give.
        efficiency: what operations reach of the figures in data sheets.
        progress: is called with ways judged, all ways, and the best so far.

    >>> import zerobubble as zb
    >>> zb.cost_model.divide("megatron-22b", gpu="A100", gpus=64, batch=256)
    <Divisions of megatron-22b over 64 A100: 7.16 s a step, 51.2 % of the peak FLOP/s, 5,934 ways tried>
    """
    batch = _batch_of(model) if batch is None else batch
    base = _whole_model(model, gpu, gpus, batch, precision, gradients, overlap_tp, memory_bytes, top)
    room = base.gpu.memory_bytes if memory_bytes is None else memory_bytes
    known = sorted(contenders(base, efficiency, gpus, batch), key=attrgetter("seconds"))
    _require_any(known, base, gpus, batch, room)
    shapes, without_room, played = Shapes(), 0, 0
    best: list[Division] = []
    for judged, contender in enumerate(known):
        if len(best) == top and best[-1].step.seconds <= contender.seconds:
            break
        if progress is not None:
            progress(judged, len(known), best[0] if best else None)
        found = None
        if contender.rank_bytes <= room:
            found = _played(contender, efficiency, shapes, room)
            played += found is not None
        without_room += found is None
        if found is not None:
            best = _with(best, found)[:top]
    if not best:
        raise InputError(_too_large(known, base, gpus, room))
    return Divisions(tuple(best), batch, room, len(known), without_room, played)


def _with(best: list[Division], found: Division) -> list[Division]:
    """The choices with one more, the best first; of those that divide the model alike the quickest schedule alone."""
    return sorted({choice.way: choice for choice in sorted([*best, found], key=_seconds, reverse=True)}.values(), key=_seconds)


def _seconds(choice: Division) -> float:
    return choice.step.seconds


def _played(contender: Contender, efficiency: Efficiency, shapes: Shapes, room: int) -> Division | None:
    """The contender's step, or None where it does not fit into `room` bytes."""
    setting = contender.setting
    found = estimate_of(setting, efficiency, contender.parts, contender.layers)
    stages = setting.v if contender.tried.v is None else None
    long = LongStep(shapes, contender.tried.name, setting.pp, contender.num_microbatches, stages)
    activations = long.peak_memory(found.costs)
    step = found.as_step(long.schedule, 0, activations, contender.num_microbatches)
    if max(step.rank_bytes) > room:
        return None
    step = found.as_step(long.schedule, long.makespan(found.costs), activations, contender.num_microbatches)
    return Division(found, long.schedule, contender.num_microbatches, step, long.repeated, contender.seconds)


def _batch_of(model: str | Model) -> int:
    """The sequences of a step of the model's published training; raises `InputError` where there are none."""
    known = known_model(model)
    if known.batch is None:
        raise InputError(f"how many sequences a step of {known.name} has was not published: give batch, such as 512")
    return known.batch


def _whole_model(
    model: str | Model,
    gpu: str | GPU,
    gpus: int,
    batch: int,
    precision: str,
    gradients: str,
    overlap_tp: bool,
    memory_bytes: int | None,
    top: int,
) -> Setting:
    """The model undivided; raises `InputError` with everything that is wrong with what was asked."""
    counts = {"gpus": gpus, "batch": batch, "top": top} | ({} if memory_bytes is None else {"memory_bytes": memory_bytes})
    faults = [f"{name} must be at least 1, got {count}" for name, count in counts.items() if count < 1]
    for known in (lambda: known_model(model), lambda: known_gpu(gpu)):
        try:
            known()
        except InputError as error:
            faults.append(str(error))
    if not faults:
        return Setting(known_model(model), known_gpu(gpu), 1, 1, 1, 1, 1, 1, 1, RECOMPUTE[0], True, overlap_tp, precision, gradients)
    raise InputError("; ".join(faults))


def _require_any(known: list[Contender], base: Setting, gpus: int, batch: int, room: int) -> None:
    if not known:
        raise InputError(
            f"{base.model.name} cannot be divided over {gpus} GPUs for steps of {batch} sequences: the batch must be a multiple of the "
            f"replicas that {gpus} GPUs make with tp and cp of powers of two and at most {base.model.layers} ranks: take another batch, or "
            "another number of GPUs"
        )


def _too_large(known: list[Contender], base: Setting, gpus: int, room: int) -> str:
    least = min(contender.rank_bytes for contender in known)
    return (
        f"{base.model.name} does not fit on {gpus} {base.gpu.name}: of {len(known)} ways to divide it the smallest has a GPU hold "
        f"{show_bytes(round(least))} or more of {show_bytes(room)}: take more GPUs, or a batch that leaves each replica more of them"
    )
