"""The slowdown of steps after a rank of several replicas is lost, compared with the plan and the lower bound.

Eight ranks train, two replicas of four, with passes that sleep. One is killed, and training continues. More replicas are simulated. Writes
`results.json` next to this file; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerobubble as zb
from zerobubble.rerouting import rerouted, slowdown_of

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
from ranks import machine, show
from stages import SleepingStage

RANKS, REPLICAS, MICROBATCHES, PASS_MS = 4, 2, 8, 10.0
KILLED = 5
"""The rank that is killed: the second of the second replica."""
CASES = (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2))
"""Schedules, and the stages that each has on a rank."""
SIMULATED = ((2, 4, 8), (3, 4, 6), (4, 4, 8), (8, 4, 8), (4, 8, 16), (8, 8, 16), (16, 8, 32))
"""Replicas, ranks of each, and their microbatches."""


def main() -> None:
    """Measure each schedule in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps before and after, of which medians count (%(default)s)")
    parser.add_argument("--only-simulated", action="store_true", help="leave the measured rows as they are")
    options = parser.parse_args()
    file = Path(__file__).with_name("results.json")
    found = json.loads(file.read_text()) if file.exists() else {}
    found["simulated"] = [show(simulated(name, *shape)) for shape in SIMULATED for name, stages in CASES if stages == 1]
    if not options.only_simulated:
        found |= {"machine": machine(), "rows": [show(killed(name, stages, options.steps)) for name, stages in CASES]}
    file.write_text(json.dumps(found, indent=1) + "\n")


def simulated(name: str, replicas: int, ranks: int, microbatches: int) -> dict[str, Any]:
    """The slowdown where all passes take equally long: planned for the best and the worst rank to lose, the least for the worst.

    `evenly` is what it would be if all ranks that are left could share the work.
    """
    before = zb.make(name, ranks, microbatches)
    places = [range(number * ranks, (number + 1) * ranks) for number in range(replicas)]
    found = [slowdown_of(before, rerouted(before.placement, places, {gone}, replicas * microbatches)) for gone in range(ranks)]
    row = {"schedule": name, "replicas": replicas, "ranks": ranks, "microbatches": microbatches}
    evenly = replicas * ranks / (replicas * ranks - 1)
    ratios = {"best": min(each.planned for each in found), "worst": max(found).planned, "least": max(found).least, "evenly": evenly}
    return row | {key: round(value, 3) for key, value in ratios.items()}


def killed(name: str, stages_per_rank: int, steps: int) -> dict[str, Any]:
    """What rank 0 found, whose process has the store and lives on."""
    queue = mp.get_context("spawn").SimpleQueue()
    port = 20000 + os.getpid() % 20000
    start = mp.get_context("spawn").Process
    ranks = [start(target=train, args=(rank, port, queue, name, stages_per_rank, steps)) for rank in range(RANKS * REPLICAS)]
    for each in ranks:
        each.start()
    row: dict[str, Any] = queue.get()
    for each in ranks:
        each.join()
    return row


def train(rank: int, port: int, queue: Any, name: str, stages_per_rank: int, steps: int) -> None:
    """Steps with all ranks, and without the one that kills itself; a first one of each makes the programs and does not count."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS * REPLICAS)
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "pp"))
    seconds, data = (PASS_MS / 1000 / stages_per_rank,) * 3, torch.zeros(MICROBATCHES, 16)
    pipe = zb.Pipeline(
        lambda stage, num_stages: SleepingStage(seconds), name, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, survive=True, timeout=60.0
    )
    before = pipe.schedule
    took: list[float] = []
    for step in range(2 * steps + 2):
        if rank == KILLED and step == steps + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.perf_counter()
        pipe.step(data, data)
        took.append(1000 * (time.perf_counter() - begin))
    if rank == 0:
        slowdown = slowdown_of(before, pipe.schedule)
        before_ms, after_ms = median(took[1 : steps + 1]), median(took[steps + 2 :])
        row = {
            "schedule": name,
            "before_ms": round(before_ms, 1),
            "after_ms": round(after_ms, 1),
            "first_after_ms": round(took[steps + 1], 1),
        }
        ratios = {"measured": after_ms / before_ms, "planned": slowdown.planned, "least": slowdown.least}
        queue.put(row | {key: round(value, 3) for key, value in ratios.items()})
    os._exit(0)  # the store is here, and nobody needs it any more when it ends


if __name__ == "__main__":
    main()
