"""How close the runtime comes to the schedule's simulated time, and what an action costs by itself; PyTorch's runtime beside it.

Writes `results.json` next to this file. Absolute times depend on the machine; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peers import bare, messages, ours, pytorch
from stages import SleepingStage, tiny_stage

import zerobubble as zb

SLEEPING = [(ranks, name, 10.0) for ranks in (4, 8) for name in ("1f1b", "zb-h1", "zb-v")] + [(4, "zb-v", 5.0), (8, "zb-v", 5.0)]
"""Ranks, schedule, and milliseconds of every pass of a stage; the last two give zb-v the work per rank of the others."""
OVERHEAD = [(ranks, microbatches, name) for ranks in (2, 4) for microbatches in (32, 64) for name in ("1f1b", "zb-h1", "zb-v")]


def main() -> None:
    """Run every case in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="steps measured per case, the runtimes taking turns")
    parser.add_argument("--only", choices=["efficiency", "overhead"], help="run one of the two claims")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    if options.only != "overhead":
        results["efficiency"] = [show(in_ranks(efficiency, ranks, name, ms, options.repeats)) for ranks, name, ms in SLEEPING]
    if options.only != "efficiency":
        results["overhead"] = [show(in_ranks(overhead, ranks, name, m, options.repeats)) for ranks, m, name in OVERHEAD]
    if options.only is None:
        Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def show(row: dict[str, Any]) -> dict[str, Any]:
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def in_ranks(job: Any, ranks: int, *args: Any) -> dict[str, Any]:
    """Run `job` on fresh gloo ranks and give what rank 0 found."""
    queue = mp.get_context("spawn").SimpleQueue()
    port = 20000 + os.getpid() % 20000
    mp.spawn(_rank, (ranks, port, queue, job, args), nprocs=ranks)
    row: dict[str, Any] = queue.get()
    return row


def _rank(rank: int, ranks: int, port: int, queue: Any, job: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    row = job(*args)
    if rank == 0:
        queue.put(row)
    dist.barrier()
    dist.destroy_process_group()


def seconds(step: Any, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Wall time of one step, from rank 0's call (it feeds the pipeline) to the last rank's return; ranks share the clock."""
    dist.barrier()
    begin = time.perf_counter()
    step(inputs, targets)
    mine = torch.tensor([begin, time.perf_counter()], dtype=torch.float64)
    marks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(marks, mine)
    return (max(mark[1] for mark in marks) - marks[0][0]).item()


def measure(steps: dict[str, Any], microbatches: int, repeats: int) -> dict[str, float]:
    """Median seconds per step of each runtime, taking turns, after two steps to warm up."""
    inputs, targets = torch.zeros(microbatches, 16), torch.zeros(microbatches, 16)
    times: dict[str, list[float]] = {who: [] for who in steps}
    for turn in range(repeats + 2):
        for who, (step, _) in steps.items():
            took = seconds(step, inputs, targets)
            if turn >= 2:
                times[who].append(took)
    for _, close in steps.values():
        close()
    return {who: statistics.median(values) for who, values in times.items()}


def efficiency(name: str, pass_ms: float, repeats: int) -> dict[str, Any]:
    """Simulated over measured time with sleeping passes."""
    ranks = dist.get_world_size()
    microbatches = 4 * ranks
    schedule = zb.make(name, ranks, microbatches)
    costs = zb.Costs.uniform(schedule.num_stages, (pass_ms,) * 3)
    ideal = zb.simulate(schedule, costs).makespan / 1e9

    def build() -> SleepingStage:
        return SleepingStage((pass_ms / 1000,) * 3)

    took = measure({"ours": ours(build, name, microbatches), "pytorch": pytorch(build, name, microbatches)}, microbatches, repeats)
    row = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "pass_ms": pass_ms, "simulated_ms": round(ideal * 1000, 1)}
    return row | {who: round(ideal / value, 4) for who, value in took.items()}


def overhead(name: str, microbatches: int, repeats: int) -> dict[str, Any]:
    """Microseconds per action of the critical path with stages that compute next to nothing."""
    ranks = dist.get_world_size()
    schedule = zb.make(name, ranks, microbatches)
    unit = zb.Costs.from_ms(*[[1.0] * schedule.num_stages] * 2, [0.0 if not schedule.split_stages else 1.0] * schedule.num_stages)
    actions = zb.simulate(schedule, unit).makespan / 1e6
    steps = {
        "ours": ours(tiny_stage, name, microbatches),
        "ours_on_gloo": ours(tiny_stage, name, microbatches, shared=False),
        "pytorch": pytorch(tiny_stage, name, microbatches),
        "bare": bare(name, microbatches),
        "messages": messages(name, microbatches),
    }
    took = measure(steps, microbatches, 10 * repeats)
    row = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "critical_actions": round(actions)}
    row |= {f"{who}_us": round(value / actions * 1e6, 1) for who, value in took.items()}
    row |= {f"{who}_over_bare_us": round((took[who] - took["bare"]) / actions * 1e6, 1) for who in ("ours", "ours_on_gloo", "pytorch")}
    return row | {"ratio": round(took["ours"] / took["pytorch"], 3)}


if __name__ == "__main__":
    main()
