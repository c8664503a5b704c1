"""The spans of our plans compared with the authors' own schedulers at equal memory, with the lower bound, and with an exact solver.

Writes `results.json` and its tables, `results.md`, next to this file, one line at a time. Lines in the file are kept unless `--fresh`. Each
part can run by itself: `--part reference|baselines|targets|profiles|large|unequal|exact|speed`. One thread; compilation happens first and
is reported separately.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from cases import FLASH, PROFILES, TIMES, Reference, headed, paper, random_problem, references

import zerobubble as zb
from zerobubble.bounds import shortage
from zerobubble.planning import papers, solve
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.kernels import entry_points as kernels
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.replay import Replay
from zerobubble.planning.search import compile_kernels
from zerobubble.simulation import memory_faults

Row = dict[str, Any]
Jobs = Iterator[tuple[str, Callable[[], Row]]]

ROUNDING = 1 + 1e-6
"""The authors' spans are printed to the ns of times in fractions of it."""


def main() -> None:
    """Measure what is asked for and print what holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given again")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth line of each part")
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the file already")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    options = parser.parse_args()
    results: dict[str, dict[str, Row]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    compiling = compile_kernels()
    results["machine"] = {"this": {"cores": os.cpu_count(), "python": platform.python_version(), "compile_s": round(compiling, 2)}}
    for part in options.part or PARTS:
        rows = results.setdefault(part, {})
        for key, job in list(PARTS[part]())[:: options.every]:
            if options.fresh or key not in rows:
                rows[key] = {name: rounded(value) for name, value in job().items()}
                options.out.write_text(json.dumps(results, indent=1) + "\n")
                print(part, key, json.dumps(rows[key]), flush=True)
    options.out.with_suffix(".md").write_text(tables(results))
    print(summary(results))


def rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def measured(problem: Problem, seconds: float) -> tuple[Plan, Row]:
    """Our plan and its figures: times in ms, wall and processor seconds."""
    wall, busy = time.perf_counter(), time.process_time()
    solved = solve(problem, seconds=seconds)
    row: Row = {
        "seconds": time.perf_counter() - wall,
        "cpu_s": time.process_time() - busy,
        "status": solved.status.value,
        "how": solved.how,
    }
    if solved.time is not None:
        row |= {"ours_ms": solved.time / 1e6, "bound_ms": solved.bound.time / 1e6, "gap": solved.gap}
        row |= {"bubble": problem.bubble(solved.time), "bound_bubble": problem.bubble(solved.bound.time)}
    return solved, row


def reference_jobs() -> Jobs:
    """Our planner at the memory of each of the authors' schedules, in 1 s up to 8 ranks, 3 s up to 16, 10 s up to 32, 30 s beyond."""

    def job(reference: Reference) -> Row:
        seconds = 1 if reference.ranks <= 8 else 3 if reference.ranks <= 16 else 10 if reference.ranks <= 32 else 30
        solved, row = measured(reference.problem, seconds)
        ratio = (solved.time or 0) / 1e6 / reference.span_ms
        wanted = ratio < 1 / ROUNDING or solved.status is Status.OPTIMAL
        strict = any(name in reference.schedulers for name in ("v-half", "v-min", "v-search-half", "v-search-min", "zb-2p"))
        holds = ratio <= ROUNDING and (wanted or not strict)
        return {**row, "theirs_ms": reference.span_ms, "ratio": ratio, "theirs": reference.schedulers, "holds": holds}

    for reference in references():
        yield reference.key, lambda reference=reference: job(reference)


def baseline_jobs() -> Jobs:
    """Our versions of the papers' planners on the paper's instances, and the best of the authors' own; in processor seconds."""

    def job(reference: Reference, name: str) -> Row:
        busy = time.process_time()
        try:
            schedule = papers.BASELINES[name](reference.problem)
        except zb.InputError as error:
            return {"refused": str(error), "theirs_ms": reference.span_ms}
        cpu_s = time.process_time() - busy
        span = zb.simulate(schedule, reference.problem.costs).span
        return {"ours_ms": span / 1e6, "theirs_ms": reference.span_ms, "ratio": span / 1e6 / reference.span_ms, "cpu_s": cpu_s}

    for reference in references("T5") + references("T8"):
        names = {"linear": ["zb-heuristic"], "vee": ["zb-v-greedy", "adaptive"]}.get(reference.placement, [])
        for name in names:
            yield f"{name} {reference.key}", lambda reference=reference, name=name: job(reference, name)


