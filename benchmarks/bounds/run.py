"""The gap between lower bounds and the optimum of small problems, and the best known plans of large ones.

The bound is that of a plan after a minute of search: by windows where that is sharper, else by simple claims, as above 2,000 passes. Writes
`results.json` next to this file, and its figures into docs/planner.md. `small`: random problems whose optimum CP-SAT proved without any
bound of ours (`optima.json`, which `--prove` completes); `over` is the optimum over the bound in %, `simple` over the simple claims.
`large`: the profiles of the paper, with the bubbles (%) of the bound and of the best plan found (`found.json`, which
`--search 60 --seed 1` completes); `over` is its span over the bound, `simple` the bubble by the simple claims. No time is measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from small import MOST_PASSES, optimum, small_problem

import zerobubble as zb
from zerobubble.bounds import Bound
from zerobubble.planning.kernels.entry_points import sharper_bound
from zerobubble.planning.placements import family
from zerobubble.planning.problem.problem import Problem

SMALL = 300
"""Small problems, by the numbers from 0 on."""

OPTIMA = Path(__file__).with_name("optima.json")

PAGE = Path(__file__).parents[2] / "docs/planner.md"
BEGIN, END = "<!-- bounds: benchmarks/bounds/run.py writes what stands here -->", "<!-- end of bounds -->"

PROFILES = {
    "1.5B": (8, (18.522, 18.086, 9.337), 0.601),
    "6.2B": (8, (29.718, 29.444, 19.927), 0.527),
    "14.6B": (16, (11.347, 11.248, 8.132), 0.377),
}
"""Ranks and the times of F, B, W and a message of the Zero Bubble paper's models, in ms of a rank."""

LARGE = """
1.5B 24 vee 0.5 | 1.5B 64 vee 0.5 | 6.2B 24 vee 0.5 | 1.5B 24 vee 0.4375 | 1.5B 24 vee 0.375
14.6B 48 vee 0.375 | 14.6B 64 vee 0.375 | 14.6B 128 vee 0.375 | 14.6B 48 vee 0.5
1.5B 24 linear 0.75 | 1.5B 24 linear 0.625 | 1.5B 24 linear 0.5 | 1.5B 24 linear 0.375
1.5B 24 wave-4 1 | 1.5B 24 wave-4 0.625 | 1.5B 24 wave-4 0.5 | 14.6B 48 wave-4 1 | 14.6B 48 wave-3 0.5625
1.5B 24 looped-3 0.5 | 1.5B 24 looped-4 0.375 | 14.6B 48 looped-3 0.5625
"""
"""Model, microbatches, placement, and memory as a share of 1F1B's."""

FOUND = Path(__file__).with_name("found.json")
"""The smallest bubble of the span (%) that our search has found, by problem, with the seed it came from; `--search` completes it."""


def large_problems() -> Iterator[tuple[str, Problem]]:
    """The problems of `LARGE` by their names."""
    for line in LARGE.replace("|", "\n").split("\n"):
        if line.strip():
            model, microbatches, placement, share = line.split()
            ranks, times, comm = PROFILES[model]
            work, where = zb.Workload.uniform(ranks, times, comm, held=32 / 34), family(placement, ranks)
            problem = Problem(where, int(microbatches), work.costs(where), work.limits(float(share) * ranks))
            yield f"{model}, p={ranks}, m={microbatches}, {placement}, {share}p", problem


def searched(problem: Problem, seconds: float, seed: int) -> dict[str, Any]:
    """What a search of so many seconds finds."""
    solved = zb.planning.solve(problem, seconds=seconds, seed=seed)
    assert solved.time is not None
    return {"bubble": round(100 * problem.bubble(solved.time), 2), "how": solved.how, "seconds": seconds, "seed": seed}


def small(optima: dict[str, float | None]) -> list[dict[str, Any]]:
    """The bound of each small problem with a proven optimum."""
    rows = []
    for number, proven in optima.items():
        problem = small_problem(int(number))
        if proven is None:
            continue
        simple, bound = (one.time / 1e6 for one in bounds_of(problem))
        assert bound <= proven, f"the bound of small problem {number} is {bound} ms, above its optimum of {proven} ms"
        where = f"{problem.placement.name}, p={problem.placement.num_ranks}, m={problem.num_microbatches}, {problem.objective}"
        gaps = {"over": over(proven, bound), "simple": over(proven, simple)}
        rows.append({"number": int(number), "problem": where, "optimum_ms": proven, "bound_ms": bound} | gaps)
    return rows


