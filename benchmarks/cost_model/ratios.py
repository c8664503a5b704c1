"""Ratios between published runs of one source: what another schedule, placement, or number or size of microbatches gains.

A ratio cancels what a data sheet does not say, such as the speed that products sustain. Throughputs of the Zero Bubble paper on 8 to 32
A100 are estimated from data sheets with the constants of `zb.cost_model`; nothing is fitted. The runs were not known when these were
chosen. ZB schedules step the optimizer without a barrier, so their step takes the period; that of others is the makespan. The figures are
arithmetic, equal on every machine. Writes `ratios.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import zerobubble as zb
from zerobubble.simulation import period

sys.path.insert(0, str(Path(__file__).parent))
from figures import rounded
from zero_bubble import BUBBLES, DOUBLED, FEW, RUNS, SHAPES, Run, model_of

WITHIN, WITHIN_RATIO = 0.06, 0.03
PLACEMENTS = "interleaved-1f1b", "zb-v"
"""Schedules with several stages per rank."""
CLAIMED = "microbatches", "schedules", "size_of_microbatches"
"""The kinds of ratios whose mean error is within `WITHIN_RATIO`, as is the mean of all. The page says why the other two are not."""


def main() -> None:
    """Compare everything and write the tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    runs = [compare(run) for run in RUNS]
    ratios = {
        "microbatches": [ratio(*pair) for pair in more_microbatches(RUNS)],
        "schedules": [ratio(*pair) for pair in other_schedules(RUNS) if pair[1].schedule not in PLACEMENTS],
        "placements": [ratio(*pair) for pair in other_schedules(RUNS) if pair[1].schedule in PLACEMENTS],
        "size_of_microbatches": [ratio(*pair) for pair in DOUBLED],
        "few_microbatches": [ratio(*pair) for pair in FEW],
    }
    means = {name: mean_error(rows) for name, rows in ratios.items()}
    mean = mean_error(row for rows in ratios.values() for row in rows)
    results = {
        "source": "arXiv 2401.10241v1, tables 4 and 6; held out: tables 7 (size_of_microbatches) and 12 (few_microbatches)",
        "num_ratios": {name: len(rows) for name, rows in ratios.items()},
        "mean_error_of_ratios": mean,
        "mean_errors_of_ratios": means,
        "mean_errors_by_schedule": by_schedule([*ratios["schedules"], *ratios["placements"]]),
        "num_runs": len(runs),
        "mean_error_of_runs": mean_error(runs),
        "worst_error_of_runs": max((row["error"] for row in runs), key=abs),
        "holds": max(mean, *(means[name] for name in CLAIMED)) <= WITHIN_RATIO and mean_error(runs) <= WITHIN,
        "ratios": ratios,
        "runs": runs,
    }
    Path(__file__).with_name("ratios.json").write_text(json.dumps(rounded(results), indent=1) + "\n")
    print(json.dumps(rounded({name: value for name, value in results.items() if name not in ("ratios", "runs")}), indent=1))


@cache
def estimate(model: str, ranks: int, microbatch: int, v: int) -> Any:
    """The estimate of a model, with one layer less in the first and in the last stage, as in the paper."""
    shape, stages = SHAPES[model], ranks * v
    layers = [(shape.layers + 2) // stages] * stages
    layers[0], layers[-1] = layers[0] - 1, layers[-1] - 1
    return zb.cost_model.transformer(model_of(model), gpu="A100", pp=ranks, v=v, microbatch=microbatch, layers=layers)


@cache
def ours(model: str, ranks: int, microbatch: int, microbatches: int, schedule: str) -> float:
    """Samples per second and GPU."""
    v = {"interleaved-1f1b": SHAPES[model].v, "zb-v": 2}.get(schedule, 1)
    found = estimate(model, ranks, microbatch, v)
    played = within_2p(found.costs, ranks, microbatches) if schedule == "zb-2p" else zb.make(schedule, ranks, microbatches, v)
    step, seconds = found.step(played), 0.0
    if schedule.startswith("zb"):
        seconds = step.update + period(played, found.costs) / 1e9 * found.efficiency.slowest_of(ranks)
    return microbatch * microbatches / (seconds or step.seconds) / ranks


def within_2p(costs: zb.Costs, ranks: int, microbatches: int) -> zb.Schedule:
    """The best published schedule with one stage per rank that holds at most 2p microbatches, the limit of ZB-2p."""
    limits = zb.Limits((2 * ranks * max(costs.held_after_f),) * ranks)
    return zb.planning.solve(zb.planning.Problem(zb.Placement.linear(ranks), microbatches, costs, limits), evaluations=0).schedule


def compare(run: Run) -> dict[str, Any]:
    """Samples per second and GPU, ours and published."""
    samples = ours(*run[1:6])
    return run._asdict() | {"ours": samples, "error": samples / run.samples - 1}


def ratio(before: Run, after: Run) -> dict[str, Any]:
    """The gain from one run to another, ours and published, and by the authors' bubble rates if they have both."""
    published, gained = after.samples / before.samples, ours(*after[1:6]) / ours(*before[1:6])
    changed = {name: [a, b] for name, a, b in zip(Run._fields[3:6], before[3:6], after[3:6], strict=True) if a != b}
    row = {"table": after.table, "model": after.model, "ranks": after.ranks, "schedule": after.schedule}
    row |= {"microbatches": after.microbatches} | changed | {"published": published, "ours": gained, "error": gained / published - 1}
    rates = bubble(before), bubble(after)
    if before.schedule != after.schedule and None not in rates:
        row["by_authors_bubbles"] = (1 - rates[1]) / (1 - rates[0])
    return row


def bubble(run: Run) -> float | None:
    """The authors' bubble rate of a run; None without one."""
    counts = sorted(other.microbatches for other in RUNS if other[1:4] == run[1:4] and other.schedule == run.schedule)
    rates = BUBBLES.get(run[1:4], {}).get(run.schedule)
    return None if rates is None or run.microbatches not in counts else rates[counts.index(run.microbatches)]


def more_microbatches(runs: Iterable[Run]) -> Iterator[tuple[Run, Run]]:
    """Each run, with the run of the same schedule that has the fewest microbatches."""
    fewest: dict[Any, Run] = {}
    for run in runs:
        first = fewest.setdefault((*run[:4], run.schedule), run)
        if first is not run:
            yield first, run


def other_schedules(runs: Iterable[Run]) -> Iterator[tuple[Run, Run]]:
    """Each run, with that of 1F1B."""
    usual = {run[:5]: run for run in runs if run.schedule == "1f1b"}
    for run in runs:
        if run.schedule != "1f1b":
            yield usual[run[:5]], run


def by_schedule(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean errors of ratios to 1F1B, ours and of the authors' bubble rates."""
    rows = list(rows)
    names = dict.fromkeys(row["schedule"][1] for row in rows)
    of = {name: [row for row in rows if row["schedule"][1] == name] for name in names}
    return {
        name: {
            "ours": mean_error(some),
            "by_authors_bubbles": fmean(abs(row["by_authors_bubbles"] / row["published"] - 1) for row in some),
        }
        for name, some in of.items()
    }


def mean_error(rows: Iterable[dict[str, Any]]) -> float:
    return fmean(abs(row["error"]) for row in rows)


if __name__ == "__main__":
    main()