def target_jobs() -> Jobs:
    """What must be proven optimal in a given time, and how low bubbles must go over all placements."""

    def optimal(problem: Problem, seconds: float) -> Row:
        solved, row = measured(problem, seconds)
        return {**row, "wanted": f"optimal in {seconds:g} s", "holds": solved.status is Status.OPTIMAL and row["cpu_s"] <= seconds}

    def low(share: float, bubble: float) -> Row:
        *times, comm = TIMES["1.5B"]
        found = zb.plan(zb.Workload.uniform(8, tuple(times), comm, 32 / 34), 24, share * 8, seconds=60)
        best = {choice.name: problem_bubble(choice.plan) for choice in found.choices}
        reached = problem_bubble(found)
        return {"seconds": found.seconds, "bubble": reached, "wanted": f"at most {bubble}", "holds": reached <= bubble, "placements": best}

    for ranks in (8, 16, 32, 64, 128):
        yield f"linear 1p p={ranks}", lambda ranks=ranks: optimal(paper("14.6B", ranks, "linear", 3 * ranks, 1), 2.0 * ranks / 8)
    for model, microbatches in (("1.5B", 24), ("1.5B", 64), ("6.2B", 24), ("6.2B", 64)):
        yield f"vee 1p {model} m={microbatches}", lambda m=model, n=microbatches: optimal(paper(m, 8, "vee", n, 1), 0.1)
    for reference in references("T5"):
        if "v-half" in reference.schedulers and reference.ranks <= 16:
            seconds = 1.0 if reference.ranks == 8 else 3.0
            yield f"V-Half memory {reference.key}", lambda r=reference, s=seconds: optimal(r.problem, s)
    for share, bubble in ((1.0, 0.051), (1.5, 0.003), (0.5, 0.237)):
        yield f"any placement 1.5B m=24 {share}p", lambda share=share, bubble=bubble: low(share, bubble)


def profile_jobs() -> Jobs:
    """The paper's four profiles with the memory of 1F1B, over all placements in 10 s."""

    def job(model: str) -> Row:
        ranks, microbatches, times = PROFILES[model]
        found = zb.plan(zb.Workload.uniform(ranks, times[:3], times[3], FLASH), microbatches, ranks, seconds=10)
        best = {choice.name: problem_bubble(choice.plan) for choice in found.choices}
        row = {"seconds": found.seconds, "status": found.status.value, "placement": found.choices[0].name, "how": found.how}
        return {**row, "bubble": problem_bubble(found), "bound_bubble": found.least_bubble, "placements": best}

    for model in PROFILES:
        yield model, lambda model=model: job(model)


def problem_bubble(solved: Plan) -> float:
    return 1.0 if solved.time is None else solved.problem.bubble(solved.time)


def large_jobs() -> Jobs:
    """Planned, checked and lowered at 64, 128 and 256 ranks."""

    def job(problem: Problem, planning: float, seconds: float) -> Row:
        wall, busy = time.perf_counter(), time.process_time()
        solved, row = measured(problem, planning)
        assert solved.order is not None
        zb.lower(solved.schedule)
        row |= {"with_lowering_s": time.perf_counter() - wall, "with_lowering_cpu_s": time.process_time() - busy, "wanted_s": seconds}
        row["peak_gb"] = getrusage(RUSAGE_SELF).ru_maxrss / 1e6
        return {**row, "holds": row["with_lowering_cpu_s"] <= seconds and row["gap"] <= 0.02 and row["peak_gb"] < 4}

    for ranks, microbatches, planning, seconds in ((64, 512, 3.5, 5.0), (128, 1024, 14.0, 20.0), (256, 2048, 58.0, 80.0)):
        for placement, share in (("linear", 1.0), ("vee", 1.0), ("vee", 0.75)):
            case = lambda p=placement, r=ranks, m=microbatches, s=share: paper("14.6B", r, p, m, s)  # noqa: E731
            limits = planning, seconds
            yield f"{placement} {share}p p={ranks} m={microbatches}", lambda case=case, limits=limits: job(case(), *limits)


def unequal_jobs() -> Jobs:
    """A heavy head and a light first stage, and random unequal problems."""

    def job(problem: Problem) -> Row:
        row, heaviest = measured(problem, 6)[1], heaviest_ms(problem)
        points = 100 * heaviest * (1 / row["bound_ms"] - 1 / row["ours_ms"])
        return {**row, "points_above_bound": points, "holds": points <= 1}

    def batch(first: int, count: int) -> Row:
        counts: Row = {"optimal": 0, "feasible": 0, "infeasible": 0}
        wrong = []
        for seed in range(first, first + count):
            case = random_problem(seed)
            solved = solve(case, seconds=1, evaluations=200)
            counts[solved.status.value] += 1
            if solved.status is Status.INFEASIBLE:
                wrong += [seed] * (not holds_none(case))
            elif solved.order is None or zb.schedule_faults(solved.schedule) or memory_faults(solved.schedule, case.costs, case.limits):
                wrong.append(seed)
        return {**counts, "wrong": wrong, "holds": not wrong}

    for placement in ("linear", "vee"):
        for head, first in ((0.1, 0.0), (0.2, 0.0), (0.3, 0.0), (0.3, 0.1)):
            yield f"{placement} head +{head} first -{first}", lambda p=placement, h=head, f=first: job(headed(p, h, f))
    for first in range(0, 1000, 50):
        yield f"random {first} to {first + 49}", lambda first=first: batch(first, 50)


