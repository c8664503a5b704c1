"""How much of the sums over replicas overlaps with passes, and whether it is ever slower than summing at the end.

Two replicas of four ranks train with passes that sleep, over links on which the sums of a rank's stages take 20 or 80 ms in total, one pass
or four: no sum ends before its numbers could have arrived. The ways take turns: `as_ready` sums a bucket of gradients when its parameters
are complete, during the last W's of their stage; `after_w` begins with a stage when its last W ends; `at_end` begins after the last pass;
`alone` has no sums. `hidden` is the fraction of the sums' time that does not lengthen the step of rank 0's pipeline, from the first pass
to the last sum, and `hidden_predicted` the same in the simulation. "zb-v, ordered" is ZB-V with its W in the order of a plan. Writes
`results.json`, one row at a time, each with the load of the machine: an interrupted run keeps its rows, and `--only zb-h1 --sum 20`
measures a single row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerobubble as zb
from zerobubble.runtime.hooks.replicas import Replicas
from zerobubble.runtime.transport import sums

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
from ranks import in_ranks, machine, show
from reduced import SleepingSum, scheduled
from stages import SleepingStage

RANKS, MICROBATCHES, PASS_MS = 4, 8, 20.0
"""Ranks of a pipeline, its microbatches, and the time of F, B and W of a rank."""
SUMS_MS = (20.0, 80.0)
"""What the sums of all stages of a rank take together."""
WEIGHTS = 8
"""Parameters of a rank, which take equal shares of W and travel alone."""
WIDTH = 16
CASES = [("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("zb-v, ordered", 2), ("interleaved-zb", 4)]
WAYS = ("as_ready", "after_w", "at_end", "alone")


def main() -> None:
    """Measure every schedule in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="steps of each way, of which the median counts (%(default)s)")
    parser.add_argument("--only", choices=[name for name, _ in CASES], help="measure this schedule alone")
    parser.add_argument("--sum", type=float, choices=SUMS_MS, help="measure this time of sums alone, in ms")
    options = parser.parse_args()
    for name, stages in CASES:
        for sum_ms in SUMS_MS:
            if options.only in (None, name) and options.sum in (None, sum_ms):
                about = {"date": machine()["date"], "load": round(os.getloadavg()[0], 1), "repeats": options.repeats}
                keep(show(in_ranks(measured, 2 * RANKS, name, stages, options.repeats, sum_ms) | about))


def keep(row: dict[str, Any]) -> None:
    """Write the row into the results, in the place of an older one of its schedule and time of sums."""
    file = Path(__file__).with_name("results.json")
    older = json.loads(file.read_text())["schedules"] if file.exists() else []
    rows = {(each["schedule"], each["sum_ms"]): each for each in (*older, row)}
    ordered = [rows[name, sum_ms] for name, _ in CASES for sum_ms in SUMS_MS if (name, sum_ms) in rows]
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"machine": machine(), "pass_ms": PASS_MS, "schedules": ordered}, indent=1) + "\n")
    part.replace(file)


def measured(name: str, stages_per_rank: int, repeats: int, sum_ms: float) -> dict[str, Any]:
    """The makespans of steps of each way, in turns, and what is predicted."""
    way = Way()
    buckets = WEIGHTS // stages_per_rank
    schedule, costs = scheduled(name, RANKS, MICROBATCHES, PASS_MS, stages_per_rank, sum_ms, buckets)
    mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("dp", "pp"))
    seconds = PASS_MS / 1000 / stages_per_rank
    data = torch.zeros(MICROBATCHES, WIDTH)
    found: dict[str, list[float]] = {each: [] for each in WAYS}
    with zb.Pipeline(
        lambda s, n: Stage(seconds, buckets), schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, bucket_bytes=4 * WIDTH
    ) as pipe:
        for turn in range((repeats + 1) * len(WAYS)):
            way.take(WAYS[turn % len(WAYS)], sum_ms / 1000 / WEIGHTS)
            pipe.step(data, data)
            if turn >= len(WAYS):
                found[way.name].append(pipe.timeline().makespan / 1e6)
    took = {each: statistics.median(times) for each, times in found.items()}
    predicted, alone = (zb.simulate(schedule, each).makespan / 1e6 for each in (costs, replace(costs, reduce=())))
    row: dict[str, Any] = {"schedule": name, "stages_per_rank": stages_per_rank, "sum_ms": sum_ms}
    row |= {f"{each}_ms": round(time, 1) for each, time in took.items()}
    row |= {"predicted_ms": round(predicted, 1), "as_ready_over_predicted": round(took["as_ready"] / predicted, 4)}
    row |= {f"as_ready_over_{each}": round(took["as_ready"] / took[each], 4) for each in ("at_end", "after_w")}
    row |= {"hidden": round(1 - (took["as_ready"] - took["alone"]) / sum_ms, 3)}
    return row | {"hidden_predicted": round(1 - (predicted - alone) / sum_ms, 3)}


class Stage(SleepingStage):
    """F and B take so many seconds, asleep, and so does W, in which the weights take turns."""

    def __init__(self, seconds: float, num_weights: int) -> None:
        super().__init__((seconds, seconds, 0.0))
        self.weight.requires_grad_(False)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(num_weights))
        self.each = seconds / num_weights

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = SleepingSum.apply(weight, x, self.each)  # type: ignore[no-untyped-call]
        return super().forward(x)


class Way:
    """How sums are made in this process: as the name of the way says, each taking so many seconds."""

    def __init__(self) -> None:
        self.name, self.seconds = WAYS[0], 0.0
        start: Callable[[Replicas], None] = Replicas._start_complete
        end, self._sum = Replicas.on_step_end, sums._sum

        def start_complete(hook: Replicas) -> None:
            if self.name in ("as_ready", "after_w"):
                start(hook)

        def on_step_end(hook: Replicas, step: Any) -> None:
            if self.name == "at_end":
                start(hook)
            end(hook, step)

        Replicas._start_complete = start_complete  # type: ignore[method-assign]
        Replicas.on_step_end = on_step_end  # type: ignore[method-assign]
        sums._sum = self.throttled

    def take(self, name: str, seconds: float) -> None:
        """Sum in this way from here on."""
        self.name, self.seconds = name, seconds
        Replicas.takes_gradients_early = name == "as_ready"

    def throttled(self, *arguments: Any) -> None:
        """A sum that is over no sooner than its numbers would be over the link."""
        over = time.perf_counter() + self.seconds
        self._sum(*arguments)
        time.sleep(max(0.0, over - time.perf_counter()))


if __name__ == "__main__":
    main()
