"""Small problems on a V placement for which 1,000 evaluations once gave plans 4 to 42 % above the optimum; times in ms."""

from zerobubble.costs import Costs, Limits
from zerobubble.ir import Placement
from zerobubble.planning import Problem
from zerobubble.planning.problem.problem import Objective

MS = 1_000_000


def _problem(ranks: int, microbatches: int, columns: list[list[int]], limits: tuple[int, ...], objective: Objective) -> Problem:
    """The problem in a V; the columns are F, B, W and messages in ms, and the bytes held after F and B."""
    times = (tuple(each * MS for each in column) for column in columns[:4])
    costs = Costs(*times, *map(tuple, columns[4:]))
    return Problem(Placement.vee(ranks), microbatches, costs, Limits(limits), objective)


PROBLEMS = {
    "2 ranks, 6 microbatches, period, 24 bytes": _problem(
        2, 6, [[3, 3, 3, 3], [11, 11, 11, 11], [10, 10, 10, 10], [1, 1, 1], [9, 9, 9, 9], [8, 0, 8, 9]], (24, 24), Objective.PERIOD
    ),
    "2 ranks, 4 microbatches, makespan, 13 bytes": _problem(
        2, 4, [[5, 12, 2, 11], [8, 5, 8, 11], [7, 7, 2, 5], [1, 1, 1], [5, 7, 7, 6], [2, 3, 6, 2]], (13, 17), Objective.MAKESPAN
    ),
    "2 ranks, 5 microbatches, period, 5 bytes": _problem(
        2, 5, [[4, 4, 4, 4], [7, 7, 7, 7], [12, 12, 12, 12], [1, 1, 1], [2, 2, 2, 2], [2, 1, 0, 2]], (5, 5), Objective.PERIOD
    ),
    "3 ranks, 6 microbatches, period, 8 bytes": _problem(
        3,
        6,
        [[5, 5, 5, 5, 5, 5], [6, 6, 6, 6, 6, 6], [1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3], [0, 0, 3, 0, 3, 0]],
        (8, 8, 8),
        Objective.PERIOD,
    ),
    "2 ranks, 5 microbatches, makespan, 21 bytes": _problem(
        2, 5, [[6, 9, 9, 1], [11, 1, 12, 5], [3, 8, 12, 1], [4, 4, 4], [10, 10, 5, 6], [9, 10, 0, 2]], (21, 19), Objective.MAKESPAN
    ),
    "3 ranks, 3 microbatches, makespan, 9 bytes": _problem(
        3,
        3,
        [[11, 1, 4, 5, 12, 11], [4, 12, 11, 3, 2, 7], [8, 4, 12, 1, 2, 7], [0, 0, 0, 0, 0], [2, 3, 4, 3, 2, 6], [1, 0, 0, 3, 2, 2]],
        (9, 6, 8),
        Objective.MAKESPAN,
    ),
    "3 ranks, 5 microbatches, makespan, 16 bytes": _problem(
        3,
        5,
        [[1, 3, 3, 8, 11, 10], [1, 6, 5, 12, 6, 4], [5, 11, 3, 10, 2, 4], [2, 2, 2, 2, 2], [10, 6, 10, 4, 7, 4], [4, 6, 4, 4, 0, 4]],
        (16, 15, 16),
        Objective.MAKESPAN,
    ),
    "3 ranks, 3 microbatches, period, 22 bytes": _problem(
        3,
        3,
        [[11, 11, 11, 11, 11, 11], [6, 6, 6, 6, 6, 6], [4, 4, 4, 4, 4, 4], [2, 2, 2, 2, 2], [9, 9, 9, 9, 9, 9], [8, 4, 8, 9, 9, 8]],
        (22, 22, 22),
        Objective.PERIOD,
    ),
}
