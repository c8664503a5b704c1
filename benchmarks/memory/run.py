"""Predicted peak activation memory compared with the bytes held in a training step, rank by rank.

A GPT is profiled once per schedule, which is simulated with the profile. Then one step trains with our meter, which counts storages, and
one with torch's allocator statistics. Shared memory for messages is predicted and reported separately. Bytes are equal on every machine.
Writes `results.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from allocator import Peak, peak_of
from gpt import GPTConfig, build_stage, loss_fn
from ranks import in_ranks, machine, show

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v", "v-half", "v-min")
RANKS, MICROBATCHES, MICROBATCH_SIZE = 4, 8, 2
MODEL = GPTConfig(layers=8, width=128, heads=4, context=64)
WITHIN = 0.05


def main() -> None:
    """Compare every schedule and write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [show(in_ranks(compare, RANKS, None, name)) for name in SCHEDULES]
    worst = max(abs(error) for row in rows for error in row["errors"])
    results = {"machine": machine(), "worst_error": worst, "holds": worst <= WITHIN, "schedules": rows}
    Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n")


def compare(group: Any, name: str, config: GPTConfig = MODEL, split: str = "deferred") -> dict[str, Any]:
    """Peak bytes per rank of schedule `name`: predicted, metered, and allocated between two actions and at any moment; those for messages.

    The errors are those of the prediction, relative to what is allocated between two actions and to what is metered.
    """
    tokens = torch.randint(0, 256, (MICROBATCHES * MICROBATCH_SIZE, config.context + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with zb.Pipeline(lambda s, n: build_stage(config, s, n), name, MICROBATCHES, loss_fn, group=group, split=split) as pipe:
        forecasts = pipe.memory_forecast(pipe.profile(inputs, targets, steps=1))
        predicted = [rank.activations for rank in forecasts]
        pipe.step(inputs, targets)
        pipe.metering = True
        pipe.step(inputs, targets)
        metered = [figures.peak_bytes or 0 for figures in pipe.timeline().ranks]
        pipe.metering = False
        peaks = [Peak(0, 0)] * len(metered)
        dist.all_gather_object(peaks, peak_of(pipe, lambda: pipe.step(inputs, targets)), group)
        messages = [0] * len(metered)
        dist.all_gather_object(messages, pipe.transport.held_bytes, group)
    allocated, within = ([getattr(peak, what) for peak in peaks] for what in Peak._fields)
    row = {"name": name, "predicted": predicted, "metered": metered, "allocated": allocated, "allocated_within_passes": within}
    row |= {"predicted_for_messages": [rank.messages for rank in forecasts], "held_for_messages": messages}
    return row | {"errors": _errors(predicted, allocated), "errors_of_metered": _errors(predicted, metered)}


def _errors(predicted: Sequence[int], found: Sequence[int]) -> list[float]:
    return [round(predicted_bytes / held - 1, 4) for predicted_bytes, held in zip(predicted, found, strict=True)]


if __name__ == "__main__":
    main()
