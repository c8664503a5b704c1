"""How much of the reductions of FSDP2 overlaps with passes, and whether it is ever slower than waiting for each at once.

Two times four ranks train stages that FSDP2 shards over pairs, in parts that are reduced separately, with passes that sleep, over links on
which the reductions of a rank's stages take 60 or 120 ms in total, one pass or two. The ways take turns: `overlapped` is that of a
pipeline; `at_once` waits for each stage when its last pass ends, as FSDP2 alone would; `alone` has links without delay. `hidden` is the
fraction of the reductions' time that does not lengthen the step of rank 0's pipeline, from the first pass to the last reduction, and
`hidden_predicted` the same in the simulation with `Costs.reduce` and `Costs.buckets`. "zb-v, ordered" is ZB-V with its W in the order of a
plan. Writes `results.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerobubble as zb
from zerobubble.runtime.executor.shard_reductions import ShardReductions

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
from ranks import in_ranks, machine, show
from reduced import SleepingSum, scheduled
from stages import SleepingStage

RANKS, MICROBATCHES, PASS_MS = 4, 8, 60.0
"""Ranks of a pipeline, its microbatches, and the time of F, B and W of a rank."""
REDUCTIONS_MS = (60.0, 120.0)
"""What the reductions of all stages of a rank take together."""
PARTS = 4
"""Parts of a rank's stages that FSDP2 divides apart, which take equal shares of W."""
WIDTH = 16
CASES = [("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("zb-v, ordered", 2)]
WAYS = ("overlapped", "at_once", "alone")


def main() -> None:
    """Measure every schedule in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="steps of each way, of which the median counts (%(default)s)")
    options = parser.parse_args()
    rows = [show(row) for name, stages in CASES for row in in_ranks(compare, 2 * RANKS, name, stages, options.repeats)]
    results = {"machine": machine(), "load": round(os.getloadavg()[0], 1), "pass_ms": PASS_MS, "repeats": options.repeats}
    Path(__file__).with_name("results.json").write_text(json.dumps(results | {"schedules": rows}, indent=1) + "\n")


def compare(name: str, stages_per_rank: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each time of reductions."""
    way = Way()
    return [measured(name, stages_per_rank, repeats, together, way) for together in REDUCTIONS_MS]


def measured(name: str, stages_per_rank: int, repeats: int, reduce_ms: float, way: Way) -> dict[str, Any]:
    """The makespans of steps of each way, in turns, and what is predicted."""
    parts = PARTS // stages_per_rank
    schedule, costs = scheduled(name, RANKS, MICROBATCHES, PASS_MS, stages_per_rank, reduce_ms, parts)
    mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("dp_shard", "pp"))
    seconds = PASS_MS / 1000 / stages_per_rank
    data = torch.zeros(MICROBATCHES, WIDTH)
    link = ThrottledLink()

    def build(stage: int, num_stages: int) -> nn.Module:
        module = Stage(seconds, parts)
        for part in (*module.parts, module):
            fully_shard(part, mesh=mesh["dp_shard"]).set_custom_reduce_scatter(link)
        return module

    found: dict[str, list[float]] = {each: [] for each in WAYS}
    with zb.Pipeline(build, schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh) as pipe:
        for turn in range((repeats + 1) * len(WAYS)):
            way.name = WAYS[turn % len(WAYS)]
            link.seconds = 0.0 if way.name == "alone" else reduce_ms / 1000 / PARTS
            pipe.step(data, data)
            if turn >= len(WAYS):
                found[way.name].append(pipe.timeline().makespan / 1e6)
    took = {each: statistics.median(times) for each, times in found.items()}
    predicted, alone = (zb.simulate(schedule, each).makespan / 1e6 for each in (costs, replace(costs, reduce=())))
    row: dict[str, Any] = {"schedule": name, "stages_per_rank": stages_per_rank, "reduce_ms": reduce_ms}
    row |= {f"{each}_ms": round(time, 1) for each, time in took.items()}
    row |= {"predicted_ms": round(predicted, 1), "overlapped_over_predicted": round(took["overlapped"] / predicted, 4)}
    row |= {"overlapped_over_at_once": round(took["overlapped"] / took["at_once"], 4)}
    row |= {"hidden": round(1 - (took["overlapped"] - took["alone"]) / reduce_ms, 3)}
    row |= {"hidden_at_once": round(1 - (took["at_once"] - took["alone"]) / reduce_ms, 3)}
    return row | {"hidden_predicted": round(1 - (predicted - alone) / reduce_ms, 3)}


class Part(nn.Module):
    """Adds a weight, whose gradient takes so many seconds, asleep."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return SleepingSum.apply(self.weight, x, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


class Stage(SleepingStage):
    """F and B take so many seconds, asleep, and so does W, in which the parts take turns."""

    def __init__(self, seconds: float, num_parts: int) -> None:
        super().__init__((seconds, seconds, 0.0))
        self.weight.requires_grad_(False)
        self.parts = nn.ModuleList(Part(seconds / num_parts) for _ in range(num_parts))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return super().forward(x)


class Way:
    """How reductions are waited for in this process: as the name of the way says."""

    def __init__(self) -> None:
        self.name = WAYS[0]
        complete, last_pass_is_over = ShardReductions.complete, ShardReductions.last_pass_is_over

        def completed(reducing: ShardReductions, parameters: Any) -> None:
            if self.name != "at_once":
                complete(reducing, parameters)

        def passed(reducing: ShardReductions, stage: int) -> None:
            last_pass_is_over(reducing, stage)
            while self.name == "at_once" and reducing._started and next(iter(reducing._started)) not in reducing._unstarted:
                reducing._end_next()

        ShardReductions.complete = completed  # type: ignore[method-assign]
        ShardReductions.last_pass_is_over = passed  # type: ignore[method-assign]


class ThrottledLink:
    """Reduces and scatters for FSDP2 over a link on which each message takes so many seconds, one after another."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._free = 0.0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What a message is made in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._free = max(self._free, time.perf_counter()) + self.seconds
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from torch 2.13 on
        work = _Throttled(reduce_scatter(output_tensor, input_tensor, op, group, async_op=True), self._free)
        return work if async_op else work.wait()


class _Throttled:
    def __init__(self, work: Any, over: float) -> None:
        self._work, self._over = work, over

    def wait(self) -> None:
        """Return when the message would be over on this link."""
        self._work.wait()
        time.sleep(max(0.0, self._over - time.perf_counter()))


if __name__ == "__main__":
    main()
