"""A training step of an estimated model: a schedule simulated under its costs, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerobubble.cost_model.held import WEIGHT_BYTES, Parameters
from zerobubble.cost_model.kernels import Kernels
from zerobubble.cost_model.setting import ERROR_BARS, Setting
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.schedules import make
from zerobubble.units import show_bytes, show_percent

UPDATE_BYTES = {"fp32": 54, "bf16": 60}
"""Bytes per parameter that the sharded optimizer step reads and writes.

Casts gradients to float32 if necessary (6), checks and scales them (8), computes their norm (4), clips them (8), runs Adam, which reads a
gradient, a parameter and two moments and writes the latter three (28), and casts parameters to half precision (6).
"""


@dataclass(frozen=True, slots=True, repr=False)
class StepEstimate(Displayed):
    """An estimated training step: `passes` are its seconds until the end of the last pass, `update` those of the optimizer.

    `gpus` is the number of all GPUs, including replicas, `tokens` that of the whole batch. `rank_bytes` are the peak bytes on a GPU of each
    rank, `rank_activations` those of activations. `error_bar` is the relative error of published steps of this kind that the estimates
    stay within, such as 0.1.
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
    """Returns the seconds of the optimizer step on a rank, including the gather of updated parameters.

    It also zeroes the gradients.
    """
    return sum(
        kernels.memory_traffic(count * (UPDATE_BYTES[setting.gradients] / sharers + setting.gradient_bytes))
        + kernels.gather(WEIGHT_BYTES * count, sharers, neighbors)
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


def sums_by_rank(placement: Placement, values: Sequence[int]) -> list[int]:
    """Returns the sum of a column over the stages of each rank, including copies on other routes."""
    sums = [0] * placement.num_ranks
    for route in placement.routes:
        for rank, value in zip(route, values, strict=True):
            sums[rank] += value
    return sums
