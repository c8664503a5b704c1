"""Offload of activations: its published cost, the time in half the memory, and the quality of plans.

Writes `results.json` next to this file. `k`: the time to copy the activations of a layer to the host and back, over its compute time, by
the formula of PipeOffload (arXiv 2503.01328, section 2), compared with its figure 1 (A100 at 220 TFLOP/s, 15 GB/s); `off` in %. `half`:
schedules in half of their own memory, for links of several k; `longer` is the makespan over that with unlimited memory, in %; `moved` and
`must` are the fractions of waiting activations that are offloaded, and that must be; `within_half` are published schedules that fit
without offload, including 1F1B with full recomputation. `exact`: small problems, compared with all choices on their first rank; `gap` is
the makespan over the best, in %. `plans`: the result of `zb.plan` with a host, a memory (in microbatches) and a k, compared with its best
without offload, and with its lower bound over all orders and offloads; `over` is the makespan over that bound, in %. Everything is
simulated, with budgets in evaluations: results do not depend on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import zerobubble as zb
from zerobubble.costs import FULL
from zerobubble.offload import HostLink, Offload, RankOffloads, offload_faults, plan_offloads, play_offloads
from zerobubble.planning.axes.host import OffloadSavings

FLOPS, RATE = 220e12, 15e9
"""FLOP/s and bytes a second, as in the paper's figure."""
LENGTHS = (4096, 8192, 16384, 32768)
PUBLISHED = {
    4096: (1.7, 1.46, 1.15, 0.8),
    5120: (1.4, 1.23, 1.0, 0.72),
    6144: (1.19, 1.07, 0.88, 0.66),
    7168: (1.03, 0.94, 0.8, 0.61),
    8192: (0.92, 0.84, 0.72, 0.56),
    10240: (0.74, 0.69, 0.61, 0.49),
}
"""Figure 1, by hidden size and sequence length."""
RANKS, MICROBATCHES = 8, 24
SCHEDULES = ("1f1b", "interleaved-1f1b", "1f1b-v", "gis")
KS = (0.5, 1.0, 1.5, 2.0)
TIMES = (10, 10, 10)
"""F, B and W of a rank in ms."""
HALF = ("v-half", "v-min", "gis-h")
SMALL = 40
MEMORIES = (2, 3, 4)
"""Microbatches of a rank that plans may hold."""


def ratio(hidden: int, length: int) -> float:
    """k of a transformer layer: 10 / (3 (6 h + s)) times FLOP/s over bytes a second."""
    return 10 / (3 * (6 * hidden + length)) * FLOPS / RATE


def ratios() -> list[dict[str, float]]:
    """The formula compared with the figure."""
    rows = []
    for hidden, published in PUBLISHED.items():
        for length, figure in zip(LENGTHS, published, strict=True):
            k = ratio(hidden, length)
            rows.append(
                {"hidden": hidden, "length": length, "k": round(k, 3), "published": figure, "off": round(100 * (k / figure - 1), 1)}
            )
    return rows


