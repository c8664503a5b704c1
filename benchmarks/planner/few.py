"""Few evaluations: plans of small problems after 200, 1,000 and 3,000 schedules, over the optimum.

`python benchmarks/planner/few.py` writes few.json: 100 seeded problems on 2 and 3 ranks. CP-SAT proves their optima without any bound of
ours. Optima in the file are kept; `--fresh` proves them again.
"""

import json
import sys
from pathlib import Path
from random import Random
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1] / "bounds"))
from small import MS, optimum

import zerobubble as zb
from zerobubble.planning.placements import family
from zerobubble.planning.problem.problem import Objective

PROBLEMS = 100
BUDGETS = (200, 1000, 3000)
RESULTS = Path(__file__).with_suffix(".json")


def few_problem(seed: int) -> zb.planning.Problem:
    """A problem of 2 or 3 ranks and 3 to 6 microbatches in a line or a V: stages alike or not, memory without end, short, or in between."""
    dice = Random(seed)
    ranks, microbatches = dice.randint(2, 3), dice.randint(3, 6)
    where = family(dice.choice(("linear", "vee")), ranks)
    stages = where.num_stages
    if dice.random() < 0.4:
        columns = [[dice.randint(1, 12)] * stages for _ in range(3)]
        saved = [dice.randint(2, 10)] * stages
    else:
        columns = [[dice.randint(1, 12) for _ in range(stages)] for _ in range(3)]
        saved = [dice.randint(2, 10) for _ in range(stages)]
    comm = [dice.choice((0, 0, 1, 2, 4))] * (stages - 1)
    pending = [round(held * dice.choice((0, 0.4, 0.9, 1))) for held in saved]
    costs = zb.Costs(*(tuple(time * MS for time in column) for column in (*columns, comm)), tuple(saved), tuple(pending))
    whole = [sum(saved[stage] for _, stage in where.stages(rank)) for rank in range(ranks)]
    share = dice.choice((2 * microbatches, dice.uniform(1, 1.4), dice.uniform(1, 2 * ranks)))
    limits = zb.Limits(tuple(round(held * share) for held in whole))
    return zb.planning.Problem(where, microbatches, costs, limits, dice.choice(list(Objective)))


def planned(problem: zb.planning.Problem, evaluations: int) -> int:
    """The time (ns) of the plan after so many evaluations."""
    found = zb.plan(
        problem.costs,
        problem.num_microbatches,
        problem.limits,
        placements=problem.placement,
        objective=problem.objective.value,
        evaluations=evaluations,
    )
    assert found.time is not None
    return found.time


def known_optima() -> dict[str, int | None]:
    """The optima in ns by seed, None where none was proven, from the file unless asked for fresh ones."""
    if "--fresh" in sys.argv or not RESULTS.exists():
        return {}
    return dict(json.loads(RESULTS.read_text())["optima"])


def main() -> None:
    optima, cases = known_optima(), []
    for seed in range(10 * PROBLEMS):
        if len(cases) == PROBLEMS:
            break
        problem = few_problem(seed)
        if str(seed) not in optima:
            optima[str(seed)] = optimum(problem)
        least = optima[str(seed)]
        if least is None:
            continue
        ratios = {str(budget): round(planned(problem, budget) / least, 4) for budget in BUDGETS}
        shape = f"p={problem.placement.num_ranks} m={problem.num_microbatches} {problem.placement.name} {problem.objective.value}"
        cases.append({"seed": seed, "problem": shape, **ratios})
        print(cases[-1], flush=True)
    summary = {
        str(budget): {"worst": max(each), "mean": round(fmean(each), 4), "above_3_percent": sum(one > 1.03 for one in each)}
        for budget in BUDGETS
        for each in [[case[str(budget)] for case in cases]]
    }
    print(summary)
    RESULTS.write_text(json.dumps({"summary": summary, "cases": cases, "optima": optima}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
