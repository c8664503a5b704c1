"""The training itself: through a pipeline, and on one device to compare with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from gpt import GPTConfig, build_stage, loss_fn
from options import Options
from pacing import LayerTimes, layer_times
from text import Text, batch
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.fit import fit_costs

Told = Callable[[int, float], None]
"""Called after every step with its number and its loss."""

PROBE = 1
"""The step that predictions are fitted to: the first one is still learning the shapes of messages."""
WARM_UP = 4
"""So many steps at full speed tell how long passes take."""
LATE = 3
"""So many steps at the end are measured to compare with the prediction."""


@dataclass(frozen=True)
class Task:
    """What every run trains: the model, the text and the order of its batches."""

    options: Options
    model: GPTConfig
    text: Text
    device: torch.device

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, the same on every rank and for every schedule."""
        options = self.options
        inputs, targets = batch(self.text.train, options.microbatches * options.microbatch_size, options.context, options.seed + step)
        return inputs.to(self.device), targets.to(self.device)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets that no step trains on, four times a batch."""
        sequences = 4 * self.options.microbatches * self.options.microbatch_size
        inputs, targets = batch(self.text.held_out, sequences, self.options.context, self.options.seed)
        return inputs.to(self.device), targets.to(self.device)

    def build(self, stage: int, num_stages: int) -> nn.Module:
        """One stage of the model, as `zb.Pipeline` asks for it."""
        return build_stage(self.model, stage, num_stages).to(self.device)

    def optimizer(self, parameters: object) -> torch.optim.Optimizer:
        """AdamW over `parameters`."""
        return torch.optim.AdamW(parameters, lr=self.options.lr, betas=(0.9, 0.95))  # type: ignore[arg-type]

    def pipeline(self, schedule: zb.Schedule, pace: LayerTimes | None) -> zb.Pipeline:
        """A fresh model in a pipeline."""
        costs = pace.costs(self.model.layers, schedule.num_stages) if pace else None
        return zb.Pipeline(self.build, schedule, schedule.num_microbatches, loss_fn, pace=costs)


@dataclass(frozen=True)
class Run:
    """What training with one schedule told.

    `costs` are what its prediction rests on, `timelines` the late steps, `layers` the bytes that each rank holds all the time.
    """

    schedule: zb.Schedule
    losses: list[float]
    held_out: float
    step_seconds: float
    costs: zb.Costs
    timelines: list[zb.Timeline]
    overruns: int
    layers: dict[str, list[int]]

    @property
    def predicted(self) -> zb.Timeline:
        """One step, simulated."""
        return zb.simulate(self.schedule, self.costs)

    @property
    def difference(self) -> zb.explain.Difference:
        """The measured step against the predicted one."""
        return zb.diff(self.schedule, self.costs, self.measured)

    @property
    def measured(self) -> zb.Timeline:
        """The late step of median length."""
        return sorted(self.timelines, key=lambda timeline: timeline.makespan)[len(self.timelines) // 2]


def nominal_times(task: Task, cores: int) -> LayerTimes:
    """Nominal pass times for this machine, from a few steps at full speed with every rank busy; the same on every rank."""
    schedule = _schedule(task, task.options.schedule)
    measured = []
    with task.pipeline(schedule, None) as pipe:
        for step in range(WARM_UP):
            pipe.step(*task.batch(step))
            measured.append(pipe.timeline())
    return layer_times(measured, task.model.layers // schedule.num_stages, task.options.ranks / cores)


def train(task: Task, name: str, steps: int, pace: LayerTimes | None, told: Told) -> Run:
    """Train a fresh model for `steps` steps with the schedule `name`."""
    schedule = _schedule(task, name)
    losses, seconds, timelines = [], [], {}
    with task.pipeline(schedule, pace) as pipe:
        optimizer = task.optimizer(pipe.parameters())
        for step in range(steps):
            begin = time.perf_counter()
            pipe.metering = _is_probed(step, steps)
            loss = pipe.step(*task.batch(step))
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
            if pipe.metering:
                timelines[step] = pipe.timeline()
            told(step, losses[-1])
        held_out, _ = pipe.eval_step(*task.held_out())
        assert held_out is not None
        overruns = _sum(pipe.pace.overruns if pipe.pace else 0)
        layers = _layers(list(pipe.parameters()), optimizer)
    free = [second for step, second in enumerate(seconds) if not _is_probed(step, steps)][1:]
    late = [timeline for step, timeline in timelines.items() if step >= steps - LATE]
    costs = _costs(timelines[min(timelines)], pace, task.model.layers)
    return Run(schedule, losses, held_out.item(), median(free or seconds), costs, late, overruns, layers)


def _costs(early: zb.Timeline, pace: LayerTimes | None, layers: int) -> zb.Costs:
    """What to predict from: bytes and times of an early step, times of the pace where there is one."""
    fitted = fit_costs(early)
    if pace is None:
        return fitted
    return replace(pace.costs(layers, fitted.num_stages), held_after_f=fitted.held_after_f, held_after_b=fitted.held_after_b)


def _schedule(task: Task, name: str) -> zb.Schedule:
    return zb.make(name, task.options.ranks, task.options.microbatches)


def _is_probed(step: int, steps: int) -> bool:
    """Whether the timeline of this step is wanted. Gathering it makes ranks wait for each other, so the speed is that of the others."""
    return step == min(PROBE, steps - 1) or step >= max(steps - LATE, PROBE)


def _layers(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, list[int]]:
    """Bytes of every rank beside its activations, by what they are."""
    weights = sum(parameter.nbytes for parameter in parameters)
    moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    own = torch.tensor([weights, weights, moments])
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return dict(zip(("parameters", "gradients", "optimizer state"), torch.stack(ranks).T.tolist(), strict=True))


def _sum(count: int) -> int:
    """The sum of every rank's count."""
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)


def train_one_device(task: Task, steps: int, told: Told) -> tuple[list[float], float]:
    """Train the same model on one device; gives its losses and the seconds of its median step.

    Microbatch goes after microbatch, gradients accumulated, then the same optimizer.
    """
    model = task.build(0, 1)
    optimizer = task.optimizer(model.parameters())
    count = task.options.microbatches
    losses, seconds = [], []
    for step in range(steps):
        begin = time.perf_counter()
        inputs, targets = task.batch(step)
        total = torch.zeros((), device=task.device)
        for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = loss_fn(model(x), y) / count
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        seconds.append(time.perf_counter() - begin)
        told(step, losses[-1])
    return losses, median(seconds)