def bounds_of(problem: Problem) -> tuple[Bound, Bound]:
    """The bound by simple claims, and the one that a plan has which is searched for."""
    known = problem.bound()
    return known, sharper_bound(problem, known)


def over(time: float, bound: float) -> float:
    """How much longer than the bound, in %."""
    return round(100 * (time / bound - 1), 2)


def large(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The bounds of large problems and the best plans found."""
    rows = []
    for name, problem in large_problems():
        simple, least = (100 * problem.bubble(one.time) for one in bounds_of(problem))
        best = found[name]["bubble"]
        gap = over((100 - least) / (100 - best), 1)
        assert gap > -0.01, f"{name}: a plan has a bubble of {best} %, less than the bound of {least:.2f} %"
        rows.append({"problem": name, "simple": round(simple, 2), "bound": round(least, 2), "best": best, "over": max(0.0, gap)})
    return rows


def summary(rows: list[dict[str, Any]], column: str = "over") -> dict[str, Any]:
    """How many bounds are the optimum, and how far below it the others are, in %."""
    gaps = [row[column] for row in rows]
    return {"proven": len(gaps), "tight": gaps.count(0), "mean_over": round(sum(gaps) / len(gaps), 2), "worst_over": max(gaps)}


def page(results: dict[str, Any]) -> str:
    """The results in docs/planner.md."""
    all_, simple = results["summary"], results["summary_of_simple"]
    lines = [
        f"CP-SAT proved the optimum of {all_['proven']} small random problems: up to {MOST_PASSES} passes, 2 to 6 ranks, unequal stages,",
        f"little memory. The bound equals the optimum in {all_['tight']} of them, and claims alone equal it in {simple['tight']}.",
        f"The optimum is above the bound by {all_['mean_over']} % on average and {all_['worst_over']} % at most,",
        f"and above the claims by {simple['mean_over']} % and {simple['worst_over']} %.",
        "For larger problems the optimum is unknown, so the gap may be in the bound or in the plan:",
        "",
        "| problem | bubble by claims alone | bubble by the bound | smallest bubble found | its span over the bound |",
        "|---|---|---|---|---|",
    ]
    columns = ("simple", "bound", "best", "over")
    rows = [f"| {row['problem']} | {' | '.join(f'{row[column]} %' for column in columns)} |" for row in results["large"]]
    return "\n".join([*lines, *rows])


def proven_ms(number: int) -> float | None:
    """The optimum of a small problem in ms, if it is proven in time."""
    time = optimum(small_problem(number))
    return None if time is None else time / 1e6


def main() -> None:
    """Work out all bounds, and prove missing optima if asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prove", action="store_true", help="prove the optima that the file lacks, which takes an hour or so")
    parser.add_argument(
        "--search", type=float, default=0, metavar="SECONDS", help="search each large problem so long, and keep what is better"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of --search")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    options = parser.parse_args()
    optima: dict[str, float | None] = json.loads(OPTIMA.read_text()) if OPTIMA.exists() else {}
    if options.prove:
        missing = [number for number in range(SMALL) if str(number) not in optima]
        with ProcessPoolExecutor(2) as pool:
            for number, time in zip(missing, pool.map(proven_ms, missing), strict=True):
                optima[str(number)] = time
                OPTIMA.write_text(json.dumps(dict(sorted(optima.items(), key=lambda item: int(item[0])))) + "\n")
    found: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    if options.search:
        for name, problem in large_problems():
            best = searched(problem, options.search, options.seed)
            if name not in found or best["bubble"] < found[name]["bubble"]:
                found[name] = best
            print(name, best, flush=True)
            FOUND.write_text(json.dumps(found, indent=1) + "\n")
    rows = small(optima)
    families = sorted({row["problem"].split(",")[0] for row in rows})
    parts = {name: summary([row for row in rows if row["problem"].startswith(name)]) for name in families}
    simple = summary(rows, "simple")
    results = {"summary": summary(rows), "summary_of_simple": simple, "by_placement": parts, "small": rows, "large": large(found)}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    before, after = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{page(results)}\n{END}{after.split(END)[1]}", encoding="utf-8")
    print(json.dumps({name: results[name] for name in ("summary", "summary_of_simple", "by_placement", "large")}, indent=1))


if __name__ == "__main__":
    main()
