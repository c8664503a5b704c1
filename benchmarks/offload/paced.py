"""Measured steps with offload compared with the simulation: which copies overlap, and which passes wait.

Eight ranks run the schedules of `run.py` in half of their memory, with passes stretched to 10 ms and copies as long as over the plan's link
(`Pipeline(pace=..., link=...)`), so ranks may share cores. Steps with offload, steps without, and a loop by hand that only sleeps and
sends (the order without offload) take turns, and the fastest of each counts. `offload`, `without`, `sleeping`: simulated over measured
time. `longer`: the step with offload over that without, in %. `waits`: steps of rows for which a copy ends more than 1 ms after the step
before them, and by how much in ms, on all ranks. `load`: runnable processes when the case began. Writes `paced.json` next to this file;
read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.offload import HostLink, RankOffloads, play_offloads
from zerobubble.timeline import Copying

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
from executor.run import QUIET, took
from offload.run import KS, RANKS, SCHEDULES, TIMES, halved
from peers import mean_square, ours, sleeping
from ranks import in_ranks, machine, show

BYTES = 65_536
"""What the forward of a stage really saves for a microbatch: for the link, as much as the plan says."""
WAITING_NS = 1_000_000


def main() -> None:
    """Measure every case in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="steps of each kind, of which the fastest counts (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("paced.json"))
    options = parser.parse_args()
    rows = [show(undisturbed(name, k, options.repeats)) for name, k in product(SCHEDULES, KS)]
    options.out.write_text(json.dumps({"machine": machine(), "cases": rows}, indent=1) + "\n", encoding="utf-8")


def undisturbed(name: str, k: float, repeats: int) -> dict[str, Any]:
    """A case, measured up to three times if the loop that only sleeps shows that something else ran; its fastest counts."""
    given, rows = halved(name, k), list[dict[str, Any]]()
    while len(rows) < 3 and all(row["sleeping"] < QUIET for row in rows):
        load = round(os.getloadavg()[0], 2)
        rows.append({"schedule": name, "k": k, "load": load} | in_ranks(measured, RANKS, *given, repeats))
    return max(rows, key=lambda row: row["sleeping"]) | {"measured": len(rows)}


class _Save(torch.autograd.Function):
    """Saves bytes of its own for the backward pass, which reads them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones(BYTES, dtype=torch.uint8))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        if not (len(saved) == BYTES and saved[0] == saved[-1] == 1):
            raise AssertionError("what the forward saved has not come back")
        return dy


class Saving(nn.Module):
    """A stage that computes next to nothing and saves `BYTES`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Save.apply(x + self.weight)
        return y


def measured(schedule: zb.Schedule, costs: zb.Costs, plans: Sequence[RankOffloads], link: HostLink, repeats: int) -> dict[str, Any]:
    """The simulated over the measured times of a schedule, and what waits for copies in both."""

    def pipeline(**options: Any) -> zb.Pipeline:
        return zb.Pipeline(lambda stage, stages: Saving(), schedule, schedule.num_microbatches, mean_square, pace=costs, **options)

    planned, free = play_offloads(schedule, costs, plans, link), zb.simulate(schedule, costs)
    scale = BYTES / costs.held_after_f[0]
    pipe = pipeline(offload=plans, link=HostLink(link.to_host * scale, link.from_host * scale))
    seconds = TIMES[0] / 1000 / schedule.placement.stages_per_rank
    steps = {"offload": ours(pipe), "without": ours(pipeline()), "sleeping": sleeping(schedule, seconds, 0.0)}
    inputs = torch.zeros(schedule.num_microbatches, 16)
    least = dict.fromkeys(steps, float("inf"))
    run = planned
    for turn in range(repeats + 2):
        for who, (step, _) in steps.items():
            wall = took(step, inputs, inputs).wall  # the same on all ranks
            timeline = pipe.timeline() if who == "offload" else None
            if turn >= 2 and wall < least[who]:
                least[who], run = wall, timeline or run
    dist.barrier()
    for _, close in steps.values():
        close()
    simulated = {"offload": planned.makespan, "without": free.makespan, "sleeping": free.makespan}
    return {
        "simulated_ms": round(planned.makespan / 1e6, 1),
        "measured_ms": round(1000 * least["offload"], 1),
        **{who: round(simulated[who] / 1e9 / wall, 4) for who, wall in least.items()},
        "simulated_longer": round(100 * (planned.makespan / free.makespan - 1), 2),
        "longer": round(100 * (least["offload"] / least["without"] - 1), 2),
        "copies": sum(map(len, run.copies)),
        "simulated_waits": waits(planned, plans),
        "waits": waits(run, plans),
    }


def waits(timeline: zb.Timeline, plans: Sequence[RankOffloads]) -> tuple[int, float]:
    """How many steps of rows have a copy that ends more than 1 ms after the step before, and the ms that these lie between."""
    late = []
    for rank, plan in enumerate(plans):
        ends = {copy[:3]: copy.end for copy in timeline.copies_of(rank)}
        last: dict[int, int] = {}
        for one in plan.offloads:
            for copying, step in ((Copying.TO_HOST, one.freed), (Copying.FROM_HOST, one.needed)):
                last[step] = max(last.get(step, 0), ends[copying, one.stage, one.microbatch])
        late += [end - timeline.rows[rank][step - 1].end for step, end in last.items()]
    found = [ns for ns in late if ns > WAITING_NS]
    return len(found), round(sum(found) / 1e6, 1)


if __name__ == "__main__":
    main()
