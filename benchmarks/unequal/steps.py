"""The measured savings of `Pipeline(order_by=...)` and `order_ahead` compared with the simulation, and their cost.

Four ranks with 16 microbatches, whose passes are paced by the costs of the microbatches, so that ranks may share cores. Steps in data
order, ordered steps, and steps with passes planned ahead take turns. Every step has its own batch, so that each plan is searched and
compiled. `speed`: milliseconds to order 64 microbatches on 8 ranks as a step does, to plan the passes ahead, and to compile them on a rank,
each time for new ones. Writes `steps.json` next to this file. Read the ratios, not the times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.lowering import PREFETCH, Compiled
from zerobubble.lowering.compiled import lowered
from zerobubble.planning.unequal.order import with_numbers
from zerobubble.runtime.mailbox.handshake import read_passes
from zerobubble.runtime.step.ordering import THREAD, MicrobatchOrdering

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import in_ranks, machine, show
from unequal.run import lengths

RANKS, MICROBATCHES, TURNS, BLOCK = 4, 16, 2, 3
CASES = [(name, kind) for kind in ("two lengths", "packed", "heavy tail") for name in ("1f1b", "zb-h1", "zb-v", "plan")]
ROOM = 6
"""Microbatches of the share 1 that each rank may hold in the plan, which is made for equal microbatches."""
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
    results["steps"] = in_ranks(measured, RANKS, CASES)
    options.out.write_text(json.dumps(results, indent=1) + "\n")


def measured(cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The rows of all `cases`, on the ranks that call it together."""
    rows = []
    for case in cases:
        rows.append(measure(*case))
        if dist.get_rank() == 0:
            show(rows[-1])
    return rows


def measure(name: str, kind: str) -> dict[str, Any]:
    """The ms of the fastest step of each way, of its slowest rank, their ratios to the data's order, and those of the simulated spans."""
    plays = given(name)
    schedule = plays.schedule if isinstance(plays, zb.planning.Plan) else plays
    tokens = [max(1, round(TOKENS * share)) for share in lengths(kind, MICROBATCHES)]
    shares = tuple(count / TOKENS for count in tokens)
    pace = replace(zb.Costs.uniform(schedule.num_stages, (PASS_MS * RANKS / schedule.num_stages,) * 3), shares=shares)
    generator = torch.Generator().manual_seed(0)
    batches = [batch(tokens, number, generator) for number in range((TURNS + 1) * BLOCK + 1)]
    seconds: dict[str, list[float]] = {"data_order": [], "ordered": [], "planned": []}
    with pipeline(plays, pace, None) as plain, pipeline(plays, pace, rows_of) as ordered, pipeline(plays, pace, rows_of) as planned:
        for turn in range(TURNS + 1):
            for way, pipe in (("data_order", plain), ("ordered", ordered), ("planned", planned)):
                for number in range(BLOCK * turn, BLOCK * (turn + 1)):
                    if pipe is planned:
                        pipe.order_ahead(batches[number + 1][0])
                    found = step(pipe, *batches[number])
                    seconds[way] += [found] if turn else []
        played = {"data_order": schedule, "ordered": ordered.played, "planned": planned.played}
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, seconds)
    fastest = {way: min(map(max, zip(*(mine[way] for mine in gathered), strict=True))) for way in seconds}
    spans = {way: zb.simulate(each, pace).span for way, each in played.items() if each is not None}
    return {
        "schedule": name,
        "lengths": kind,
        **{f"{way}_ms": round(1000 * taken, 1) for way, taken in fastest.items()},
        "ratio": round(fastest["ordered"] / fastest["data_order"], 3),
        "simulated_ratio": round(spans["ordered"] / spans["data_order"], 3),
        "planned_ratio": round(fastest["planned"] / fastest["data_order"], 3),
        "simulated_planned_ratio": round(spans["planned"] / spans["data_order"], 3),
    }


