"""Measured steps compared with simulated ones, with and without message time, and the overhead per action, for ours and PyTorch's runtime.

Writes `results.json` next to this file. Absolute times depend on the machine; read the ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

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
QUIET = 0.95
"""What the sleeping loop reaches where nothing else runs."""
OVERHEAD = [(ranks, microbatches, name) for ranks in (2, 4) for microbatches in (32, 64) for name in ("1f1b", "zb-h1", "zb-v")]


def main() -> None:
    """Run every case in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeats", type=int, default=5, help="steps per case, of which the fastest counts, the runtimes taking turns (%(default)s)"
    )
    parser.add_argument("--only", choices=["efficiency", "latency", "overhead"], help="measure one of the claims again, the others stay")
    options = parser.parse_args()
    file = Path(__file__).with_name("results.json")
    results: dict[str, Any] = {"machine": machine()} if options.only is None else json.loads(file.read_text())
    for claim, latency in (("efficiency", 0.0), ("latency", LATENCY_MS)):
        if options.only in (None, claim):
            cases = [(ranks, made(name, ranks, latency).to_text(), latency) for ranks, name in SLEEPING if ranks == 8 or not latency]
            results[claim] = [show(undisturbed(ranks, text, late, options.repeats)) for ranks, text, late in cases]
    if options.only in (None, "overhead"):
        results["overhead"] = [show(in_ranks(overhead, ranks, name, m, options.repeats)) for ranks, m, name in OVERHEAD]
    file.write_text(json.dumps(results, indent=1) + "\n")


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
    """A case of efficiency, measured up to three times if the loop that only sleeps shows that something else ran.

    The one in which that loop was the fastest counts.
    """
    rows: list[dict[str, Any]] = []
    while len(rows) < 3 and all(row["sleeping"] < QUIET for row in rows):
        rows.append(in_ranks(efficiency, ranks, text, latency_ms, repeats))
    return max(rows, key=lambda row: row["sleeping"]) | {"measured": len(rows)}


class Took(NamedTuple):
    """Seconds of a step: of the clock, and of the processors of all ranks together."""

    wall: float
    cpu: float


def took(step: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Took:
    """What one step took, from rank 0's call (it feeds the pipeline) to the last rank's return; ranks share the clock."""
    dist.barrier()
    begin, spent = time.perf_counter(), time.process_time()
    step(inputs, targets)
    mine = torch.tensor([begin, time.perf_counter(), time.process_time() - spent], dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    return Took((max(rank[1] for rank in ranks) - ranks[0][0]).item(), sum(rank[2].item() for rank in ranks))


def measure(steps: dict[str, Any], microbatches: int, repeats: int) -> dict[str, Took]:
    """The least that a step of each runtime took, taking turns, after two steps to warm up: what else the machine does only adds."""
    inputs, targets = torch.zeros(microbatches, 16), torch.zeros(microbatches, 16)
    found: dict[str, list[Took]] = {who: [] for who in steps}
    for turn in range(repeats + 2):
        for who, (step, _) in steps.items():
            one = took(step, inputs, targets)
            if turn >= 2:
                found[who].append(one)
    for _, close in steps.values():
        close()
    return {who: Took(min(one.wall for one in all_of), min(one.cpu for one in all_of)) for who, all_of in found.items()}


def efficiency(text: str, latency_ms: float, repeats: int) -> dict[str, Any]:
    """Simulated over measured time with sleeping passes, and messages that take `latency_ms`, which the simulation knows.

    For comparison: a loop by hand that only sleeps and sends, and the time simulated with profiled costs.
    """
    schedule = zb.Schedule.from_text(text)
    costs = zb.Costs.uniform(schedule.num_stages, (PASS_MS,) * 3, latency_ms)
    ideal = zb.simulate(schedule, costs).makespan / 1e9

    def build() -> SleepingStage:
        return SleepingStage((PASS_MS / 1000,) * 3)

    pipe = pipeline(build, schedule)
    steps = {"ours": ours(pipe), "sleeping": sleeping(schedule, PASS_MS / 1000, latency_ms / 1000)}
    if latency_ms:
        delay_messages(lambda channel: latency_ms / 1000)
    else:
        steps["pytorch"] = pytorch(build, schedule)
    data = torch.zeros(schedule.num_microbatches, 16)
    profiled = zb.simulate(schedule, pipe.profile(data, data, steps=1)).makespan / 1e9
    wall = {who: least.wall for who, least in measure(steps, schedule.num_microbatches, repeats).items()}
    row = {"schedule": schedule.name, "ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches, "pass_ms": PASS_MS}
    row |= {"latency_ms": latency_ms, "simulated_ms": round(ideal * 1000, 1)}
    row |= {who: round(ideal / value, 4) for who, value in wall.items()}
    row |= {"ours_over_sleeping": round(wall["sleeping"] / wall["ours"], 4)}
    return row | {"profiled_ms": round(profiled * 1000, 1), "ours_of_profiled": round(profiled / wall["ours"], 4)}


def overhead(name: str, microbatches: int, repeats: int) -> dict[str, Any]:
    """Microseconds per action of the critical path, and of processors per pass, with stages that compute next to nothing."""
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
    least = measure(steps, microbatches, 10 * repeats)
    passes = sum(len(row) for row in schedule.rows)
    wall = {who: one.wall / actions * 1e6 for who, one in least.items()}
    cpu = {who: one.cpu / passes * 1e6 for who, one in least.items()}
    row = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "critical_actions": round(actions)}
    for kind, of in (("us", wall), ("cpu_us", cpu)):
        row |= {f"{who}_{kind}": round(value, 1) for who, value in of.items()}
        row |= {f"{who}_over_bare_{kind}": round(of[who] - of["bare"], 1) for who in ("ours", "ours_on_gloo", "pytorch")}
    return row | {"ratio": round(wall["ours"] / wall["pytorch"], 3)}


if __name__ == "__main__":
    main()
