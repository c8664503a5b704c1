"""What `Pipeline(order_by=...)` wins in steps that are measured, beside what the simulation says, and what choosing an order takes.

Four ranks with 16 microbatches, whose passes are paced by the shares of the microbatches, so that ranks may share cores; steps in the order
of the data and ordered steps take turns. `speed`: milliseconds of processor time and of the clock to order 64 microbatches on 8 ranks as a
step does, each time others. Writes `steps.json` next to this file. The ratios count, not the times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.planning.unequal.order import with_numbers
from zerobubble.runtime.step.ordering import MicrobatchOrdering

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import in_ranks, machine, show
from unequal.run import lengths

RANKS, MICROBATCHES, TURNS, BLOCK = 4, 16, 2, 3
CASES = [(name, kind) for kind in ("two lengths", "packed", "heavy tail") for name in ("1f1b", "zb-h1", "zb-v")]
PASS_MS = 20.0
"""What a pass of a rank takes for a microbatch of the share 1, over the chunks of the rank together."""
TOKENS = 64
"""Tokens of a microbatch of the share 1."""


def main() -> None:
    """Measure and print, line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("steps.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "ranks": RANKS, "microbatches": MICROBATCHES}
    results["speed"] = [show(speed(name)) for name in ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b")]
    results["steps"] = [show(in_ranks(measure, RANKS, name, kind)) for name, kind in CASES]
    options.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(name: str, kind: str) -> dict[str, Any]:
    """The ms of the fastest step in both orders, of its slowest rank, their ratio, and that of the simulated spans."""
    schedule = zb.make(name, RANKS, MICROBATCHES)
    tokens = [max(1, round(TOKENS * share)) for share in lengths(kind, MICROBATCHES)]
    shares = tuple(count / TOKENS for count in tokens)
    pace = replace(zb.Costs.uniform(schedule.num_stages, (PASS_MS * RANKS / schedule.num_stages,) * 3), shares=shares)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = ([torch.randn(count, 16, generator=generator) for count in tokens] for _ in range(2))
    seconds: dict[str, list[float]] = {"data_order": [], "ordered": []}
    with pipeline(name, pace, None) as plain, pipeline(name, pace, rows_of) as ordered:
        for turn in range(TURNS + 1):
            for way, pipe in (("data_order", plain), ("ordered", ordered)):
                found = [step(pipe, inputs, targets) for _ in range(BLOCK)]
                seconds[way] += found if turn else []
        played = ordered.played
    assert played is not None
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, seconds)
    fastest = {way: min(map(max, zip(*(mine[way] for mine in told), strict=True))) for way in seconds}
    spans = [zb.simulate(each, pace).span for each in (schedule, played)]
    return {
        "schedule": name,
        "lengths": kind,
        **{f"{way}_ms": round(1000 * taken, 1) for way, taken in fastest.items()},
        "ratio": round(fastest["ordered"] / fastest["data_order"], 3),
        "simulated_ratio": round(spans[1] / spans[0], 3),
    }


def rows_of(microbatch: Tensor) -> int:
    return len(microbatch)


def pipeline(name: str, pace: zb.Costs, order_by: Any) -> zb.Pipeline:
    def build(stage: int, num_stages: int) -> nn.Module:
        return nn.Linear(16, 16)

    return zb.Pipeline(build, name, MICROBATCHES, nn.functional.mse_loss, pace=pace, order_by=order_by)


def step(pipe: zb.Pipeline, inputs: list[Tensor], targets: list[Tensor]) -> float:
    """Seconds of a step that all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    pipe.step(inputs, targets)
    return time.perf_counter() - began


def speed(name: str) -> dict[str, Any]:
    """Median milliseconds to order 64 microbatches on 8 ranks, over 20 that differ, and what a step waits that was ordered ahead."""
    schedule, dice = zb.make(name, 8, 64), Random(0)
    ordering = MicrobatchOrdering("tokens", schedule, None, None)
    processor, clock, ahead, gains = [], [], [], []
    for _ in range(20):
        microbatches = [torch.empty(dice.choice((256, 512, 1024)) + dice.randrange(64), dtype=torch.int8) for _ in range(64)]
        began = time.process_time(), time.perf_counter()
        costs, choose = ordering.of(schedule, microbatches)
        order = choose(costs)
        processor.append(1000 * (time.process_time() - began[0]))
        clock.append(1000 * (time.perf_counter() - began[1]))
        ordering.begin(schedule, microbatches[::-1])
        time.sleep(0.2)  # the step before
        later = time.perf_counter()
        again, choose = ordering.of(schedule, microbatches[::-1])
        choose(again)
        ahead.append(1000 * (time.perf_counter() - later))
        priced = replace(zb.Costs.uniform(schedule.num_stages), shares=tuple(costs))
        played = with_numbers(schedule, order)
        gains.append(1 - zb.simulate(played, priced).span / zb.simulate(schedule, priced).span)
    return {
        "schedule": name,
        "processor_ms": round(statistics.median(processor), 1),
        "most_processor_ms": round(max(processor), 1),
        "clock_ms": round(statistics.median(clock), 1),
        "ordered_ahead_ms": round(statistics.median(ahead), 2),
        "gain_percent": round(100 * statistics.median(gains), 1),
    }


if __name__ == "__main__":
    main()
