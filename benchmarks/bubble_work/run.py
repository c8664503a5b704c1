"""How much work fits into the bubbles of a step, and by how much it lengthens the step.

Four ranks train with passes stretched to 20 ms. Every rank has unlimited work in pieces of 2 ms, and starts one if the rest of a bubble
suffices. Steps with and without the work take turns. `used` is the work of all ranks as a fraction of their idle time before their last
passes; `longer` is the increase of the median step in %. Writes `results.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import in_ranks, machine, show

RANKS, MICROBATCHES, PASS_MS, PIECE_S = 4, 8, 20.0, 0.002
WIDTH = 16
CASES = ["gpipe", "1f1b", "zb-h1", "zb-v"]


def main() -> None:
    """Measure every schedule in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps with work, and as many without (%(default)s)")
    steps = parser.parse_args().steps
    rows = [show(in_ranks(measured, RANKS, name, steps)) for name in CASES]
    result = {"machine": machine(), "ranks": RANKS, "microbatches": MICROBATCHES, "pass_ms": PASS_MS, "schedules": rows}
    Path(__file__).with_name("results.json").write_text(json.dumps(result, indent=1) + "\n")


def pieces(bubble: zb.hooks.Bubble) -> None:
    """Work in pieces, as many as there is time for."""
    while bubble.left() > 1.2 * PIECE_S:
        time.sleep(PIECE_S)


class InTurns(zb.hooks.BubbleWork):
    """Works while it is `on`."""

    on = True

    def before_step_of_row(self, number: int) -> None:
        if self.on:
            super().before_step_of_row(number)


def measured(name: str, steps: int) -> dict[str, Any]:
    """What steps of a schedule take, in turns with the work and without it."""
    schedule = zb.make(name, RANKS, MICROBATCHES)
    stages = schedule.num_stages // RANKS
    costs = zb.Costs.uniform(schedule.num_stages, times=(PASS_MS,) * 3, stages_per_rank=stages)
    idle = sum(window.duration for row in zb.explain.windows(schedule, costs) for window in row) / 1e9
    hook = InTurns(pieces, costs)
    data = torch.zeros(MICROBATCHES, WIDTH)
    times: dict[bool, list[float]] = {True: [], False: []}
    with zb.Pipeline(
        lambda stage, count: nn.Linear(WIDTH, WIDTH), schedule, MICROBATCHES, nn.functional.mse_loss, hooks=[hook], pace=costs
    ) as pipe:
        for _ in range(2):
            pipe.step(data, data)
        hook.used = hook.offered = 0.0
        hook.overruns = 0
        for turn in range(2 * steps):
            hook.on = turn % 2 == 0
            torch.distributed.barrier()
            began = time.perf_counter()
            pipe.step(data, data)
            torch.distributed.barrier()
            times[hook.on].append(time.perf_counter() - began)
    every: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(every, (hook.used, hook.overruns))
    with_work, without = statistics.median(times[True]), statistics.median(times[False])
    return {
        "schedule": name,
        "idle_s": round(idle, 3),
        "used": round(sum(used for used, _ in every) / steps / idle, 3),
        "overruns": sum(overruns for _, overruns in every),
        "step_ms": round(1000 * without, 1),
        "longer": round(100 * (with_work / without - 1), 2),
    }


if __name__ == "__main__":
    main()
