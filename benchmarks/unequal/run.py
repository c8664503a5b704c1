"""Microbatches of unequal cost: the loss of a plan for equal ones, and the gain from ordering microbatches and passes.

Writes `results.json` next to this file. 6.2B on 8 ranks with 32 microbatches, in nine cases: three distributions of lengths, and three
memory limits. Spans are in % above the span of the plan for equal microbatches of the same total. `speed`: processor time to order, and to
order and plan, 64 microbatches on 8 ranks. `tight`: spans in ms, with their bounds, if memory holds few of the largest microbatches;
passes of a rank take 10 ms for a microbatch of share 1, and memory is in such microbatches. One thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import zerobubble as zb
from zerobubble.planning import Problem, order_microbatches, solve
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Budget
from zerobubble.planning.axes.shares import unequal_plans, with_equal_microbatches
from zerobubble.planning.ranking import rank_key
from zerobubble.planning.search import compile_kernels

WORK = zb.Workload.uniform(8, (29.802, 29.428, 19.530), 0.577)
PARTS = ["speed", "cases", "tight"]
MEMORIES = (("linear", 1.0), ("vee", 1.0), ("vee", 0.625))


def lengths(kind: str, count: int) -> tuple[float, ...]:
    """Shares with the mean 1: two lengths of which one is four times the other, packed documents, documents with a heavy tail."""
    dice = Random(kind)
    drawn = {
        "two lengths": lambda: dice.choice((1.0, 4.0)),
        "packed": lambda: max(0.2, dice.gauss(1, 0.25)),
        "heavy tail": lambda: dice.lognormvariate(0, 0.5),
    }[kind]
    shares = [drawn() for _ in range(count)]
    return tuple(share / fmean(shares) for share in shares)


def log_uniform(count: int, most: float) -> tuple[float, ...]:
    """Shares from 1 to `most` whose logarithms are uniform."""
    dice = Random("log-uniform")
    return tuple(round(most ** dice.random(), 3) for _ in range(count))


def problem_of(placement: str, share: float, kind: str, microbatches: int) -> Problem:
    """Microbatches of such lengths, with room for a share of as many of the largest as there are ranks."""
    shares = lengths(kind, microbatches)
    made = zb.planning.placements.family(placement, 8)
    costs = replace(WORK.costs(made), shares=shares)
    return Problem(made, microbatches, costs, WORK.limits(8 * share * max(shares)))


def planned_from(problem: Problem, equal: Plan, seconds: float) -> Plan:
    """The best plan whose passes and microbatches are ordered, from the plan for equal microbatches."""
    return min(unequal_plans(problem, equal, Budget(seconds), 0), key=rank_key)


def case(placement: str, share: float, kind: str, seconds: float) -> dict[str, float]:
    """How much longer than for equal microbatches the span is, in %."""
    problem = problem_of(placement, share, kind, 32)
    equal = solve(with_equal_microbatches(problem), seconds=seconds)
    assert equal.time is not None
    ordered = order_microbatches(equal.schedule, problem.costs, limits=problem.limits)
    planned = planned_from(problem, equal, seconds)
    assert planned.time is not None
    spans = {
        "data_order": zb.simulate(equal.schedule, problem.costs).span,
        "ordered": zb.simulate(ordered, problem.costs).span,
        "planned": planned.time,
        "bound": planned.bound.time,
        "work": problem.work / 8,
    }
    assert spans["bound"] <= spans["planned"] <= spans["data_order"]
    assert spans["ordered"] <= spans["data_order"]
    return {name: round(100 * (span / equal.time - 1), 2) for name, span in spans.items()}


TWO_SIZES = (1.0,) * 12 + (10.0,) * 4
TIGHT: tuple[tuple[str, tuple[float, ...], float, str], ...] = (
    ("two sizes, 40", TWO_SIZES, 40, "vee"),
    ("two sizes, 40", TWO_SIZES, 40, "any"),
    ("two sizes, 80", TWO_SIZES, 80, "vee"),
    ("log-uniform, 40", log_uniform(32, 10), 40, "vee"),
    ("log-uniform, 40", log_uniform(32, 10), 40, "linear"),
)
"""The name, the shares, the memory of a rank in microbatches of share 1, and the placement."""


def tight(shares: tuple[float, ...], memory: float, placement: str, seconds: float) -> dict[str, float]:
    """The span of the plan and its bound, in ms."""
    work = zb.Workload.uniform(8, (10, 10, 10))
    found = zb.plan(work, len(shares), memory, placements=placement, shares=shares, seconds=seconds)
    assert found.time is not None
    return {"planned_ms": round(found.time / 1e6, 1), "bound_ms": round(found.bound.time / 1e6, 1)}


def speed(placement: str, kind: str) -> dict[str, float]:
    """The median of five of processor ms, with 10 ms of search each for an order and for order and passes, and what these win in %."""
    problem = problem_of(placement, 1.0, kind, 64)
    equal = solve(with_equal_microbatches(problem), seconds=3)
    assert equal.time is not None
    found = {}
    for name, plan in {
        "order": lambda: order_microbatches(equal.schedule, problem.costs, limits=problem.limits, seconds=0.01),
        "order_and_plan": lambda: planned_from(problem, equal, 0.01).schedule,
    }.items():
        schedule, taken = plan(), []
        for _ in range(5):
            started = time.process_time()
            schedule = plan()
            taken.append(1000 * (time.process_time() - started))
        found |= {f"{name}_ms": round(sorted(taken)[2], 1)}
        found |= {
            f"{name}_gain": round(
                100 * (1 - zb.simulate(schedule, problem.costs).span / zb.simulate(equal.schedule, problem.costs).span), 2
            )
        }
    return found


def rows(parts: list[str], seconds: float) -> Iterator[tuple[str, str, dict[str, float]]]:
    """The part, the name and the figures of each case of these parts."""
    for placement in ("linear", "vee") if "speed" in parts else ():
        yield "speed", f"{placement}, two lengths", speed(placement, "two lengths")
    for kind in ("two lengths", "packed", "heavy tail") if "cases" in parts else ():
        for placement, share in MEMORIES:
            yield "cases", f"{kind}, {placement} {share:g}p", case(placement, share, kind, seconds)
    for name, shares, memory, placement in TIGHT if "tight" in parts else ():
        yield "tight", f"{name}, {placement}", tight(shares, memory, placement, 2 * seconds)


def main() -> None:
    """Measure and print, line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="the others keep their figures")
    options = parser.parse_args()
    compile_kernels(shares=True)
    results: dict[str, dict[str, dict[str, float]]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part, name, row in rows(options.part, options.seconds):
        results.setdefault(part, {})[name] = row
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(part, name, json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
