"""The gap between lower bounds and optimum with recomputation, and with microbatches of unequal cost.

    python benchmarks/bounds/axes.py [--prove]

Uses random problems of `axes_small.py`. CP-SAT proved their optima without any bound of ours (`axes_optima.json`, which `--prove`
completes). Writes `axes.json` next to this file, and its figures into docs/planner.md: `over` is the optimum over the bound of a plan in %,
`simple` over the simple claims. `before` has bounds without windows, which took the level of least memory for all forwards, and counted
microbatches of unequal cost as some of the smallest cost. No time is measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from axes_small import AXES, optimum, small_problem

from zerobubble.planning.kernels.entry_points import sharper_bound

SMALL = 60
"""Small problems of each kind, by the numbers from 0 on."""

PAGE = Path(__file__).parents[2] / "docs/planner.md"
BEGIN, END = "<!-- bounds of axes: benchmarks/bounds/axes.py writes what stands here -->", "<!-- end of bounds of axes -->"

OPTIMA, RESULTS = Path(__file__).with_name("axes_optima.json"), Path(__file__).with_name("axes.json")


def rows_of(axis: str, optima: dict[str, float | None]) -> list[dict[str, Any]]:
    """The bounds of each small problem with a proven optimum, in ms and as the optimum over them in %."""
    rows = []
    for number, proven in optima.items():
        if proven is None:
            continue
        problem = small_problem(axis, int(number))
        known = problem.bound()
        simple, bound = known.time / 1e6, sharper_bound(problem, known).time / 1e6
        assert simple <= bound <= proven, f"the bound of {axis} {number} is {bound} ms, above its optimum of {proven} ms"
        where = f"{problem.placement.name}, p={problem.placement.num_ranks}, m={problem.num_microbatches}, {problem.objective}"
        gaps = {"over": over(proven, bound), "simple": over(proven, simple)}
        rows.append({"number": int(number), "problem": where, "optimum_ms": proven, "bound_ms": bound} | gaps)
    return rows


def over(time: float, bound: float) -> float:
    """How much longer than the bound, in %."""
    return round(100 * (time / bound - 1), 2)


def summary(rows: list[dict[str, Any]], column: str = "over") -> dict[str, Any]:
    """How many bounds are the optimum, and how far below it the others are, in %."""
    gaps = [row[column] for row in rows]
    return {"proven": len(gaps), "tight": gaps.count(0), "mean_over": round(sum(gaps) / len(gaps), 2), "worst_over": max(gaps)}


NAMES = {"recompute": "recomputation", "shares": "microbatches of unequal cost", "both": "both"}


def page(results: dict[str, Any]) -> str:
    """What docs/planner.md has of the results."""
    lines = [
        f"Of {SMALL} small random problems of each kind, on 2 to 4 ranks, CP-SAT proved the optimum of these:",
        "",
        "| with | problems | bound is the optimum | mean gap to the bound | largest | mean gap to claims alone | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for axis, name in NAMES.items():
        summary, simple = results[axis]["summary"], results[axis]["summary_of_simple"]
        gaps = " | ".join(f"{one[column]} %" for one in (summary, simple) for column in ("mean_over", "worst_over"))
        lines.append(f"| {name} | {summary['proven']} | {summary['tight']} | {gaps} |")
    return "\n".join(lines)


def main() -> None:
    """Work out all bounds, and prove missing optima if asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prove", action="store_true", help="prove the optima that the file lacks, which takes half an hour or so")
    options = parser.parse_args()
    optima: dict[str, dict[str, float | None]] = json.loads(OPTIMA.read_text()) if OPTIMA.exists() else {}
    for axis in AXES if options.prove else ():
        known = optima.setdefault(axis, {})
        for number in range(SMALL):
            if str(number) not in known:
                time = optimum(small_problem(axis, number))
                known[str(number)] = None if time is None else time / 1e6
                OPTIMA.write_text(json.dumps(optima, indent=1) + "\n")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for axis, proven in optima.items():
        rows = rows_of(axis, proven)
        before = results.get(axis, {}).get("before", summary(rows))
        results[axis] = {"before": before, "summary": summary(rows), "summary_of_simple": summary(rows, "simple"), "small": rows}
        print(axis, json.dumps({name: results[axis][name] for name in ("before", "summary", "summary_of_simple")}), flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    start, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{start}{BEGIN}\n{page(results)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
