"""The time of a rank between the last W of a step and the first F of the next: clipped at a barrier, and validated afterwards.

Passes are paced, so that ranks may share cores. Writes `results.json` next to this file. Read the ratio, not the times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import in_ranks, machine, show

RANKS, MICROBATCHES, MAX_NORM = 4, 8, 1e6
CASES = [("zb-h2", 20.0), ("zb-v", 20.0)]
"""Schedule and milliseconds of every pass."""
BLOCK = 8
"""Steps of one way before the other has its turn."""


def main() -> None:
    """Run every case in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="blocks of steps measured per case and way (%(default)s)")
    options = parser.parse_args()
    cases = [show(in_ranks(measure, RANKS, name, pass_ms, options.turns)) for name, pass_ms in CASES]
    results = {"machine": machine(), "ranks": RANKS, "microbatches": MICROBATCHES, "gaps": cases}
    Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n")


def measure(name: str, pass_ms: float, turns: int) -> dict[str, Any]:
    """Median gaps over steps and ranks, the two ways taking turns; the first turn of each warms up."""
    stages = zb.make(name, RANKS, MICROBATCHES).num_stages
    pace = zb.Costs.uniform(stages, (pass_ms,) * 3)
    gaps: dict[str, list[float]] = {"barrier": [], "validated": []}
    edges = Edges()
    with pipeline(name, pace, edges) as plain, pipeline(name, pace, edges) as held:
        inner = torch.optim.AdamW(plain.parameters())
        validated = zb.PostValidation(torch.optim.AdamW(held.parameters()), held, MAX_NORM, undo="copy")

        def at_a_barrier() -> None:
            plain.clip_grad_norm_(MAX_NORM)
            inner.step()
            inner.zero_grad()

        def afterwards() -> None:
            validated.step()
            validated.zero_grad()

        for turn in range(turns + 1):
            for way, pipe, update in (("barrier", plain, at_a_barrier), ("validated", held, afterwards)):
                found = block(pipe, edges, update)
                if turn:
                    gaps[way] += found
        assert validated.norm is not None
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, gaps)
    row: dict[str, Any] = {"schedule": name, "pass_ms": pass_ms}
    for way in gaps:
        row[f"{way}_ms"] = round(statistics.median(gap for mine in gathered for gap in mine[way]), 2)
        row[f"{way}_ms_by_rank"] = [round(statistics.median(mine[way]), 2) for mine in gathered]
    return row | {"times_smaller": round(row["barrier_ms"] / row["validated_ms"], 1)}


class Edges(zb.hooks.StepHook):
    """When the passes of each step began and ended on this rank, in ns."""

    def __init__(self) -> None:
        self.edges: list[tuple[int, int]] = []

    def on_step_end(self, step: zb.hooks.TrainingStep) -> None:
        times = step.times()
        self.edges.append((times[0][0], times[-1][1]))


def pipeline(name: str, pace: zb.Costs, edges: Edges) -> zb.Pipeline:
    def build(stage: int, num_stages: int) -> nn.Module:
        return nn.Linear(16, 16)

    return zb.Pipeline(build, name, MICROBATCHES, nn.functional.mse_loss, pace=pace, hooks=[edges])


def block(pipe: zb.Pipeline, edges: Edges, update: Any) -> list[float]:
    """Milliseconds between the steps of a block, on this rank."""
    inputs, targets = torch.randn(MICROBATCHES, 16), torch.randn(MICROBATCHES, 16)
    edges.edges.clear()
    dist.barrier()
    for _ in range(BLOCK):
        pipe.step(inputs, targets)
        update()
    return [(begin - end) / 1e6 for (_, end), (begin, _) in pairwise(edges.edges)]


if __name__ == "__main__":
    main()
