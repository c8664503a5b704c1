"""A training step of an estimated model: a schedule simulated under its costs, and the optimizer's step.

A schedule is periodic, so p more microbatches always add the same time: long steps are extrapolated from short ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerobubble.cost_model.held import WEIGHT_BYTES, Parameters
from zerobubble.cost_model.kernels import Kernels
from zerobubble.cost_model.setting import ERROR_BARS, Setting
from zerobubble.costs import Costs
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.graph import Graph, play
from zerobubble.ir import Schedule
from zerobubble.schedules import make
from zerobubble.simulation import metrics_of, pass_times, peak_memory
from zerobubble.units import show_bytes, show_percent
from zerobubble.verify import checked

UPDATE_BYTES = {"fp32": 54, "bf16": 60}
"""Bytes per parameter that the optimizer step reads and writes.

Casts gradients to float32 if necessary (6), checks and scales them (8), computes their norm (4), clips them (8), runs Adam, which reads a
gradient, a parameter and two moments and writes the latter three (28), and casts parameters to half precision (6).
"""


@dataclass(frozen=True, slots=True, repr=False)
class StepEstimate(Displayed):
    """An estimated training step: `passes` are its seconds until the end of the last pass, `update` those of the optimizer.

    `schedule` is the name of its schedule. `model_flops` are the operations that the model requires for the whole batch, and `peak_flops`
    the FLOP/s of all GPUs by their data sheets. `gpus` is the number of all GPUs, including replicas, `tokens` that of the whole batch.
    `rank_bytes` are the peak bytes on a GPU of each rank, `rank_activations` those of activations. `error_bar` is the relative error of
    published steps of this kind that the estimates stay within, such as 0.1.
    """

    schedule: str
    gpus: int
    tokens: int
    passes: float
    update: float
    model_flops: float
    peak_flops: float
    rank_activations: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    error_bar: float

    @property
    def seconds(self) -> float:
        return self.passes + self.update

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all GPUs."""
        return self.tokens / self.seconds

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization: required FLOP/s (`Model.flops_per_token`) relative to the peak in the precision of linear layers."""
        return self.model_flops / self.seconds / self.peak_flops

    @property
    def flops_per_gpu(self) -> float:
        """Required model FLOP/s per GPU."""
        return self.model_flops / self.seconds / self.gpus

    def _summary(self) -> str:
        speed = f"{self.seconds:.4g} s, {self.tokens_per_second:,.0f} tokens/s"
        used = f"{show_percent(self.utilization)} of the peak FLOP/s, {show_bytes(max(self.rank_bytes))}"
        return f"of {self.schedule} on {self.gpus} GPUs: {speed}, {used}"


def step_estimate(
    setting: Setting, name: str, microbatches: int, passes: float, update: float, activations: Sequence[int], states: Sequence[int]
) -> StepEstimate:
    """Returns a step of the schedule `name`, from seconds of `passes` and `update`, and rank bytes of `activations` and `states`."""
    tokens = setting.tokens * microbatches * setting.sharers
    return StepEstimate(
        name,
        setting.gpus,
        tokens,
        passes,
        update,
        setting.model.flops_per_token * tokens,
        setting.gpu.flops_of(setting.precision) * setting.gpus,
        tuple(activations),
        tuple(fixed + moving for fixed, moving in zip(states, activations, strict=True)),
        ERROR_BARS[setting.kind],
    )


def update_seconds(setting: Setting, kernels: Kernels, parameters: Parameters) -> float:
    """Returns the seconds of the optimizer step on a rank, including the gather of updated parameters if they are sharded for it.

    It also zeroes the gradients.
    """
    update, sharded = UPDATE_BYTES[setting.gradients], setting.shard_optimizer
    return sum(
        kernels.memory_traffic(count * (update / (sharers if sharded else 1) + setting.gradient_bytes))
        + (kernels.gather(WEIGHT_BYTES * count, sharers, neighbors) if sharded else 0.0)
        for count, sharers, neighbors in shared(setting, parameters)
    )


def shared(setting: Setting, parameters: Parameters) -> Iterator[tuple[int, int, int]]:
    """The parameters of a GPU, the number of GPUs that share them, and how many of these are in a domain: common ones, then experts."""
    yield parameters.common, setting.sharers, max(1, setting.neighbors // setting.tp)
    if parameters.experts:
        yield parameters.experts, setting.expert_sharers, max(1, setting.neighbors // setting.ep)


def made_for(setting: Setting, schedule: str | Schedule, num_microbatches: int | None) -> Schedule:
    """Returns the schedule, created if given by name; raises `InputError` if it does not fit the setting's ranks and stages."""
    if isinstance(schedule, str):
        if num_microbatches is None:
            message = "a schedule by name, such as {schedule!r}, needs num_microbatches"
            raise InputError(message, schedule=schedule, remedy="give the microbatches of a step")
        usual = setting.v if setting.v > 1 else None
        schedule = make(schedule, setting.pp, num_microbatches, usual)
    stages = setting.pp * setting.v
    if (schedule.num_ranks, schedule.num_stages) != (setting.pp, stages):
        raise InputError(
            ("schedule {schedule!r} has {schedule_stages} stages on {schedule_ranks} ranks, the estimate {stages} on {estimated_ranks}"),
            schedule=schedule.name,
            schedule_stages=schedule.num_stages,
            schedule_ranks=schedule.num_ranks,
            stages=stages,
            estimated_ranks=setting.pp,
            remedy=f"estimate with pp={schedule.num_ranks}, v={schedule.num_stages // schedule.num_ranks}",
        )
    return schedule


