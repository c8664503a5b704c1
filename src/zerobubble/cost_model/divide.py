"""Divides a model over the GPUs of a cluster: bounds all ways, and simulates as many as needed to prove the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from zerobubble.arguments import BYTES, WHOLE, either, instance, optional, takes
from zerobubble.cost_model.candidates import MOST_SEQUENCES, MOST_STAGES_OF_A_RANK, SCHEDULES, Candidate, candidates
from zerobubble.cost_model.configuration import known_model
from zerobubble.cost_model.estimate import Estimate, estimate_of
from zerobubble.cost_model.gpus import GPU, known_gpu
from zerobubble.cost_model.kernels import Efficiency
from zerobubble.cost_model.models import Model
from zerobubble.cost_model.setting import RECOMPUTE, Setting
from zerobubble.cost_model.step import LONG, LongStep, Shapes, StepEstimate
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Schedule
from zerobubble.units import as_bytes, show_bytes, show_percent

DivideProgress = Callable[[int, int, "Division | None"], object]
"""Called before each simulated step with the number of ways considered, the total, and the best result so far."""


@takes()
@dataclass(frozen=True, slots=True, repr=False)
class Division(Displayed):
    """A way to divide a model over GPUs, with its estimate and a step of `num_microbatches`.

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
    def way(self) -> tuple[object, ...]:
        """The division of the model, regardless of the schedule and the stages per rank."""
        here = self.setting
        return here.tp, here.cp, here.ep, here.pp, here.dp, here.microbatch, here.recompute

    def to_dict(self) -> dict[str, Any]:
        """The division of the model, and the time and memory of the step."""
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
    """The fastest ways to divide a model over GPUs, best first, each with its best schedule.

    Of the `ways` considered, `too_large` exceed `memory_bytes`, `simulated` were simulated, and lower bounds prove that the others are
    slower than the last of `choices`.
    """

    choices: tuple[Division, ...]
    batch: int
    memory_bytes: int
    ways: int
    too_large: int
    simulated: int

    @property
    def best(self) -> Division:
        return self.choices[0]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Returns a sentence for each assumption about the best way, and about the search."""
        schedules = ", ".join(tried.name for tried in SCHEDULES)
        return (
            *self.best.estimate.assumptions,
            f"Search space: powers of two for tp, cp, ep and sequences per microbatch (up to {MOST_SEQUENCES}), every number of ranks, up "
            f"to {MOST_STAGES_OF_A_RANK} stages per rank, recompute {', '.join(RECOMPUTE)}, schedules {schedules}.",
            f"Steps of more than {LONG} microbatches per rank are simulated in part: their steady state repeats every p microbatches.",
            f"The memory limit of a GPU is {show_bytes(self.memory_bytes)}.",
        )

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
            "memory_bytes": self.memory_bytes,
            "ways": self.ways,
            "too_large": self.too_large,
            "simulated": self.simulated,
            "choices": [choice.to_dict() for choice in self.choices],
            "assumptions": list(self.assumptions),
        }

    def _summary(self) -> str:
        here, step = self.best.setting, self.best.step
        figures = f"{step.seconds:.4g} s a step, {show_percent(step.utilization)} of the peak FLOP/s"
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
"""Heading of the table of choices. TFLOP/s are the required model FLOP/s per GPU, and MFU is their share of the data sheet."""


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
    gradients=str,
    overlap_tp=bool,
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
    gradients: str = "fp32",
    overlap_tp: bool = False,
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
        gradients: precision of weight gradients and their sums, "fp32" or "bf16".
        overlap_tp: whether tensor-parallel communication overlaps with matrix products wherever possible.
        memory: memory limit per GPU, in bytes or as text such as "70GB"; by default all of its memory.
        top: number of results.
        efficiency: fractions of the data sheet figures that operations reach.
        progress: called with the number of ways considered, the total, and the best result so far.

    >>> import zerobubble as zb
    >>> zb.cost_model.divide("megatron-22b", gpu="A100", gpus=64, batch=256)
    <Divisions of megatron-22b over 64 A100: 7.144 s a step, 51.30 % of the peak FLOP/s, 5,934 ways tried>
    """
    batch = _batch_of(model) if batch is None else batch
    base = _whole_model(model, gpu, gpus, batch, precision, gradients, overlap_tp, top)
    limit = base.gpu.memory_bytes if memory is None else as_bytes(memory)
    known = sorted(candidates(base, efficiency, gpus, batch), key=attrgetter("seconds"))
    _require_any(known, base, gpus, batch)
    shapes, too_large, simulated = Shapes(), 0, 0
    best: list[Division] = []
    for judged, candidate in enumerate(known):
        if len(best) == top and best[-1].step.seconds <= candidate.seconds:
            break
        if progress is not None:
            progress(judged, len(known), best[0] if best else None)
        found = None
        if candidate.rank_bytes <= limit:
            found = _played(candidate, efficiency, shapes, limit)
            simulated += found is not None
        too_large += found is None
        if found is not None:
            best = _with(best, found)[:top]
    if not best:
        raise _too_large(known, base, gpus, limit, _enough(base, efficiency, gpus, batch, limit))
    return Divisions(tuple(best), batch, limit, len(known), too_large, simulated)