def batch(tokens: list[int], number: int, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of as many tokens, but for one more in one of the microbatches."""
    counts = [count + (place == number % len(tokens)) for place, count in enumerate(tokens)]
    return [torch.randn(count, 16, generator=generator) for count in counts], [torch.randn(count, 16) for count in counts]


def rows_of(microbatch: Tensor) -> int:
    return len(microbatch)


def given(name: str) -> zb.Schedule | zb.planning.Plan:
    """The schedule of a name, or the plan for as many equal microbatches."""
    if name != "plan":
        return zb.make(name, RANKS, MICROBATCHES)
    costs = replace(zb.Costs.uniform(RANKS, (PASS_MS,) * 3), placement=zb.Placement.linear(RANKS))
    limits = zb.Limits((ROOM * costs.held_after_f[0],) * RANKS)
    return zb.plan(costs, MICROBATCHES, limits, placements="linear", evaluations=2000)


def pipeline(plays: zb.Schedule | zb.planning.Plan, pace: zb.Costs, order_by: Any) -> zb.Pipeline:
    def build(stage: int, num_stages: int) -> nn.Module:
        return nn.Linear(16, 16)

    return zb.Pipeline(build, plays, MICROBATCHES, nn.functional.mse_loss, pace=pace, order_by=order_by)


def step(pipe: zb.Pipeline, inputs: list[Tensor], targets: list[Tensor]) -> float:
    """Seconds of a step that all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    pipe.step(inputs, targets)
    return time.perf_counter() - began


def speed(name: str) -> dict[str, Any]:
    """Median milliseconds over 20 batches of 64 microbatches on 8 ranks: to order them, to plan their passes ahead, to compile these on
    the rank that plans and on another, and what a step waits that was ordered ahead; the median gains of the simulated span."""
    schedule, dice = zb.make(name, 8, 64), Random(0)
    ordering, plain = (MicrobatchOrdering("tokens", schedule, None, None, plans_passes=plans) for plans in (True, False))
    taken: dict[str, list[float]] = {
        key: [] for key in ("processor", "clock", "ordered_ahead", "planning", "planning_clock", "proven", "compiling")
    }
    ordered_gains, planned_gains = [], []
    for _ in range(20):
        microbatches = [torch.empty(dice.choice((256, 512, 1024)) + dice.randrange(64), dtype=torch.int8) for _ in range(64)]
        began = time.process_time(), time.perf_counter()
        costs, choose, _ = plain.costs_of(schedule, microbatches)
        order = choose(costs)
        taken["processor"].append(time.process_time() - began[0])
        taken["clock"].append(time.perf_counter() - began[1])
        ordering.costs_of(schedule, microbatches).choose(costs)
        began = time.process_time(), time.perf_counter()
        ordering.begin(schedule, microbatches)
        for thread in threading.enumerate():  # the step before lasts as long as the search
            if thread.name == THREAD:
                thread.join()
        taken["planning"].append(time.process_time() - began[0])
        taken["planning_clock"].append(time.perf_counter() - began[1])
        later = time.perf_counter()
        ahead = ordering.costs_of(schedule, microbatches).ahead
        taken["ordered_ahead"].append(time.perf_counter() - later)
        priced = replace(zb.Costs.uniform(schedule.num_stages), shares=tuple(costs))
        span, ordered = zb.simulate(schedule, priced).span, zb.simulate(with_numbers(schedule, order), priced).span
        ordered_gains.append(1 - ordered / span)
        planned_gains.append(0.0)
        if ahead is not None:
            began = time.process_time(), time.perf_counter()
            planned = read_passes("planned", schedule, ahead.passes)
            lowered(planned, PREFETCH)
            taken["compiling"].append(time.process_time() - began[0])
            Compiled.from_schedule(planned)
            taken["proven"].append(time.process_time() - began[0] - taken["compiling"][-1])
            planned_gains[-1] = 1 - zb.simulate(with_numbers(planned, ahead.order), priced).span / ordered
    found = {f"{key}_ms": round(1000 * statistics.median(values), 2) if values else None for key, values in taken.items()}
    return {
        "schedule": name,
        **found,
        "most_processor_ms": round(1000 * max(taken["processor"]), 1),
        "gain_percent": round(100 * statistics.median(ordered_gains), 1),
        "planned_of_20": len(taken["compiling"]),
        "planned_gain_percent": round(100 * statistics.median(planned_gains), 1),
    }


if __name__ == "__main__":
    main()
