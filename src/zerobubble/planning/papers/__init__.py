"""The planners of the papers, as published: what others find, to choose and to compare with."""

from __future__ import annotations

from collections.abc import Callable

from zerobubble.ir import Schedule
from zerobubble.planning.papers.adaptive import adaptive
from zerobubble.planning.papers.exact import exact
from zerobubble.planning.papers.zb_heuristic import zb_heuristic
from zerobubble.planning.papers.zb_v_greedy import zb_v_greedy
from zerobubble.planning.problem.problem import Problem

Baseline = Callable[[Problem], Schedule]
"""A planner: the schedule it finds for a problem. Raises `InputError` with the reason where it finds none."""

BASELINES: dict[str, Baseline] = {
    "zb-heuristic": zb_heuristic,
    "zb-v-greedy": zb_v_greedy,
    "adaptive": adaptive,
    "exact": lambda problem: exact(problem).schedule,
}