def _with(best: list[Division], found: Division) -> list[Division]:
    """Inserts a choice, best first; keeps only the fastest schedule of each division."""
    return sorted({choice.way: choice for choice in sorted([*best, found], key=_seconds, reverse=True)}.values(), key=_seconds)


def _seconds(choice: Division) -> float:
    return choice.step.seconds


def _played(candidate: Candidate, efficiency: Efficiency, shapes: Shapes, limit: int) -> Division | None:
    """Returns the candidate's step, None if it does not fit into `limit` bytes."""
    setting = candidate.setting
    found = estimate_of(setting, efficiency, candidate.parts, candidate.layers)
    stages = setting.v if candidate.tried.v is None else None
    long = LongStep(shapes, candidate.tried.name, setting.pp, candidate.num_microbatches, stages)
    activations = long.peak_memory(found.costs)
    step = found.as_step(long.schedule, 0, activations, candidate.num_microbatches)
    if max(step.rank_bytes) > limit:
        return None
    step = found.as_step(long.schedule, long.makespan(found.costs), activations, candidate.num_microbatches)
    return Division(found, long.schedule, candidate.num_microbatches, step, long.repeated, candidate.seconds)


def _batch_of(model: str | Model) -> int:
    """Returns the batch size of the model's published training; raises `InputError` if unknown."""
    known = known_model(model)
    if known.batch is None:
        raise InputError("{name} has no published batch size", name=known.name, remedy="give one, such as batch=512 (--batch 512)")
    return known.batch


def _whole_model(
    model: str | Model,
    gpu: str | GPU,
    gpus: int,
    batch: int,
    precision: str,
    gradients: str,
    overlap_tp: bool,
    top: int,
) -> Setting:
    """Returns the undivided setting; raises `InputError` with all faults of the arguments."""
    counts = {"gpus": gpus, "batch": batch, "top": top}
    faults = [f"{name} must be at least 1, got {count}" for name, count in counts.items() if count < 1]
    for known in (lambda: known_model(model), lambda: known_gpu(gpu)):
        try:
            known()
        except InputError as error:
            faults.append(str(error))
    if not faults:
        return Setting(
            model=known_model(model),
            gpu=known_gpu(gpu),
            overlap_tp=overlap_tp,
            precision=precision,
            gradients=gradients,
        )
    raise InputError("{faults}", faults="; ".join(faults))


def _require_any(known: list[Candidate], base: Setting, gpus: int, batch: int) -> None:
    if not known:
        raise InputError(
            "{name} cannot be divided over {gpus} GPUs for a batch of {batch} sequences, because no number of replicas divides the batch, "
            "with powers of two for tp and cp and at most {layers} ranks",
            name=base.model.name,
            gpus=gpus,
            batch=batch,
            layers=base.model.layers,
            remedy="change the batch or the number of GPUs",
        )


MOST_DOUBLINGS = 5
"""How often the number of GPUs is doubled to name one on which a model may fit."""


def _enough(base: Setting, efficiency: Efficiency, gpus: int, batch: int, limit: int) -> int | None:
    """Returns the smallest multiple of `gpus` by a power of two on which the model may fit; None if none was found."""
    for more in (gpus << power for power in range(1, MOST_DOUBLINGS + 1)):
        if any(candidate.rank_bytes <= limit for candidate in candidates(base, efficiency, more, batch)):
            return more
    return None


def _too_large(known: list[Candidate], base: Setting, gpus: int, limit: int, enough: int | None) -> InputError:
    least = min(candidate.rank_bytes for candidate in known)
    return InputError(
        "{name} does not fit on {gpus} {gpu}: the smallest of {ways} ways to divide it needs at least {needed} per GPU, more than {limit}",
        name=base.model.name,
        gpus=gpus,
        gpu=base.gpu.name,
        ways=len(known),
        needed=show_bytes(round(least)),
        limit=show_bytes(limit),
        remedy=f"{'use more GPUs' if enough is None else f'it may fit on {enough} of them'}, or change the batch",
    )
