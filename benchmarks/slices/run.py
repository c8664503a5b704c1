"""Slices of a sequence: the period of the best plan with each number of slices, next to the published schedules over slices.

Writes `results.json` next to this file: the model of 6.2B parameters of the Zero Bubble paper on 8 ranks, with the memory of 4 sequences.
With `attention`, attention between tokens takes 20 % of F and 30 % of B, so later slices take longer. Periods are in ms. One thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.simulation import peak_memory, period

WORK = zb.Workload.uniform(8, (29.718, 29.444, 19.927), 0.527, held=0.941)
MICROBATCHES, SLICES = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
PLACEMENTS = {"linear": ("1f1b", "zb-h1"), "vee": (), "looped-2": ("interleaved-1f1b",)}
ATTENTION = {"equal": (0.0, 0.0), "attention": (0.2, 0.3)}
MEMORY = 4
RESULTS = Path(__file__).with_name("results.json")


def published(name: str, microbatches: int, slices: int, attention: tuple[float, float]) -> float | None:
    """The period of a published schedule over slices; None if it needs more slices or memory."""
    try:
        schedule = zb.make(name, 8, microbatches, **({"slices": slices} if slices > 1 else {}))
    except InputError:
        return None
    costs = WORK.costs(schedule.placement)
    costs = costs.sliced(slices, attention=attention) if slices > 1 else costs
    limits = WORK.limits(MEMORY).memory
    fits = all(peak <= limit for peak, limit in zip(peak_memory(schedule, costs), limits, strict=True))
    return round(period(schedule, costs) / 1e6, 1) if fits else None


def cases(evaluations: int) -> Iterator[dict[str, Any]]:
    for kind, attention in ATTENTION.items():
        for microbatches in MICROBATCHES:
            for slices in SLICES:
                for placement, names in PLACEMENTS.items():
                    given = {"attention": attention} if slices > 1 else {}
                    found = zb.plan(WORK, microbatches, MEMORY, placements=placement, slices=slices, evaluations=evaluations, **given)
                    yield {
                        "times": kind,
                        "microbatches": microbatches,
                        "slices": slices,
                        "placement": placement,
                        "period_ms": round((found.time or 0) / 1e6, 1),
                        "bound_ms": round(found.bound.time / 1e6, 1),
                        "peak_microbatches": round(found.peak_microbatches or 0.0, 3),
                        "published_ms": {name: published(name, microbatches, slices, attention) for name in names},
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=3_000, help="schedules that each plan plays")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = []
    for case in cases(options.evaluations):
        found.append(case)
        print(json.dumps(case), flush=True)
    options.output.write_text(json.dumps({"evaluations": options.evaluations, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
