"""The automatic heuristic of Zero Bubble: ZB-1p, ZB-2p, and whatever else a memory limit allows on one stage per rank."""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Schedule
from zerobubble.planning.papers.board import Board, shortest
from zerobubble.planning.problem import Problem


class Choices(NamedTuple):
    """The three decisions that are tried both ways.

    `early_b`: before its first B a rank runs only those F that do not delay it. `prefer_b`: a rank two F ahead of the next may leave
    one out. `greedy_w`: W also goes into a gap shorter than itself that the rank could have afforded.
    """

    early_b: bool
    prefer_b: bool
    greedy_w: bool


def zb_heuristic(problem: Problem) -> Schedule:
    """The schedule that the Zero Bubble heuristic finds within the limits: the best of eight.

    As many F as memory allows before the first B, then B and F in turn, with W in the gaps. Raises `InputError` for a placement other
    than stage s on rank s, and where the limits hold no microbatch or too little for the rule.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241, section 3.1 and its public code.
    """
    placement = problem.placement
    if placement.routes[0] != tuple(range(placement.num_ranks)):
        raise InputError(
            f"the zero-bubble heuristic places stage s on rank s, which {placement.name!r} does not: choose a linear placement"
        )
    return shortest(_played(problem, Choices(*choices)) for choices in product((True, False), repeat=3)).schedule("zb-heuristic")


def _played(problem: Problem, choices: Choices) -> Board:
    """Stages are ranks here."""
    board, ranks = Board(problem), range(problem.placement.num_ranks)
    for rank in ranks:
        board.run(Kind.F, rank)
    for rank, count in enumerate(_warmup(board, choices)):
        for _ in range(count):
            board.run(Kind.F, rank)
    for rank in reversed(ranks):
        board.run(Kind.B, rank)
    for _ in range(1, problem.num_microbatches):
        for rank in _forward_ranks(board, choices):
            _run(board, Kind.F, rank, choices)
        for rank in reversed(ranks):
            _run(board, Kind.B, rank, choices)
    board.run_weights()
    return board


def _warmup(board: Board, choices: Choices) -> list[int]:
    """How many F each rank runs between its first one and its first B, fewer from rank to rank."""
    microbatches, last = board.problem.num_microbatches, len(board.rows) - 1
    extra = [0] * len(board.rows)
    ready = board.clock[last] + board.time[Kind.B, last]
    for rank in reversed(range(last)):
        due, takes = ready + board.problem.costs.comm[rank], board.time[Kind.F, rank]
        room = (board.problem.limits.memory[rank] - board.held[rank]) // max(1, board.takes[Kind.F, rank])
        clock, slip = board.clock[rank], takes if choices.early_b else 1
        while extra[rank] < min(room, microbatches - 1) and clock + slip <= due:
            extra[rank] += 1
            clock += takes
        ready = max(clock, due) + board.time[Kind.B, rank]
    for before, rank in pairwise(range(len(extra))):
        if extra[before] < microbatches - 1:
            extra[rank] = min(extra[rank], max(0, extra[before] - 1))
    return extra


def _forward_ranks(board: Board, choices: Choices) -> list[int]:
    """The ranks that run an F this round: every one behind a rank that waits has to wait less."""
    wanted = [board.left(Kind.F, rank) and not (choices.prefer_b and _skips(board, rank)) for rank in range(len(board.rows))]
    for rank, after in reversed(list(pairwise(range(len(wanted))))):
        wanted[rank] = wanted[rank] and wanted[after]
    return [rank for rank, wants in enumerate(wanted) if wants]


def _skips(board: Board, rank: int) -> bool:
    """Whether a rank leaves out an F: it is two ahead, and waiting for the next B instead costs it no more than it can afford."""
    after = rank + 1
    if after == len(board.rows) or len(board.ends[Kind.F, rank]) < len(board.ends[Kind.F, after]) + 2:
        return False
    horizon = board.clock[after] + board.time[Kind.F, after] + board.time[Kind.B, after] + board.problem.costs.comm[rank]
    over = board.held[rank] + board.takes[Kind.F, rank] - board.problem.limits.memory[rank]
    weights = min(len(board.waiting[rank]), -(-max(0, over) // max(1, -board.takes[Kind.W, rank])))
    if board.clock[rank] + board.time[Kind.F, rank] + weights * board.time[Kind.W, rank] <= horizon:
        return board.clock[rank] >= horizon
    return horizon - board.clock[rank] <= board.slack(rank)


def _run(board: Board, kind: Kind, rank: int, choices: Choices) -> None:
    """Run a pass after the W that memory asks for and those that the wait for its message leaves room for."""
    board.make_room(kind, rank)
    gap = board.fill(kind, rank)
    if gap and (choices.greedy_w or gap > board.slack(rank)):
        board.run_weight(rank)
    while kind is Kind.B and rank == 0 and board.waiting[0] and not board.left(Kind.F, 0):
        board.run_weight(0)
    board.run(kind, rank)
