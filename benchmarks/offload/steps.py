"""Device memory in steps with offload compared with the plan, and whether all numbers are equal.

A GPT on four ranks is profiled for each schedule. Each rank that can run in three quarters of its memory gets no more. Bytes are those of
our meter, which counts held storages, and are equal on every machine. On CPUs the host memory is the device memory, so an allocator
could not distinguish them. Writes `steps.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPTConfig, build_stage, loss_fn
from ranks import equal_on_all_ranks, in_ranks, machine, show, trained

SCHEDULES = ("1f1b", "gis", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v")
RANKS, MICROBATCHES, MICROBATCH_SIZE, STEPS = 4, 8, 2, 3
MODEL = GPTConfig(layers=8, width=128, heads=4, context=64)
LINK = zb.offload.HostLink(to_host=25e9, from_host=25e9)
WITHIN = 0.05


def main() -> None:
    """Train with every schedule and write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [show(in_ranks(compare, RANKS, name)) for name in SCHEDULES]
    worst = max(abs(error) for row in rows for error in row["errors"])
    holds = worst <= WITHIN and all(row["equal"] for row in rows)
    results = {"machine": machine(), "worst_error": worst, "holds": holds, "schedules": rows}
    Path(__file__).with_name("steps.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def compare(name: str) -> dict[str, Any]:
    """Bytes at the peak of each rank: all held, planned and metered with offload; and whether losses and gradients are equal to the bit."""
    tokens = torch.randint(0, 256, (MICROBATCHES * MICROBATCH_SIZE, MODEL.context + 1), generator=torch.Generator().manual_seed(0))
    given = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with pipeline(name) as pipe:
        schedule, costs = pipe.schedule, pipe.profile(*given, steps=1)
        plain = trained(pipe, STEPS, *given)
    held = zb.simulation.peak_memory(schedule, costs)
    ranks = plan(schedule, costs, held)
    planned = [rank.peak_bytes or 0 for rank in zb.offload.play_offloads(schedule, costs, ranks, LINK).ranks]
    with pipeline(name, offload=ranks) as pipe:
        pipe.metering = True
        moved = trained(pipe, STEPS, *given)
        run = pipe.timeline()
    metered = [rank.peak_bytes or 0 for rank in run.ranks]
    equal = equal_on_all_ranks(plain, moved)
    return {
        "name": name,
        "without": list(held),
        "planned": planned,
        "metered": metered,
        "errors": [round(planned_bytes / found - 1, 4) for planned_bytes, found in zip(planned, metered, strict=True)],
        "planned_offloads": sum(len(rank.offloads) for rank in ranks),
        "copies": sum(map(len, run.copies)),
        "equal": equal,
    }


def pipeline(name: str, **options: Any) -> zb.Pipeline:
    return zb.Pipeline(lambda stage, stages: build_stage(MODEL, stage, stages), name, MICROBATCHES, loss_fn, **options)


def plan(schedule: zb.Schedule, costs: zb.Costs, held: tuple[int, ...]) -> tuple[zb.offload.RankOffloads, ...]:
    """What moves where each rank has three quarters of what it holds, or where that is too little for it, all."""
    limits = list(held)
    for rank in range(RANKS):
        limits[rank] = round(0.75 * held[rank])
        try:
            zb.offload.plan_offloads(schedule, costs, zb.Limits(tuple(limits)), LINK, evaluations=0, rounds=0)
        except zb.InputError:
            limits[rank] = held[rank]
    return zb.offload.plan_offloads(schedule, costs, zb.Limits(tuple(limits)), LINK, evaluations=0, rounds=0)


if __name__ == "__main__":
    main()
