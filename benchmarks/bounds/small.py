"""Small random problems, and their optima by a constraint program without any bound of ours."""

from __future__ import annotations

from random import Random

from ortools.sat.python import cp_model

import zerobubble as zb
from zerobubble.planning.placements import family
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.simulation import metrics

MS = 1_000_000

MOST_PASSES = 130
"""Passes of a small problem: beyond them few optima are proven in `PROOF`."""

PROOF = 12
"""CP-SAT's deterministic seconds for an optimum."""


def small_problem(seed: int) -> Problem:
    """A problem of 2 to 6 ranks and 2 to 12 microbatches on any placement, stages alike or not, with room for one microbatch or more."""
    dice = Random(seed)
    while True:
        ranks, microbatches = dice.randint(2, 6), dice.randint(2, 12)
        where = family(dice.choice(("linear", "vee", "looped-2", "looped-3", "wave-3", "wave-4")), ranks)
        if 3 * microbatches * where.num_stages <= MOST_PASSES:
            break
    stages = where.num_stages
    if dice.random() < 0.4:
        columns = [[dice.randint(1, 9)] * stages for _ in range(3)]
        saved = [dice.randint(2, 10)] * stages
    else:
        columns = [[dice.randint(1, 12) for _ in range(stages)] for _ in range(3)]
        saved = [dice.randint(1, 10) for _ in range(stages)]
    comm = [dice.choice((0, 0, 1, 2, 4))] * (stages - 1)
    pending = [round(held * dice.choice((0, 0.4, 0.9, 1))) for held in saved] if dice.random() < 0.5 else saved
    costs = zb.Costs(*(tuple(time * MS for time in column) for column in (*columns, comm)), tuple(saved), tuple(pending))
    whole = [sum(saved[stage] for _, stage in where.stages(rank)) for rank in range(ranks)]
    share = dice.uniform(1, 1.5 * ranks)
    limits = zb.Limits(tuple(max(held, round(held * share)) for held in whole))
    return Problem(where, microbatches, costs, limits, dice.choice(list(Objective)))


def optimum(problem: Problem) -> int | None:
    """The least time (ns) of the objective over all orders, B and W one after the other or apart; None where it is not proven in time.

    Microbatches are numbered on each stage in the order in which it takes them. A rank's first pass starts when some microbatch comes, as
    when it is played: a later start would make the rank's span look shorter. The answer counts if it takes as long when played.
    """
    model, costs, home = cp_model.CpModel(), problem.costs, problem.placement.routes[0]
    stages, microbatches = problem.placement.num_stages, range(problem.num_microbatches)
    time = {"F": costs.forward, "B": costs.backward, "W": costs.weight}
    horizon = problem.num_microbatches * sum(map(sum, (*time.values(), costs.comm, costs.comm))) // MS
    start = {(kind, stage, j): model.new_int_var(0, horizon, "") for kind in time for stage in range(stages) for j in microbatches}
    end = {key: begin + time[key[0]][key[1]] // MS for key, begin in start.items()}
    first_of_rank: dict[int, list[cp_model.IntVar]] = {}
    for kind, stage, j in start:
        if j:
            model.add(start[kind, stage, j] >= end[kind, stage, j - 1])
    for stage in range(stages):
        for j in microbatches:
            model.add(start["B", stage, j] >= end["F", stage, j])
            model.add(start["W", stage, j] >= end["B", stage, j])
            if stage + 1 < stages:
                lag = costs.comm[stage] // MS if home[stage] != home[stage + 1] else 0
                arrival = end["F", stage, j] + lag
                model.add(start["F", stage + 1, j] >= arrival)
                if home[stage + 1] not in home[: stage + 1]:
                    begins = model.new_bool_var("")
                    model.add(start["F", stage + 1, 0] == arrival).only_enforce_if(begins)
                    first_of_rank.setdefault(stage + 1, []).append(begins)
                model.add(start["B", stage, j] >= end["B", stage + 1, j] + lag)
    for begins_with in first_of_rank.values():
        model.add_bool_or(begins_with)
    model.add(start["F", 0, 0] == 0)
    longest = model.new_int_var(0, horizon, "")
    for rank in range(problem.placement.num_ranks):
        own = [stage for stage in range(stages) if home[stage] == rank]
        busy, held = [], []
        for kind, stage, j in start:
            if stage in own:
                busy.append(model.new_fixed_size_interval_var(start[kind, stage, j], time[kind][stage] // MS, ""))
        for stage in own:
            saved, pending = costs.held_after_f[stage], costs.held_after_b[stage]
            for j in microbatches:
                stay = [model.new_int_var(0, horizon, "") for _ in range(2)]
                held.append((model.new_interval_var(start["F", stage, j], stay[0], end["W", stage, j], ""), pending))
                held.append((model.new_interval_var(start["F", stage, j], stay[1], end["B", stage, j], ""), saved - pending))
                begin = start["F", own[0], 0] if problem.objective is Objective.PERIOD else 0
                model.add(longest >= end["W", stage, j] - begin)
        model.add_no_overlap(busy)
        model.add_cumulative([one for one, _ in held], [size for _, size in held], problem.limits.memory[rank])
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time, solver.parameters.num_workers = PROOF, 1
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    begins_with = {stage: [bool(solver.value(one)) for one in begins].index(True) for stage, begins in first_of_rank.items()}
    played = problem.objective.measure(
        metrics(_schedule(problem, {key: solver.value(at) for key, at in start.items()}, begins_with), costs)
    )
    return played if played == round(solver.objective_value) * MS else None


def _schedule(problem: Problem, start: dict[tuple[str, int, int], int], begins_with: dict[int, int]) -> zb.Schedule:
    """The schedule with these starts; `begins_with` has, by the first stage of a rank, the microbatch that it takes first."""
    taken, of_stage = list(range(problem.num_microbatches)), []
    for stage in range(problem.placement.num_stages):
        first = begins_with.get(stage, 0)
        taken = [taken[first], *taken[:first], *taken[first + 1 :]]
        of_stage.append(taken)
    rows: list[list[zb.Op]] = [[] for _ in range(problem.placement.num_ranks)]
    for kind, stage, place in sorted(start, key=start.__getitem__):
        microbatch = of_stage[stage if kind == "F" else -1][place]
        rows[problem.placement.routes[0][stage]].append(zb.Op(zb.Kind(kind), stage, microbatch))
    return zb.Schedule("optimum", problem.placement, problem.num_microbatches, tuple(map(tuple, rows)))