def heaviest_ms(problem: Problem) -> float:
    """The work of the busiest rank in ms, against which bubbles of unequal stages are counted."""
    costs, where = problem.costs, problem.placement
    stages = [[stage for _, stage in where.stages(rank)] for rank in range(where.num_ranks)]
    work = [sum(costs.forward[s] + costs.backward[s] + costs.weight[s] for s in held) for held in stages]
    return problem.num_microbatches * max(work) / 1e6


def holds_none(problem: Problem) -> bool:
    """Whether some rank cannot hold one microbatch of all its stages."""
    costs, where = problem.costs, problem.placement
    needed = [sum(costs.held_after_f[stage] for _, stage in where.stages(rank)) for rank in range(where.num_ranks)]
    short = any(need > limit for need, limit in zip(needed, problem.limits.memory, strict=True))
    return short and bool(shortage(where, costs, problem.limits))


def exact_jobs() -> Jobs:
    """Our planner against the exact solver on small random problems."""

    def job(seed: int) -> Row:
        case = random_problem(seed, 4, 8)
        solved, row = measured(case, 2)
        if solved.order is None:
            return {**row, "holds": holds_none(case)}
        proof = papers.exact(case, 60, hint=solved.schedule)
        best = case.objective.measure(zb.simulate(proof.schedule, case.costs))
        agrees = best == solved.time or proof.status is not Status.OPTIMAL
        sound = best >= solved.bound.time and proof.bound.time >= solved.bound.time
        return {**row, "exact_ms": best / 1e6, "exact_status": proof.status.value, "holds": agrees and sound}

    for seed in range(5000, 5050):
        yield f"random {seed}", lambda seed=seed: job(seed)


def speed_jobs() -> Jobs:
    """Passes played a second, compiled and in plain Python."""

    def job(ranks: int) -> Row:
        case = paper("14.6B", ranks, "vee", 8 * ranks, 1)
        schedule = zb.make("zb-v", ranks, 8 * ranks)
        passes = sum(map(len, schedule.rows))
        tables = kernels.tables_of(case)
        rows = kernels.rows_of(tables, kernels.order_of(schedule))
        replay = Replay.from_schedule(schedule)
        compiled = passes / fastest(lambda: kernels.longest_time(tables, rows), 50)
        plain = passes / fastest(lambda: replay.time(case.objective, case.costs), 5)
        return {"passes": passes, "compiled_per_s": compiled, "python_per_s": plain, "holds": compiled >= 1e8 and plain >= 3e6}

    for ranks in (8, 16, 32):
        yield f"vee p={ranks} m={8 * ranks}", lambda ranks=ranks: job(ranks)


def fastest(job: Callable[[], object], repeats: int) -> float:
    """The seconds of the fastest of so many runs."""
    turns = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        turns.append(time.perf_counter() - start)
    return min(turns)


PARTS: dict[str, Callable[[], Jobs]] = {
    "reference": reference_jobs,
    "baselines": baseline_jobs,
    "targets": target_jobs,
    "profiles": profile_jobs,
    "large": large_jobs,
    "unequal": unequal_jobs,
    "exact": exact_jobs,
    "speed": speed_jobs,
}


def summary(results: dict[str, dict[str, Row]]) -> str:
    """How many lines of each part hold, how many are proven optimal, and the lines that do not hold."""
    lines = [f"{'part':<12}{'lines':>6}{'hold':>6}{'optimal':>9}{'shorter':>9}{'longest s':>11}"]
    for part in PARTS:
        rows = results.get(part, {}).values()
        if rows:
            hold, optimal = sum(row.get("holds", True) for row in rows), sum(row.get("status") == "optimal" for row in rows)
            shorter = sum(row.get("ratio", 1) < 1 / ROUNDING for row in rows)
            longest = max(row.get("seconds", row.get("cpu_s", 0)) for row in rows)
            lines.append(f"{part:<12}{len(rows):>6}{hold:>6}{optimal:>9}{shorter:>9}{longest:>11.2f}")
    missed = [f"missed: {part} {key}" for part in PARTS for key, row in results.get(part, {}).items() if not row.get("holds", True)]
    return "\n".join(lines + missed)


def tables(results: dict[str, dict[str, Row]]) -> str:
    """The summary, and each part as a table, a line per problem."""
    parts = ["# The planner, measured", f"```text\n{summary(results)}\n```"]
    for part in PARTS:
        rows = results.get(part, {})
        names = list(dict.fromkeys(name for row in rows.values() for name, value in row.items() if not isinstance(value, (dict, list))))
        lines = [f"| {key} | {' | '.join(str(row.get(name, '')) for name in names)} |" for key, row in rows.items()]
        parts += [f"## {part}", "\n".join([f"| problem | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|", *lines])] if rows else []
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