def halved(name: str, k: float) -> tuple[zb.Schedule, zb.Costs, tuple[RankOffloads, ...], HostLink]:
    """A schedule with its costs, what moves so that it keeps within half of what it holds by itself, and the link, for this k."""
    schedule = zb.make(name, RANKS, MICROBATCHES)
    costs = zb.Costs.uniform(schedule.num_stages, TIMES, stages_per_rank=schedule.placement.stages_per_rank)
    limits = zb.Limits((max(zb.simulation.peak_memory(schedule, costs)) // 2,) * RANKS)
    stage_ns = sum(costs.time(kind, 0) for kind in (zb.Kind.F, zb.Kind.B, zb.Kind.W))
    rate = 2 * costs.held_after_f[0] * 1e9 / (k * stage_ns)
    link = HostLink(rate, rate)
    return schedule, costs, plan_offloads(schedule, costs, limits, link, evaluations=100), link


def half(name: str) -> dict[str, Any]:
    """A schedule within half of its memory, for each k."""
    rows = []
    for k in KS:
        schedule, costs, plans, link = halved(name, k)
        free = zb.simulation.metrics(schedule, costs).makespan
        waits = sum(costs.held_after_f) * MICROBATCHES
        makespan = play_offloads(schedule, costs, plans, link).makespan
        moved, must = (sum(getattr(plan, what) for plan in plans) / waits for what in ("bytes", "bound"))
        rows.append({"k": k, "longer": round(100 * (makespan / free - 1), 2), "moved": round(moved, 3), "must": round(must, 3)})
        print(name, rows[-1], flush=True)
    peak = max(zb.simulation.peak_memory(schedule, costs)) / (10**6 * schedule.placement.stages_per_rank)
    return {"schedule": name, "peak_microbatches": peak, "makespan_ms": free / 1e6, "links": rows}


def within_half() -> list[dict[str, Any]]:
    """Schedules without offload, with what they hold in microbatches of a rank, and how long they take."""
    rows = []
    for name in HALF:
        schedule = zb.make(name, RANKS, MICROBATCHES)
        per_rank = schedule.placement.stages_per_rank
        rows.append(half_row(name, schedule, zb.Costs.uniform(schedule.num_stages, TIMES, stages_per_rank=per_rank), per_rank))
    again = zb.schedules.with_recompute(zb.make("1f1b", RANKS, MICROBATCHES))
    rows.append(half_row("1f1b, all computed again", again, zb.Costs.uniform(RANKS, TIMES).with_recompute(FULL), 1))
    return rows


def half_row(name: str, schedule: zb.Schedule, costs: zb.Costs, per_rank: int) -> dict[str, Any]:
    """The figures of a schedule."""
    peak = max(zb.simulation.peak_memory(schedule, costs)) / (10**6 * per_rank)
    return {"schedule": name, "peak_microbatches": round(peak, 3), "makespan_ms": zb.simulation.metrics(schedule, costs).makespan / 1e6}


def planned(memory: float, k: float) -> dict[str, Any]:
    """What is planned within the memory of so many microbatches for a link of this k."""
    work = zb.Workload.uniform(RANKS, TIMES)
    rate = 2 * 12e6 * 1e3 / (k * sum(TIMES))  # a rank keeps 12 MB for a microbatch
    found = zb.plan(work, MICROBATCHES, memory, host=HostLink(rate, rate), placements=["linear", "vee", "looped-2"], evaluations=20_000)
    savings = found.saving(OffloadSavings)
    assert savings is not None
    assert found.makespan is not None
    took, bound = found.makespan, savings.bound.time
    without = None if savings.without is None else savings.without / 1e6
    row = {"memory": memory, "k": k, "without_ms": without, "plan_ms": took / 1e6, "bound_ms": bound / 1e6, "how": found.how}
    print(row, flush=True)
    return row | {"over": round(100 * (took / bound - 1), 2)}


def choices(schedule: zb.Schedule) -> Iterator[tuple[Offload, ...]]:
    """All that the first rank could move, in all ways."""
    place = {op: number for number, step in enumerate(schedule.steps[0]) for op in step}
    ways: list[list[Offload | None]] = []
    for op, made in place.items():
        if op.kind is zb.Kind.F:
            needed = min(place[other] for other in place if other[1:] == op[1:] and other.kind in ("B", "BW"))
            windows = [(freed, back) for freed in range(made + 1, needed) for back in range(freed + 1, needed + 1)]
            ways.append([None, *(Offload(op.stage, op.microbatch, made, freed, back, needed) for freed, back in windows)])
    for chosen in product(*ways):
        yield tuple(one for one in chosen if one is not None)


def exact(seed: int) -> dict[str, Any]:
    """A random small problem: the plan against the best of all choices on the first rank."""
    draw = Random(seed)
    name, ranks, microbatches = draw.choice((("1f1b", 2, 4), ("1f1b", 3, 3), ("1f1b", 2, 6), ("zb-h1", 2, 4), ("gpipe", 2, 3)))
    schedule = zb.make(name, ranks, microbatches)
    costs = zb.Costs.from_ms(*([draw.randint(2, 8) for _ in range(ranks)] for _ in range(3)))
    link = HostLink(draw.choice((1e8, 2e8, 5e8)), draw.choice((1e8, 2e8, 5e8)))
    peaks = zb.simulation.peak_memory(schedule, costs)
    limits = zb.Limits((peaks[0] - 10**6, *peaks[1:]))
    plans = plan_offloads(schedule, costs, limits, link)
    found = play_offloads(schedule, costs, plans, link).makespan
    nothing = [RankOffloads((), 0, 0, 0, 0)] * (ranks - 1)
    best, fewest = found, plans[0].bytes
    for offloads in choices(schedule):
        given = [RankOffloads(offloads, 0, 0, 0, 0), *nothing]
        if not offload_faults(schedule, costs, given, limits):
            best = min(best, play_offloads(schedule, costs, given, link).makespan)
            fewest = min(fewest, len(offloads) * 10**6)
    row = {"schedule": name, "seed": seed, "plan_ms": found / 1e6, "best_ms": best / 1e6, "gap": round(100 * (found / best - 1), 2)}
    return row | {"bound_is_met": plans[0].bound == fewest}


def main() -> None:
    """Write the results."""
    rows = ratios()
    small = [exact(seed) for seed in range(SMALL)]
    gaps = [row["gap"] for row in small]
    results = {
        "k": {"cells": rows, "farthest_off": max(abs(row["off"]) for row in rows)},
        "exact": {
            "optimal": sum(gap == 0 for gap in gaps),
            "of": len(small),
            "largest_gap": max(gaps),
            "bounds_met": sum(row["bound_is_met"] for row in small),
            "cases": small,
        },
        "half": {
            "ranks": RANKS,
            "microbatches": MICROBATCHES,
            "offloaded": [half(name) for name in SCHEDULES],
            "within_half": within_half(),
        },
        "plans": [planned(memory, k) for memory in MEMORIES for k in KS],
    }
    Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