LONG, SHORT = 6, 4
"""Steps with more microbatches per rank than this are simulated with this many per rank, and with one fewer per rank."""
MOST_PASSES_KEPT = 400_000


class Ready(NamedTuple):
    """A schedule prepared for simulation."""

    schedule: Schedule
    graph: Graph
    order: list[int]

    def makespan(self, costs: Costs) -> int:
        """Returns the makespan under `costs`, in ns, including reductions over replicas."""
        return metrics_of(self.graph, play(self.graph, self.order, *pass_times(self.graph, costs)), costs).makespan


class Shapes:
    """A bounded cache of published schedules by shape."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, int, int | None], Ready] = OrderedDict()

    def ready(self, name: str, ranks: int, microbatches: int, v: int | None) -> Ready:
        """Returns the schedule of this shape, prepared for simulation."""
        shape = name, ranks, microbatches, v
        if shape not in self._kept:
            schedule = make(name, ranks, microbatches, v)
            self._kept[shape] = Ready(schedule, *checked(schedule))
            while len(self._kept) > 1 and sum(len(shape_ready.graph.ops) for shape_ready in self._kept.values()) > MOST_PASSES_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(shape)
        return self._kept[shape]


class LongStep:
    """A step of a published schedule, simulated in full or, if long, extrapolated.

    A long step is simulated with `SHORT` microbatches per rank plus the remainder of the full step. Each further microbatch per rank adds
    the difference to a step with one fewer. Its memory is that of the short step: no schedule tried needs more memory for more
    microbatches.
    """

    def __init__(self, shapes: Shapes, name: str, ranks: int, microbatches: int, v: int | None) -> None:
        more = max(0, microbatches // ranks - SHORT) if microbatches > LONG * ranks else 0
        self.repeated = more
        self.whole = shapes.ready(name, ranks, microbatches - more * ranks, v)
        self._less = shapes.ready(name, ranks, microbatches - (more + 1) * ranks, v) if more else None

    def peak_memory(self, costs: Costs) -> tuple[int, ...]:
        """Returns the peak bytes of activations of each rank."""
        return peak_memory(self.whole.schedule, costs)

    def makespan(self, costs: Costs) -> int:
        """Returns the makespan under `costs`, in ns."""
        last = self.whole.makespan(costs)
        return last if self._less is None else last + self.repeated * (last - self._less.makespan(costs))
