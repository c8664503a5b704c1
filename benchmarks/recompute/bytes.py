"""Memory of ranks in steps with recomputation compared with the prediction from one profile, and whether all numbers are equal.

A GPT on four ranks is profiled once per schedule, with the levels of its stages. From that alone, the bytes at the peak of each rank are
predicted without recomputation, with attention, MLPs or everything recomputed, and with different levels in neighboring stages. The same
steps then run. Bytes are those of our meter, which counts held storages, and are equal on every machine. Writes `bytes.json` next to this
file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zerobubble as zb
from zerobubble.costs import NONE
from zerobubble.schedules import with_recompute

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPTConfig, build_stage, loss_fn
from ranks import equal_on_all_ranks, in_ranks, machine, show, trained

SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v")
RANKS, MICROBATCHES, MICROBATCH_SIZE, STEPS = 4, 8, 2, 2
MODEL = GPTConfig(layers=8, width=128, heads=4, context=64)
PARTS = {"attention": ["*.attention"], "mlp": ["*.mlp"]}
"""The modules that each level recomputes, in addition to `none` and `full`."""

LEVELS = {
    "none": ("none",),
    "attention": ("attention",),
    "mlp": ("mlp",),
    "full": ("full",),
    "none, attention, full in turn": ("none", "attention", "full"),
    "full, mlp, attention, none in turn": ("full", "mlp", "attention", "none"),
}
"""Levels of the stages, which stage after stage takes in turn."""

WITHIN = 0.05


def main() -> None:
    """Train at every choice of levels and write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [show(row) for name in SCHEDULES for row in in_ranks(compare, RANKS, name)]
    worst = max(abs(error) for row in rows for error in row["errors"])
    holds = worst <= WITHIN and all(row["equal"] for row in rows)
    results = {"machine": machine(), "worst_error": worst, "holds": holds, "runs": rows}
    Path(__file__).with_name("bytes.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def compare(name: str) -> list[dict[str, Any]]:
    """Bytes at the peak of each rank, predicted and metered, for each choice of levels; and whether all numbers are those of `none`."""
    tokens = torch.randint(0, 256, (MICROBATCHES * MICROBATCH_SIZE, MODEL.context + 1), generator=torch.Generator().manual_seed(0))
    given = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with pipeline(name, recompute=PARTS) as pipe:
        plain, costs = pipe.schedule, pipe.profile(*given, steps=1)
    known = {level.name: level for level in (NONE, *costs.levels)}
    rows = []
    first: list[Tensor] = []
    for title, turn in LEVELS.items():
        by_stage = [turn[stage % len(turn)] for stage in range(plain.num_stages)]
        again = [stage for stage, level in enumerate(by_stage) if level != NONE.name]
        schedule = with_recompute(plain, stages=again) if again else plain
        predicted = zb.simulation.peak_memory(schedule, costs.with_recompute([known[level] for level in by_stage]))
        parts = {stage: PARTS[level] for stage, level in enumerate(by_stage) if level in PARTS}
        with pipeline(schedule, recompute={"by stage": parts} if parts else None) as pipe:
            pipe.metering = True
            numbers = trained(pipe, STEPS, *given)
            metered = [rank.peak_bytes or 0 for rank in pipe.timeline().ranks]
        first = first or numbers
        equal = equal_on_all_ranks(first, numbers)
        errors = [round(predicted_bytes / found - 1, 4) for predicted_bytes, found in zip(predicted, metered, strict=True)]
        row = {"schedule": name, "levels": title, "predicted": list(predicted), "metered": metered, "errors": errors, "equal": equal}
        rows.append(row)
    return rows


def pipeline(schedule: str | zb.Schedule, **options: Any) -> zb.Pipeline:
    return zb.Pipeline(lambda stage, stages: build_stage(MODEL, stage, stages), schedule, MICROBATCHES, loss_fn, **options)


if __name__ == "__main__":
    main()
