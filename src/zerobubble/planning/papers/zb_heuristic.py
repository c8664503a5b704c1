"""The automatic heuristic of Zero Bubble: ZB-1p, ZB-2p, and schedules for any memory between, with one stage per rank."""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Schedule
from zerobubble.planning.papers.partial_schedule import PartialSchedule, shortest
from zerobubble.planning.problem.problem import Problem


class Choices(NamedTuple):
    """The three decisions for which both alternatives are tried.

    `early_b`: before its first B a rank runs only those F that do not delay it. `prefer_b`: a rank that is two F ahead of the next may skip
    one. `greedy_w`: W also goes into a gap that is shorter than W and that the rank could have afforded.
    """

    early_b: bool
    prefer_b: bool
    greedy_w: bool


def zb_heuristic(problem: Problem) -> Schedule:
    """The schedule of the Zero Bubble heuristic within the limits: the best of eight.

    As many F as memory allows before the first B, then B and F in turn, with W in the gaps. Raises `InputError` for a placement other than
    stage s on rank s, and if the limits hold no microbatch or too few for the rule.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241, section 3.1 and its public code.
    """
    placement = problem.placement
    if placement.routes[0] != tuple(range(placement.num_ranks)):
        raise InputError(
            "the zero-bubble heuristic needs stage s on rank s, got the placement {name!r}",
            name=placement.name,
            remedy="choose a linear placement",
        )
    return shortest(_played(problem, Choices(*choices)) for choices in product((True, False), repeat=3)).schedule("zb-heuristic")


def _played(problem: Problem, choices: Choices) -> PartialSchedule:
    """Plays the rule. Stages are ranks here."""
    partial, ranks = PartialSchedule(problem), range(problem.placement.num_ranks)
    for rank in ranks:
        partial.run(Kind.F, rank)
    for rank, count in enumerate(_warmup(partial, choices)):
        for _ in range(count):
            partial.run(Kind.F, rank)
    for rank in reversed(ranks):
        partial.run(Kind.B, rank)
    for _ in range(1, problem.num_microbatches):
        for rank in _forward_ranks(partial, choices):
            _run(partial, Kind.F, rank, choices)
        for rank in reversed(ranks):
            _run(partial, Kind.B, rank, choices)
    partial.run_weights()
    return partial


def _warmup(partial: PartialSchedule, choices: Choices) -> list[int]:
    """The number of F that each rank runs between its first F and its first B, decreasing from rank to rank."""
    microbatches, last = partial.problem.num_microbatches, len(partial.rows) - 1
    extra = [0] * len(partial.rows)
    ready = partial.clock[last] + partial.time[Kind.B, last]
    for rank in reversed(range(last)):
        due, takes = ready + partial.problem.costs.comm[rank], partial.time[Kind.F, rank]
        capacity = (partial.problem.limits.memory[rank] - partial.held[rank]) // max(1, partial.takes[Kind.F, rank])
        clock, slip = partial.clock[rank], takes if choices.early_b else 1
        while extra[rank] < min(capacity, microbatches - 1) and clock + slip <= due:
            extra[rank] += 1
            clock += takes
        ready = max(clock, due) + partial.time[Kind.B, rank]
    for before, rank in pairwise(range(len(extra))):
        if extra[before] < microbatches - 1:
            extra[rank] = min(extra[rank], max(0, extra[before] - 1))
    return extra


def _forward_ranks(partial: PartialSchedule, choices: Choices) -> list[int]:
    """The ranks that run an F this round. A rank runs one only if the next rank does, which then waits less."""
    wanted = [partial.left(Kind.F, rank) and not (choices.prefer_b and _skips(partial, rank)) for rank in range(len(partial.rows))]
    for rank, after in reversed(list(pairwise(range(len(wanted))))):
        wanted[rank] = wanted[rank] and wanted[after]
    return [rank for rank, wants in enumerate(wanted) if wants]


def _skips(partial: PartialSchedule, rank: int) -> bool:
    """Whether a rank skips an F: it is two ahead, and can afford to wait for the next B instead."""
    after = rank + 1
    if after == len(partial.rows) or len(partial.ends[Kind.F, rank]) < len(partial.ends[Kind.F, after]) + 2:
        return False
    horizon = partial.clock[after] + partial.time[Kind.F, after] + partial.time[Kind.B, after] + partial.problem.costs.comm[rank]
    over = partial.held[rank] + partial.takes[Kind.F, rank] - partial.problem.limits.memory[rank]
    weights = min(len(partial.waiting[rank]), -(-max(0, over) // max(1, -partial.takes[Kind.W, rank])))
    if partial.clock[rank] + partial.time[Kind.F, rank] + weights * partial.time[Kind.W, rank] <= horizon:
        return partial.clock[rank] >= horizon
    return horizon - partial.clock[rank] <= partial.slack(rank)


def _run(partial: PartialSchedule, kind: Kind, rank: int, choices: Choices) -> None:
    """Runs a pass after the W that memory requires and those that fit into the wait for its message."""
    partial.free_memory(kind, rank)
    gap = partial.fill(kind, rank)
    if gap and (choices.greedy_w or gap > partial.slack(rank)):
        partial.run_weight(rank)
    while kind is Kind.B and rank == 0 and partial.waiting[0] and not partial.left(Kind.F, 0):
        partial.run_weight(0)
    partial.run(kind, rank)
