"""How close the runtime comes to the schedule's simulated time, with messages that take none and some, and what an action costs by
itself; PyTorch's runtime beside it.

Writes `results.json` next to this file. Absolute times depend on the machine; read the ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import bare, delay_messages, messages, ours, pipeline, pytorch, sleeping
from stages import SleepingStage, tiny_stage

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import in_ranks, machine, show

SLEEPING = [(8, name) for name in ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "planned")] + [(4, "1f1b"), (4, "zb-h1"), (4, "zb-v")]
"""Ranks and schedule; every pass of a stage takes `PASS_MS`."""
PASS_MS, LATENCY_MS = 10.0, 5.0
QUIET = 0.93
"""What the sleeping loop reaches where nothing else runs."""
OVERHEAD = [(ranks, microbatches, name) for ranks in (2, 4) for microbatches in (32, 64) for name in ("1f1b", "zb-h1", "zb-v")]


def main() -> None:
    """Run every case in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeats", type=int, default=5, help="steps per case, of which the fastest counts, the runtimes taking turns (%(default)s)"
    )
    parser.add_argument("--only", choices=["efficiency", "latency", "overhead"], help="run one of the claims")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    for claim, latency in (("efficiency", 0.0), ("latency", LATENCY_MS)):
        if options.only in (None, claim):
            cases = [(ranks, made(name, ranks, latency).to_text(), latency) for ranks, name in SLEEPING if ranks == 8 or not latency]
            results[claim] = [show(undisturbed(ranks, text, late, options.repeats)) for ranks, text, late in cases]
    if options.only in (None, "overhead"):
        results["overhead"] = [show(in_ranks(overhead, ranks, name, m, options.repeats)) for ranks, m, name in OVERHEAD]
    if options.only is None:
        Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n")


def made(name: str, ranks: int, latency_ms: float) -> zb.Schedule:
    """The published schedule, or the one planned for these passes and messages in 3/4 of the memory of 1F1B."""
    if name != "planned":
        return zb.make(name, ranks, 4 * ranks)
    placement = zb.Placement.vee(ranks)
    costs = zb.Costs.uniform(2 * ranks, (PASS_MS,) * 3, latency_ms)
    limits = zb.Limits((3 * ranks // 2 * costs.held_after_f[0],) * ranks)
    plan = zb.plan(costs, 4 * ranks, limits, placements=placement, objective="makespan", evaluations=20_000)
    return dataclasses.replace(plan.schedule, name="planned")


def undisturbed(ranks: int, text: str, latency_ms: float, repeats: int) -> dict[str, Any]:
    """A case of efficiency, measured again, twice at most, while the loop that only sleeps tells that the machine did something else."""
    for _ in range(3):
        row: dict[str, Any] = in_ranks(efficiency, ranks, text, latency_ms, repeats)
        if row["sleeping"] >= QUIET:
            break
        print(f"again: the sleeping loop has {row['sleeping']}")
    return row


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
    """Seconds of the fastest step of each runtime, taking turns, after two steps to warm up: what else the machine does only adds."""
    inputs, targets = torch.zeros(microbatches, 16), torch.zeros(microbatches, 16)
    times: dict[str, list[float]] = {who: [] for who in steps}
    for turn in range(repeats + 2):
        for who, (step, _) in steps.items():
            took = seconds(step, inputs, targets)
            if turn >= 2:
                times[who].append(took)
    for _, close in steps.values():
        close()
    return {who: min(values) for who, values in times.items()}


def efficiency(text: str, latency_ms: float, repeats: int) -> dict[str, Any]:
    """Simulated over measured time with sleeping passes, and messages that take `latency_ms`, which the simulation knows.

    Beside it what a loop by hand has that does nothing but sleep and send, and how the time simulated with profiled costs compares.
    """
    schedule = zb.Schedule.from_text(text)
    costs = zb.Costs.uniform(schedule.num_stages, (PASS_MS,) * 3, latency_ms)
    ideal = zb.simulate(schedule, costs).makespan / 1e9

    def build() -> SleepingStage:
        return SleepingStage((PASS_MS / 1000,) * 3)

    pipe = pipeline(build, schedule)
    steps = {"ours": ours(pipe), "sleeping": sleeping(schedule, PASS_MS / 1000, latency_ms / 1000)}
    if latency_ms:
        delay_messages(latency_ms / 1000)
    else:
        steps["pytorch"] = pytorch(build, schedule)
    data = torch.zeros(schedule.num_microbatches, 16)
    profiled = zb.simulate(schedule, pipe.profile(data, data, steps=1)).makespan / 1e9
    took = measure(steps, schedule.num_microbatches, repeats)
    row = {"schedule": schedule.name, "ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches, "pass_ms": PASS_MS}
    row |= {"latency_ms": latency_ms, "simulated_ms": round(ideal * 1000, 1)}
    row |= {who: round(ideal / value, 4) for who, value in took.items()}
    row |= {"ours_over_sleeping": round(took["sleeping"] / took["ours"], 4)}
    return row | {"profiled_ms": round(profiled * 1000, 1), "ours_of_profiled": round(profiled / took["ours"], 4)}


def overhead(name: str, microbatches: int, repeats: int) -> dict[str, Any]:
    """Microseconds per action of the critical path with stages that compute next to nothing."""
    ranks = dist.get_world_size()
    schedule = zb.make(name, ranks, microbatches)
    unit = zb.Costs.from_ms(*[[1.0] * schedule.num_stages] * 2, [0.0 if not schedule.split_stages else 1.0] * schedule.num_stages)
    actions = zb.simulate(schedule, unit).makespan / 1e6
    steps = {
        "ours": ours(pipeline(tiny_stage, schedule)),
        "ours_on_gloo": ours(pipeline(tiny_stage, schedule, shared=False)),
        "pytorch": pytorch(tiny_stage, schedule),
        "bare": bare(schedule),
        "messages": messages(schedule),
    }
    took = measure(steps, microbatches, 10 * repeats)
    row = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "critical_actions": round(actions)}
    row |= {f"{who}_us": round(value / actions * 1e6, 1) for who, value in took.items()}
    row |= {f"{who}_over_bare_us": round((took[who] - took["bare"]) / actions * 1e6, 1) for who in ("ours", "ours_on_gloo", "pytorch")}
    return row | {"ratio": round(took["ours"] / took["pytorch"], 3)}


if __name__ == "__main__":
    main()
