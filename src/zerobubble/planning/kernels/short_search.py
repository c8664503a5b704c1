"""Search with few evaluations: a few policies, a beam of partial schedules, then annealing of the best with the rest of the budget.

The turns of the portfolio take thousands of schedules each, so a smaller budget would only play the first.
"""

from __future__ import annotations

import numpy as np

from zerobubble.planning.kernels.beam import beam_search
from zerobubble.planning.kernels.policy import AS_1F1B, NEVER, full_speed_policy, grouped_policies
from zerobubble.planning.kernels.priorities import num_legs
from zerobubble.planning.kernels.search_state import PolicyPool, SearchState
from zerobubble.planning.kernels.tables import order_of
from zerobubble.planning.problem.problem import Problem

FEW = 5_000
"""With fewer evaluations than this, the short search is better than the portfolio."""

SMALL = 1000
"""The most passes for a short search. In larger schedules, hundreds of moves change hardly anything."""

OF_POLICIES, OF_BEAM = 0.1, 0.15
"""Fractions of the evaluations for policies and for the beam."""

MOST_PLACED = 6_000
"""The most passes that the beam places. It is plain Python, so more would take over a quarter of a second."""

PER_WIDTH = 0.75
"""The work of the beam per partial schedule kept, in passes of complete schedules. Many extensions are duplicates."""

NARROW = 4
"""A beam with fewer partial schedules finds nothing better than policies do."""

TEMPERATURES = (0.1, 0.3, 0.05, 1.0)
"""Starting temperatures of the annealing runs in turn, in mean pass times."""

PLAYED = 500
"""Schedules played in an annealing run, twice as many in each later one."""


def is_short(state: SearchState) -> bool:
    """Whether the budget of `state` is for this search."""
    evaluations = state.budget.evaluations
    return evaluations is not None and evaluations < FEW and state.tables.size <= SMALL


def search_shortly(state: SearchState, problem: Problem) -> None:
    """Searches from the best seed, if one fits, until the bound is met or the evaluations are used up. The best order is in `state`.

    It never reads the clock. If no seed fits and no policy gives a schedule, `state` may have none.
    """
    evaluations = state.budget.evaluations or 0
    tries, legs = int(OF_POLICIES * evaluations), num_legs(state.tables)
    plain = np.array([full_speed_policy(legs, allowance, lead) for lead in (NEVER, AS_1F1B) for allowance in (1.0, NEVER)])
    plain = np.concatenate([plain, grouped_policies(legs)])
    if not state.done or state.order is None:
        state.improve_policies(PolicyPool.from_policies(plain), len(plain) + tries, tries // 2)
    width = int(min(OF_BEAM * evaluations, MOST_PLACED / state.tables.size) / PER_WIDTH)
    if not state.done and width >= NARROW and problem.recomputation is None and problem.slices == 1 and not state.tables.joins:
        made, placed = beam_search(problem, width)
        state.budget.used += -(-placed // state.tables.size)
        if made is not None:
            state.offer(order_of(made), "beam search")
    plays, turn = PLAYED, 0
    while state.order is not None and not state.done:
        plays = min(plays, state.budget.left)
        state.anneal_played(state.order, plays, TEMPERATURES[turn % len(TEMPERATURES)])
        plays, turn = 2 * plays, turn + 1
