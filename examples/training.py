"""The training through a pipeline, and on one device for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
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

OnStep = Callable[[int, float], None]
"""Called after every step with its number and loss."""

PROBE = 1
"""The step that predictions are fitted to. The first one still exchanges the shapes of messages."""
FEWEST, MOST = 8, 60
"""The fewest and the most steps to train, if the time determines them."""
WARM_UP = 4
"""Steps at full speed to measure passes."""
STRETCH = 1.3
"""The time of a step in a pipeline relative to the work of a rank, for planning the time of the demo: bubbles and the optimizer."""
LATE = 3
"""Steps at the end that are compared with the prediction."""


@dataclass(frozen=True)
class Task:
    """What every run trains: the model, the text and the order of its batches."""

    options: Options
    model: GPTConfig
    text: Text
    device: torch.device

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of a step, the same on every rank and for every schedule."""
        options = self.options
        inputs, targets = batch(self.text.train, options.microbatches * options.microbatch_size, options.context, options.seed + step)
        return inputs.to(self.device), targets.to(self.device)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets that are not used for training, four times a batch."""
        sequences = 4 * self.options.microbatches * self.options.microbatch_size
        inputs, targets = batch(self.text.held_out, sequences, self.options.context, self.options.seed)
        return inputs.to(self.device), targets.to(self.device)

    def build(self, stage: int, num_stages: int) -> nn.Module:
        """Returns one stage of the model, as `zb.Pipeline` calls it."""
        return build_stage(self.model, stage, num_stages).to(self.device)

    def optimizer(self, parameters: object) -> torch.optim.Optimizer:
        """AdamW over `parameters`."""
        return torch.optim.AdamW(parameters, lr=self.options.lr, betas=(0.9, 0.95))  # type: ignore[arg-type]

    def pipeline(self, schedule: zb.Schedule, pace: LayerTimes | None) -> zb.Pipeline:
        """Returns a new model in a pipeline."""
        costs = pace.costs(self.model.layers, schedule.num_stages) if pace else None
        return zb.Pipeline(self.build, schedule, schedule.num_microbatches, loss_fn, pace=costs)


@dataclass(frozen=True)
class Run:
    """The results of training with one schedule.

    `held_out` is the loss on held-out text before and after training, `costs` are the costs of its prediction, `timelines` the late
    steps, `layers` the bytes that each rank holds throughout.
    """

    schedule: zb.Schedule
    losses: list[float]
    held_out: tuple[float, float]
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


def measure_layer(task: Task) -> LayerTimes:
    """Returns the pass times of a layer on this machine, from a few steps at full speed with every rank busy; the same on every rank."""
    schedule = _schedule(task, task.options.schedule)
    measured = []
    with task.pipeline(schedule, None) as pipe:
        for step in range(WARM_UP):
            pipe.step(*task.batch(step))
            measured.append(pipe.timeline())
    return layer_times(measured, task.model.layers // schedule.num_stages)


def fitting_steps(task: Task, layer: LayerTimes, pace: LayerTimes | None, seconds: float) -> int:
    """Returns how many steps fit into `seconds` of rank 0, along with the steps of other schedules and on one device."""
    options = task.options
    left = torch.tensor(seconds)
    dist.broadcast(left, 0)
    in_pipeline = (pace or layer).step_seconds(options.layers, options.microbatches) / options.ranks
    for_others = len(options.compare) * options.compare_steps * STRETCH * in_pipeline
    of_a_step = STRETCH * in_pipeline + options.one_device * layer.step_seconds(options.layers, options.microbatches)
    return min(MOST, max(FEWEST, int((left.item() - for_others) / of_a_step)))


def train(task: Task, name: str, steps: int, pace: LayerTimes | None, on_step: OnStep) -> Run:
    """Trains a new model for `steps` steps with the schedule `name`."""
    schedule = _schedule(task, name)
    losses, seconds, timelines = [], [], {}
    with task.pipeline(schedule, pace) as pipe:
        optimizer = task.optimizer(pipe.parameters())
        before = _held_out(task, pipe)
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
            on_step(step, losses[-1])
        held_out = before, _held_out(task, pipe)
        overruns = _sum(pipe.pace.overruns if pipe.pace else 0)
        layers = _layers(list(pipe.parameters()), optimizer)
    free = [second for step, second in enumerate(seconds) if not _is_probed(step, steps)][1:]
    late = [timeline for step, timeline in timelines.items() if step >= steps - LATE]
    costs = _costs(timelines[min(timelines)], pace, task.model.layers)
    return Run(schedule, losses, held_out, median(free or seconds), costs, late, overruns, layers)


def _held_out(task: Task, pipe: zb.Pipeline) -> float:
    """Returns the loss on held-out text."""
    loss, _ = pipe.eval_step(*task.held_out())
    assert loss is not None
    return loss.item()


def _costs(early: zb.Timeline, pace: LayerTimes | None, layers: int) -> zb.Costs:
    """Returns the costs for the prediction: bytes and times of an early step, or the times of the pace if there is one."""
    fitted = fit_costs(early)
    if pace is None:
        return fitted
    return replace(pace.costs(layers, fitted.num_stages), held_after_f=fitted.held_after_f, held_after_b=fitted.held_after_b)


def _schedule(task: Task, name: str) -> zb.Schedule:
    return zb.make(name, task.options.ranks, task.options.microbatches)


def _is_probed(step: int, steps: int) -> bool:
    """Whether to gather the timeline of this step. Ranks then wait for each other, so the step does not count for speed."""
    return step == min(PROBE, steps - 1) or step >= max(steps - LATE, PROBE)


def _layers(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, list[int]]:
    """Returns the bytes of every rank other than activations, by kind."""
    weights = sum(parameter.nbytes for parameter in parameters)
    moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    own = torch.tensor([weights, weights, moments])
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return dict(zip(("parameters", "gradients", "optimizer state"), torch.stack(ranks).T.tolist(), strict=True))


def _sum(count: int) -> int:
    """Returns the sum of every rank's count."""
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)


def train_one_device(task: Task, steps: int, on_step: OnStep, until: float = inf) -> tuple[list[float], float]:
    """Trains the same model on one device. Returns its losses and the seconds of its median step.

    Microbatches run in sequence, gradients accumulate, then the same optimizer steps. `until` is a time of `time.perf_counter` after which
    no step begins, except the first few.
    """
    model = task.build(0, 1)
    optimizer = task.optimizer(model.parameters())
    count = task.options.microbatches
    losses, seconds = [], []
    for step in range(steps):
        begin = time.perf_counter()
        if step >= FEWEST and begin > until:
            break
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
        on_step(step, losses[-1])
    return losses, median(seconds)
