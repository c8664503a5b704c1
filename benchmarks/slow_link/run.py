"""A link that degrades while `zb.Auto` trains: its steps compared with those of 1F1B, ZB-H1 and the previous plan over the same link.

Passes sleep, and every message over the link between the middle ranks takes a random time. Writes `results.json` next to this file;
read the ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import zerobubble as zb
from zerobubble.replanning import auto

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
from peers import delay_messages, mean_square
from ranks import in_ranks, machine, show
from stages import SleepingStage

RANKS, MICROBATCHES, PASS_MS = 4, 16, 4.0
LATEST_MS = (4.0, 12.0, 24.0)
"""By how much a message over the bad link is late at most; each is late by a random part of it."""
STEPS = 15
"""Steps of each that are measured, by turns."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    rows = [show(in_ranks(bad_link, RANKS, latest, limited)) for limited in (False, True) for latest in LATEST_MS]
    held = {"auto_over_1f1b": max(row["auto_over_1f1b"] for row in rows)}
    Path(__file__).with_name("results.json").write_text(json.dumps({"machine": machine(), "rows": rows, "most": held}, indent=1) + "\n")


def bad_link(latest_ms: float, limited: bool) -> dict[str, Any]:
    """Train until there is a plan, let the link turn bad, train until its plan has won or lost, and measure.

    Where `limited`, the plans may hold what 1F1B holds.
    """
    auto.SECONDS, auto.REVIEW = 2.0, 5
    late, draws = [0.0], random.Random(dist.get_rank())
    delay_messages(lambda channel: draws.random() * late[0] if {channel.source, channel.destination} == {1, 2} else 0.0)
    pipe = pipeline(zb.Auto(memory=held_by_1f1b() if limited else None))
    steps_until(pipe, lambda: settled(pipe))
    before = pipe.schedule
    late[0] = latest_ms / 1000
    chosen = after_bad_link(pipe)
    auto.REVIEW = 1_000_000  # it would look again while the others are measured
    pipes = {"auto": pipe, "before": pipeline(before), "1f1b": pipeline("1f1b"), "zb-h1": pipeline("zb-h1")}
    took: dict[str, list[float]] = {name: [] for name in pipes}
    for turn in range(STEPS + 1):
        for name, each in pipes.items():
            seconds = step(each)
            took[name] += [seconds] * (turn > 0)
    for each in pipes.values():
        each.close()
    ms = {name: round(1000 * median(times), 1) for name, times in took.items()}
    ratios = {f"{name}_over_1f1b": round(ms[name] / ms["1f1b"], 4) for name in ("auto", "before", "zb-h1")}
    row = {"latest_ms": latest_ms, "limited": limited, "pass_ms": PASS_MS, "chosen": chosen}
    return row | {f"{name}_ms": value for name, value in ms.items()} | ratios


def pipeline(schedule: Any) -> zb.Pipeline:
    return zb.Pipeline(lambda stage, num_stages: SleepingStage((PASS_MS / 1000,) * 3), schedule, MICROBATCHES, mean_square)


def held_by_1f1b() -> list[int]:
    """The bytes of each rank, messages included."""
    with pipeline("1f1b") as pipe:
        data = torch.zeros(MICROBATCHES, 16)
        return [rank.total for rank in pipe.memory_forecast(pipe.profile(data, data, steps=1))]


def step(pipe: zb.Pipeline) -> float:
    """Seconds from the first rank's call to the last one's return."""
    data = torch.zeros(MICROBATCHES, 16)
    dist.barrier()
    begin = time.perf_counter()
    pipe.step(data, data)
    mine = torch.tensor([begin, time.perf_counter()], dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(ranks, mine)
    return (max(rank[1] for rank in ranks) - min(rank[0] for rank in ranks)).item()


def steps_until(pipe: zb.Pipeline, is_true: Any, most: int = 400) -> None:
    """Steps until it is true on rank 0."""
    for _ in range(most):
        step(pipe)
        said = torch.tensor([float(is_true())])
        dist.broadcast(said, 0)
        if said.item():
            return
    raise RuntimeError(f"nothing came of {most} steps")


def settled(pipe: zb.Pipeline) -> bool:
    """Whether a search's answer is played."""
    return pipe.plan is not None and pipe.plan.how != "published"


def after_bad_link(pipe: zb.Pipeline) -> str:
    """The name of the schedule that is played when the bad link was met by a plan, and that by what is measured."""
    steps_until(pipe, lambda: pipe.plan is not None and "measured" in pipe.plan.how)
    return pipe.schedule.name


if __name__ == "__main__":
    main()
