"""Plans with passes that deviate from their measured times, and the gain of annealing over samples of noise.

Writes `noise.json` next to this file. `noise`: 6.2B on 8 ranks with 32 microbatches, each pass with its own normal factor, judged in plain
Python on 200 samples that no search has seen. `what_if`: the four profiles of the paper, ZB-V at 1p, times off by 10 %. One thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from cases import FLASH, TIMES, Reference, problem, references

import zerobubble as zb
from zerobubble.ir import Op
from zerobubble.planning import most_robust_order, solve
from zerobubble.planning.noise.sensitivity import Scope
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.replay import Replay
from zerobubble.planning.search import compile_kernels

Row = dict[str, Any]

SAMPLES, EVALUATIONS = 200, 300_000

PAPER = (32 * 4096) / (34 * 4096 + 5 * 32 * 1024)
"""What B leaves of what F saved in 6.2B where attention keeps its scores."""


def main() -> None:
    """Measure and print, line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("noise.json"))
    options = parser.parse_args()
    compile_kernels()
    results: dict[str, dict[str, Row]] = {"noise": {}, "what_if": {}}
    for part, jobs in (("noise", noise_rows()), ("what_if", what_if_rows())):
        for key, row in jobs:
            results[part][key] = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(part, key, json.dumps(results[part][key]), flush=True)


def noise_rows() -> Iterator[tuple[str, Row]]:
    """Bubbles and shares in %: nominal by the measured times, noisy on average; `unavoidable` is the longer work of the busiest rank."""
    for placement, share, held in (("linear", 2, PAPER), ("vee", 1, FLASH), ("vee", 0.625, FLASH), ("linear", 1, FLASH)):
        *times, comm = TIMES["6.2B"]
        case = problem(zb.Workload.uniform(8, tuple(times), comm, held), placement, 32, 8 * share)
        plan = solve(case, seconds=5).schedule
        assert plan is not None
        for error in (0.05, 0.1):
            yield f"6.2B p=8 m=32 {placement} {share}p sd={error}", noise_row(case, plan, error)


def noise_row(case: Problem, plan: zb.Schedule, error: float) -> Row:
    busy = time.process_time()
    found = most_robust_order(case, [plan], error=error, evaluations=EVALUATIONS)
    busy = time.process_time() - busy
    nominal, steady = (zb.simulate(order, case.costs).span for order in (plan, found.schedule))
    (before, work), (after, _) = (under_noise(case, order, error) for order in (plan, found.schedule))
    return {
        "nominal": percent(case.bubble(nominal)),
        "noisy": percent(case.bubble(round(before))),
        "longer": percent(before / nominal - 1),
        "unavoidable": percent(work / (case.work / case.placement.num_ranks) - 1),
        "steady_nominal": percent(case.bubble(steady)),
        "steady_noisy": percent(case.bubble(round(after))),
        "gain_of_span": percent(1 - after / before),
        "predicted_gain": percent(found.gain),
        "cpu_s": busy,
    }


def under_noise(case: Problem, order: zb.Schedule, error: float) -> tuple[float, float]:
    """The mean span and the mean work of the busiest rank in ns, over samples that are the same for every order."""
    replay, dice = Replay.from_schedule(order), Random(2026)
    measured, passes = replay.durations(case.costs), sorted(op for _, _, op in order.ops())
    spans, works = [], []
    for _ in range(SAMPLES):
        factors: dict[Op, float] = {op: max(0.0, dice.gauss(1, error)) for op in passes}
        took = [round(time * factors[step[0]]) if step else 0 for step, time in zip(replay.steps, measured, strict=True)]
        work = [0] * case.placement.num_ranks
        for step, duration in zip(replay.steps, took, strict=True):
            if step:
                work[case.placement.routes[0][step[0].stage]] += duration
        spans.append(replay.play(case.objective, took, case.costs.comm))
        works.append(max(work))
    return fmean(spans), fmean(works)


def what_if_rows() -> Iterator[tuple[str, Row]]:
    """By how many % the span grows with times longer by 10 %, and by chance: every measured time off, every pass by itself."""
    seen: set[str] = set()
    for reference in references("T5"):
        if "zbv-1p" in reference.schedulers and reference.model not in seen:
            seen.add(reference.model)
            yield reference.key, what_if_row(reference)


def what_if_row(reference: Reference) -> Row:
    case = reference.problem
    plan = solve(case, seconds=5).schedule
    assert plan is not None
    busy = time.process_time()
    found = zb.planning.sensitivity(plan, case.costs, 0.1, objective=case.objective, limits=case.limits)
    busy = time.process_time() - busy
    kinds = {effect.what: percent(effect.slower / found.time - 1) for effect in found.effects if effect.scope is Scope.KIND}
    ranks = [percent(effect.slower / found.time - 1) for effect in found.effects if effect.scope is Scope.RANK]
    chance = {"profile_mean": found.profile.mean, "profile_worst": found.profile.worst}
    chance |= {"jitter_mean": found.jitter.mean, "jitter_worst": found.jitter.worst}
    shares = {name: percent(share) for name, share in chance.items()}
    return {"bubble": percent(case.bubble(found.time)), **kinds, "one rank, at most": max(ranks), **shares, "cpu_s": busy}


def percent(share: float) -> float:
    return 100 * share


if __name__ == "__main__":
    main()
