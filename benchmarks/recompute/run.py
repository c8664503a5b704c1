"""Plans that choose what to recompute, compared with none, with full recomputation, and with the exact optimum.

Writes `results.json` next to this file. `cases`: 24 microbatches on 8 ranks with a fraction of the memory of 1F1B; spans as multiples of
the work of a rank without R: `without`, `full`, `plan` and `bound`, and those of a prototype (`target`). `exact`: random small problems,
whose optimum over all orders and all choices of fully recomputed forwards comes from CP-SAT; `gap` is the plan over it. Plans have budgets
in evaluations and CP-SAT in its deterministic seconds, so that results do not depend on the machine. Optima in the file are kept.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from ortools.sat.python import cp_model

import zerobubble as zb
from zerobubble.costs import FULL
from zerobubble.planning.axes.recompute import RecomputeSavings
from zerobubble.planning.placements import family

TIMES = {"6.2B": ((29.802, 29.428, 19.530), 0.577), "1.5B": ((18.522, 18.086, 9.337), 0.601)}
TARGETS = {
    "6.2B": {0.25: 1.35, 0.375: 1.26, 0.5: 1.14, 0.625: 1.08, 0.75: 1.07},
    "1.5B": {0.25: 1.39, 0.375: 1.30, 0.5: 1.17, 0.625: 1.11, 0.75: 1.09},
}
"""What the prototype reached on vee, as multiples of the work."""

SMALL = 100_000
"""The most evaluations for a small problem, which take a fifth of a second."""

PROOF = 30
"""CP-SAT's deterministic seconds for an optimum."""


def case(model: str, share: float, evaluations: int) -> dict[str, float | bool | None]:
    """The spans of one case over the work of a rank."""
    times, comm = TIMES[model]
    work = zb.Workload.uniform(8, times, comm)
    found = zb.plan(work, 24, 8 * share, placements="vee", recompute="auto", evaluations=evaluations)
    savings, target = found.saving(RecomputeSavings), TARGETS[model][share]
    assert isinstance(savings, RecomputeSavings)
    assert found.time is not None
    per_rank = found.problem.work / 8
    full = None if savings.full is None or savings.full.time is None else round(savings.full.time / per_rank, 4)
    planned = round(found.time / per_rank, 4)
    return {
        "without": None if savings.without.time is None else round(savings.without.time / per_rank, 4),
        "full": full,
        "plan": planned,
        "bound": round(found.bound.time / per_rank, 4),
        "target": target,
        "holds": planned <= target,
    }


def small_problem(seed: int) -> tuple[zb.Placement, int, zb.Costs, zb.Limits]:
    """A placement with few passes, unequal stages and room for one to three microbatches."""
    dice = Random(seed)
    placement = family(dice.choice(("linear", "vee")), 2) if seed % 3 else family("linear", 3)
    stages = placement.num_stages
    columns = [[dice.randint(2, 9) for _ in range(stages)] for _ in range(3)]
    costs = replace(zb.Costs.from_ms(*columns, comm=dice.choice((0, 1, 2))), placement=placement)
    room = dice.uniform(1.1, 2.6)
    limits = zb.Limits((round(room * 1_000_000 * stages / placement.num_ranks),) * placement.num_ranks)
    return placement, 2 if stages == 4 else 3, costs, limits


