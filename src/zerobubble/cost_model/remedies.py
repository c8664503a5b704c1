"""Finds options with which a model fits its GPUs, each by an estimate of its peak memory under a simulated schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

from zerobubble.cost_model.candidates import DivisionCandidate, candidates
from zerobubble.cost_model.configuration import with_sequence
from zerobubble.cost_model.estimate import Estimate, estimate_of
from zerobubble.cost_model.gpus import GPUS
from zerobubble.cost_model.kernels import Efficiency
from zerobubble.cost_model.setting import Setting
from zerobubble.cost_model.step import LongStep, Shapes

SMALL = 16
"""Each number of GPUs up to this is tried, then powers of two times those given."""
MOST_DOUBLINGS = 5
MARGIN = 0.1
"""Share of a GPU's memory to leave for what estimates do not count: temporary memory of passes, and fragmentation of the allocator."""
SHORTEST = 512
"""Fewest tokens of a sequence to try."""
MOST_PLAYED = 32
"""Candidates to simulate for one question, those with the smallest bounds first."""


@dataclass(frozen=True, slots=True)
class DivideQuestion:
    """A model, undivided, the GPUs and sequences of a step, and the bytes of each GPU.

    Pipelines alone are those of `zb.Pipeline`: gradients have by default the precision of weights, and replicas shard the optimizer state
    only if `fsdp`, together with weights. Other divisions sum gradients in float32 by default, and shard the optimizer state.
    """

    model: Setting
    gpus: int
    batch: int
    limit: int
    gradients: str | None = None
    pipeline_only: bool = False
    fsdp: bool = False

    @property
    def base(self) -> Setting:
        """The undivided setting."""
        gradients = self.gradients or ("bf16" if self.pipeline_only else "fp32")
        return replace(self.model, gradients=gradients, shard_optimizer=self.fsdp or not self.pipeline_only, shard_weights=self.fsdp)

    @property
    def roomy(self) -> float:
        """The bytes of a GPU, except the `MARGIN` for what estimates do not count."""
        return (1 - MARGIN) * self.limit

    def candidates(self, efficiency: Efficiency, *, smallest: bool = False) -> Iterator[DivisionCandidate]:
        """Yields every way to divide the model, or only those with the fewest bytes."""
        return candidates(self.base, efficiency, self.gpus, self.batch, pipeline_only=self.pipeline_only, smallest=smallest)


@dataclass(frozen=True, slots=True)
class PlayedMemory:
    """The estimate and the schedule of a candidate, and the peak bytes of its ranks."""

    estimate: Estimate
    long: LongStep
    activations: tuple[int, ...]
    rank_bytes: tuple[int, ...]

    @classmethod
    def of(cls, candidate: DivisionCandidate, efficiency: Efficiency, shapes: Shapes) -> PlayedMemory:
        """Simulates the memory of the candidate."""
        setting = candidate.setting
        estimate = estimate_of(setting, efficiency, candidate.parts, candidate.layers)
        stages = setting.v if candidate.tried.v is None else None
        long = LongStep(shapes, candidate.tried.name, setting.pp, candidate.num_microbatches, stages)
        activations = long.peak_memory(estimate.costs)
        step = estimate.as_step(long.whole.schedule, 0, activations, candidate.num_microbatches)
        return cls(estimate, long, activations, step.rank_bytes)


def options_that_fit(question: DivideQuestion, efficiency: Efficiency, *, fewer: bool = False) -> tuple[str, ...]:
    """Returns options of the command line with which the model fits and leaves the `MARGIN`: the first of each kind, or another GPU.

    With `fewer`, fewer GPUs are tried, too.
    """
    shorter = list(_sequence(question))
    can_be_shorter = shorter and _fits(shorter[-1][1], efficiency)
    kinds = (
        *(_fewer_gpus(question) if fewer else (), _gpus(question), _batch(question)),
        *(shorter if can_be_shorter else (), _gradients(question), _sharded(question), _memory(question), _beyond_pipelines(question)),
    )
    options = tuple(option for kind in kinds for option in _first_that_fits(kind, efficiency))
    return options or _first_that_fits(_other_gpu(question), efficiency)


def _first_that_fits(changes: Iterable[tuple[str, DivideQuestion]], efficiency: Efficiency) -> tuple[str, ...]:
    """Returns the options of the first change with which the model fits, empty if there is none."""
    return tuple(islice((options for options, changed in changes if _fits(changed, efficiency)), 1))


def _fits(question: DivideQuestion, efficiency: Efficiency) -> bool:
    within = [candidate for candidate in question.candidates(efficiency, smallest=True) if candidate.rank_bytes <= question.roomy]
    shapes = Shapes()
    played = (PlayedMemory.of(candidate, efficiency, shapes) for candidate in sorted(within, key=attrgetter("rank_bytes")))
    return any(max(memory.rank_bytes) <= question.roomy for memory in islice(played, MOST_PLAYED))


def _fewer_gpus(question: DivideQuestion) -> Iterator[tuple[str, DivideQuestion]]:
    for gpus in range(question.gpus - 1, question.gpus // 2, -1):
        yield f"with --gpus {gpus}", replace(question, gpus=gpus)


def _gpus(question: DivideQuestion) -> Iterator[tuple[str, DivideQuestion]]:
    doubled = (question.gpus << power for power in range(1, MOST_DOUBLINGS + 1))
    for gpus in (*range(question.gpus + 1, SMALL + 1), *(gpus for gpus in doubled if gpus > SMALL)):
        yield f"with --gpus {gpus}", replace(question, gpus=gpus)


def _batch(question: DivideQuestion) -> Iterator[tuple[str, DivideQuestion]]:
    """Any number of replicas divides a multiple of the GPUs."""
    batch = -(-question.batch // question.gpus) * question.gpus
    if batch != question.batch:
        yield f"with --batch {batch}", replace(question, batch=batch)


def _sequence(question: DivideQuestion) -> Iterator[tuple[str, DivideQuestion]]:
    tokens = question.base.model.sequence // 2
    while tokens >= SHORTEST:
        model = with_sequence(question.base.model, tokens)
        yield f"with --sequence {tokens} --batch {question.batch}", replace(question, model=replace(question.model, model=model))
        tokens //= 2


def _beyond_pipelines(question: DivideQuestion) -> Iterator[tuple[str, DivideQuestion]]:
    if question.pipeline_only:
        sharded = " and --fsdp" if question.fsdp else ""
        yield f"without --pipeline-only{sharded}", replace(question, pipeline_only=False, fsdp=False)


def _gradients(question: DivideQuestion) -> Iterator[tuple[str, DivideQuestion]]:
    if question.base.gradients != "bf16":
        yield "with --gradients bf16", replace(question, gradients="bf16")


def _sharded(question: DivideQuestion) -> Iterator[tuple[str, DivideQuestion]]:
    if question.pipeline_only and not question.fsdp:
        yield "with --fsdp", replace(question, fsdp=True)


def _memory(question: DivideQuestion) -> Iterator[tuple[str, DivideQuestion]]:
    memory = question.base.gpu.memory_bytes
    if question.limit < memory:
        yield "without --memory", replace(question, limit=memory)


def _other_gpu(question: DivideQuestion) -> Iterator[tuple[str, DivideQuestion]]:
    for gpu in sorted(GPUS.values(), key=attrgetter("memory_bytes")):
        if gpu.memory_bytes > question.limit and question.base.precision in dict(gpu.flops):
            yield f"with --gpu {gpu.name}", replace(question, model=replace(question.model, gpu=gpu), limit=gpu.memory_bytes)
