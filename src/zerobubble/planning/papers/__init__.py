"""The planners of the papers, reimplemented as published: seeds of our search, and baselines to compare with."""

from __future__ import annotations

from collections.abc import Callable

from zerobubble.ir import Schedule
from zerobubble.planning.papers.adaptive import adaptive
from zerobubble.planning.papers.exact import exact
from zerobubble.planning.papers.zb_heuristic import zb_heuristic
from zerobubble.planning.papers.zb_v_greedy import zb_v_greedy
from zerobubble.planning.problem.problem import Problem

Baseline = Callable[[Problem], Schedule]
"""A planner: returns a schedule for a problem, or raises `InputError` with the reason."""

BASELINES: dict[str, Baseline] = {
    "zb-heuristic": zb_heuristic,
    "zb-v-greedy": zb_v_greedy,
    "adaptive": adaptive,
    "exact": lambda problem: exact(problem).schedule,
}