def exact_span(placement: zb.Placement, microbatches: int, costs: zb.Costs, limits: zb.Limits) -> int | None:
    """The least span in ns over all orders and all choices of forwards computed again in full; None where it is not proven in time."""
    model, again = cp_model.CpModel(), costs.with_recompute(FULL)
    unit = 1_000_000
    horizon = microbatches * sum(map(sum, (costs.forward, costs.backward, costs.weight, costs.forward, costs.comm))) // unit
    home, stages = placement.routes[0], placement.num_stages
    busy: dict[int, list[cp_model.IntervalVar]] = {rank: [] for rank in range(placement.num_ranks)}
    held: dict[int, list[tuple[cp_model.IntervalVar, int]]] = {rank: [] for rank in range(placement.num_ranks)}
    start: dict[tuple[str, int, int], cp_model.IntVar] = {}
    time = {"F": costs.forward, "R": again.column("recompute"), "B": costs.backward, "W": costs.weight}

    def end(kind: str, stage: int, j: int) -> cp_model.LinearExprT:
        return start[kind, stage, j] + time[kind][stage] // unit

    def hold(rank: int, begin: cp_model.LinearExprT, stop: cp_model.LinearExprT, size: int, when: cp_model.LiteralT, name: str) -> None:
        length = model.new_int_var(0, horizon, f"length {name}")
        held[rank].append((model.new_optional_interval_var(begin, length, stop, when, name), size))

    for stage in range(stages):
        rank = home[stage]
        for j in range(microbatches):
            chosen, key = model.new_bool_var(f"again {stage} {j}"), f"{stage} {j}"
            for kind in "FRBW":
                start[kind, stage, j] = model.new_int_var(0, horizon, f"{kind} {key}")
                size = time[kind][stage] // unit
                when: cp_model.LiteralT = chosen if kind == "R" else 1
                busy[rank].append(model.new_optional_fixed_size_interval_var(start[kind, stage, j], size, when, f"{kind} {key}"))
            model.add(start["B", stage, j] >= end("F", stage, j))
            model.add(start["W", stage, j] >= end("B", stage, j))
            model.add(start["R", stage, j] >= end("F", stage, j)).only_enforce_if(chosen)
            model.add(start["B", stage, j] >= end("R", stage, j)).only_enforce_if(chosen)
            saved, kept, pending = costs.held_after_f[stage], again.column("held_input")[stage], costs.held_after_b[stage]
            first, last = start["F", stage, j], end("B", stage, j)
            hold(rank, first, last, saved, chosen.negated(), f"plain {key}")
            hold(rank, first, start["R", stage, j], kept, chosen, f"kept {key}")
            hold(rank, start["R", stage, j], last, saved, chosen, f"all {key}")
            hold(rank, last, end("W", stage, j), pending, 1, f"pending {key}")
            if j:
                model.add(start["F", stage, j] >= end("F", stage, j - 1))
                model.add(start["B", stage, j] >= end("B", stage, j - 1))
    for stage in range(stages - 1):
        lag = costs.comm[stage] // unit if home[stage] != home[stage + 1] else 0
        for j in range(microbatches):
            model.add(start["F", stage + 1, j] >= end("F", stage, j) + lag)
            model.add(start["B", stage, j] >= end("B", stage + 1, j) + lag)
    span = model.new_int_var(0, horizon, "span")
    for rank in range(placement.num_ranks):
        model.add_no_overlap(busy[rank])
        intervals, sizes = zip(*held[rank], strict=True)
        model.add_cumulative(intervals, sizes, limits.memory[rank])
        own = [stage for stage in range(stages) if home[stage] == rank]
        for stage in own:
            for j in range(microbatches):
                model.add(span >= end("W", stage, j) - start["F", own[0], 0])
    model.minimize(span)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = PROOF
    solver.parameters.num_workers = 2
    return round(solver.objective_value) * unit if solver.solve(model) == cp_model.OPTIMAL else None


def exact(seed: int, evaluations: int, known: float | None) -> dict[str, float | str]:
    """A small problem: its optimum, the plan and the bound in ms; `known` is the optimum where it has been proven before."""
    problem = small_problem(seed)
    placement, microbatches, costs, limits = problem
    found = zb.plan(costs, microbatches, limits, recompute="auto", levels=[FULL], evaluations=evaluations)
    optimum = exact_span(*problem) if known is None else round(known * 1e6)
    if found.time is None or optimum is None:
        return {"placement": placement.name, "result": found.reason or "no optimum is proven in time"}
    assert found.bound.time <= optimum <= found.time, problem
    gap = round(100 * (found.time / optimum - 1), 2)
    figures = {"optimum": optimum / 1e6, "plan": found.time / 1e6, "bound": found.bound.time / 1e6}
    return {"placement": placement.name, **figures, "gap_percent": gap}


def measured(job: tuple[str, str, float, int, float | None]) -> dict[str, Any]:
    """The figures of a job: its part, the model or number, the share of the memory, the evaluations, and the optimum if it is known."""
    part, name, share, evaluations, known = job
    return case(name, share, evaluations) if part == "cases" else exact(int(name), min(evaluations, SMALL), known)


def main() -> None:
    """Measure and print, line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--evaluations", type=int, default=700_000)
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    known = json.loads(options.out.read_text()).get("exact", {}) if options.out.exists() else {}
    jobs = [("cases", model, share, options.evaluations, None) for model, targets in TARGETS.items() for share in targets]
    numbers = map(str, range(options.problems))
    jobs += [("exact", number, 0.0, options.evaluations, known.get(number, {}).get("optimum")) for number in numbers]
    results: dict[str, dict[str, object]] = {}
    with ProcessPoolExecutor(options.workers) as pool:
        for (part, name, share, _, _), row in zip(jobs, pool.map(measured, jobs), strict=True):
            title = f"{name} vee {share:g}p" if part == "cases" else name
            results.setdefault(part, {})[title] = row
            print(part, title, json.dumps(row), flush=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
