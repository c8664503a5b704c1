"""Plans of overlapped pairs against DualPipe and a naive annealer: makespans in ms, and the bound.

`python benchmarks/planner/overlap.py` writes overlap.json. F, B and W take 10, 10 and 6 ms on a rank, and F of one microbatch with BW of
another takes `pair_ms`. A rank has two stages, in memory of p + 1 microbatches. The annealer takes an F and a B that are next to each other
as one step; it began with dualpipe-v and ran for 30 to 60 s.
"""

import json
import platform
import time
from pathlib import Path

import zerobubble as zb
from zerobubble.costs import UNIT_BYTES

CASES = ((8, 24, 18, 540.6, 3_000_000), (8, 24, 20, 576.6, 3_000_000), (16, 64, 18, 1393.2, 300_000))
"""Ranks, microbatches, ms of a pair, ms of the annealer, and evaluations of each seed."""

SEEDS = (0, 1)


def measured(ranks: int, microbatches: int, pair_ms: int, annealer_ms: float, evaluations: int) -> dict[str, object]:
    """The row of one case; each plan is checked by the simulator."""
    costs = zb.Costs.uniform(2 * ranks, (10, 10, 6), stages_per_rank=2, overlap=pair_ms)
    limits = zb.Limits((2 * (ranks + 1) * UNIT_BYTES,) * ranks)
    begin, found = time.process_time(), []
    for seed in SEEDS:
        plan = zb.plan(
            *(costs, microbatches, limits),
            placements=zb.Placement.vee(ranks),
            objective="makespan",
            evaluations=evaluations,
            seed=seed,
        )
        assert not zb.schedule_faults(plan.schedule)
        assert not zb.simulation.memory_faults(plan.schedule, costs, limits)
        found.append(zb.simulate(plan.schedule, costs).makespan / 1e6)
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "pair_ms": pair_ms,
        "dualpipe_v_ms": zb.simulate(zb.make("dualpipe-v", ranks, microbatches), costs).makespan / 1e6,
        "annealer_ms": annealer_ms,
        "plan_ms": found,
        "best_over_annealer": round(min(found) / annealer_ms, 4),
        "bound_ms": plan.bound.time / 1e6,
        "evaluations": evaluations,
        "processor_s": round(time.process_time() - begin, 1),
    }


def main() -> None:
    """Plan each case, print it and write the table."""
    rows = []
    for case in CASES:
        rows.append(measured(*case))
        print(rows[-1], flush=True)
    machine = {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    Path(__file__).with_suffix(".json").write_text(json.dumps({"machine": machine, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
