"""The greedy scheduler of ZB-V for general times: two stages per rank in a V, as far as memory allows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, pairwise, product
from typing import NamedTuple

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Placement, Schedule
from zerobubble.planning.papers.board import Board, StuckError, shortest
from zerobubble.planning.problem import Problem, microbatch_bytes


class Fills(NamedTuple):
    """Whether W goes into a gap that is too short for it, where the rank cannot afford the gap: before an F, before a B on its way out."""

    forward: bool
    backward: bool


def zb_v_greedy(problem: Problem) -> Schedule:
    """The schedule that the greedy of ZB-V finds within the limits: the best of four, each made anew as long as that helps,
    or the first that nothing beats.

    Warm-up by the times of the first microbatch; then, turn by turn, a B and an F on every rank, those on the way home first, with W
    in the gaps. Raises `InputError` for a placement other than the V, and where the limits hold no microbatch or too little for the
    rule, which counts on the memory of p microbatches.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 v1, section 6 and its public code.
    """
    placement = problem.placement
    if placement.routes != Placement.vee(placement.num_ranks).routes:
        raise InputError(f"the greedy of ZB-V places stages in a V, which {placement.name!r} does not: choose the placement vee")
    boards: list[Board] = []
    least = problem.bound().time
    for fills in product((True, False), repeat=2):
        try:
            for board in _improving(problem, Fills(*fills)):
                boards.append(board)
                if board.cost <= least:
                    return board.schedule("zb-v-greedy")
        except StuckError as error:
            stuck = error
    if not boards:
        raise InputError(_refusal(problem, stuck))
    return shortest(boards).schedule("zb-v-greedy")


def _refusal(problem: Problem, stuck: StuckError) -> str:
    """Why there is no schedule: the memory that the rule counts on, where a rank has less."""
    p = problem.placement.num_ranks
    sizes = microbatch_bytes(problem.placement, problem.costs)
    for rank, (limit, whole) in enumerate(zip(problem.limits.memory, sizes, strict=True)):
        if limit < p * whole:
            counts = f"the greedy of ZB-V counts on room for {p} microbatches"
            return f"{counts}, rank {rank} has room for {limit / whole:.4g}: raise its limit or choose another planner"
    return str(stuck)


def _improving(problem: Problem, fills: Fills) -> Iterator[Board]:
    """The board of the rule, then those made knowing how long each rank idled on the one before, while they get shorter."""
    board = _play(problem, fills, [0] * problem.placement.num_ranks)
    while True:
        yield board
        better = _play(problem, fills, board.idle)
        if better.cost >= board.cost:
            return
        board = better


class _Vee(NamedTuple):
    """A board with what the rule knows: `out[rank]` and `home[rank]` are the two stages in the order in which F runs them.

    `idled` is how long each rank idled last time, in ns.
    """

    board: Board
    fills: Fills
    out: tuple[int, ...]
    home: tuple[int, ...]
    idled: list[int]

    @property
    def ranks(self) -> range:
        return range(len(self.out))

    def count(self, stage: int) -> int:
        """How many F of a stage have run."""
        return len(self.board.ends[Kind.F, stage])

    def run(self, kind: Kind, stage: int, fill: bool) -> None:
        """Run a pass after the W that memory asks for and those that the wait for its message leaves room for."""
        board, rank = self.board, self.board.home[stage]
        board.make_room(kind, stage)
        spare = max(*board.idle, max(self.idled) - self.idled[rank]) - board.idle[rank]
        if board.fill(kind, stage) > spare and fill:
            board.run_weight(rank)
        board.run(kind, stage)


def _play(problem: Problem, fills: Fills, idled: list[int]) -> Board:
    stages = [problem.placement.stages(rank) for rank in range(problem.placement.num_ranks)]
    (out, home) = zip(*([stage for _, stage in both] for both in stages), strict=True)
    vee = _Vee(Board(problem), fills, out, home, idled)
    _first_microbatch(vee)
    _even_out(vee)
    for _ in range(2 * problem.num_microbatches):
        _backward_turn(vee)
        _forward_turn(vee)
    vee.board.run_weights()
    return vee.board


def _first_microbatch(vee: _Vee) -> None:
    """F of the first microbatch on all stages; on its way home each rank it comes to has run as many more F as it had time for."""
    board = vee.board
    for stage in vee.out:
        board.run(Kind.F, stage)
    for rank in reversed(vee.ranks):
        while _has_time(vee, rank):
            for stage in vee.out[: rank + 1]:
                if board.left(Kind.F, stage):
                    board.run(Kind.F, stage)
        board.run(Kind.F, vee.home[rank])


def _has_time(vee: _Vee, rank: int) -> bool:
    """Whether one more F on the way out ends before the first F on the way home can start, with room for those yet to come."""
    board, stage = vee.board, vee.out[rank]
    ends = board.clock[rank] + board.time[Kind.F, stage]
    room = board.held[rank] + (2 + 2 * rank) * board.takes[Kind.F, stage] <= board.problem.limits.memory[rank]
    return rank < vee.ranks[-1] and room and board.left(Kind.F, stage) and ends <= (board.arrival(Kind.F, vee.home[rank]) or 0)


def _even_out(vee: _Vee) -> None:
    """F in turn on the way out and home until each rank has run as many as the one before it, and holds its next microbatch's last F."""
    legs = cycle((vee.out, vee.home))
    microbatches = vee.board.problem.num_microbatches
    for before, rank in pairwise(vee.ranks):
        while vee.count(vee.out[rank]) + vee.count(vee.home[rank]) < vee.count(vee.out[before]) + vee.count(vee.home[before]) or (
            vee.count(vee.home[rank]) <= vee.count(vee.home[before]) < microbatches
        ):
            for stage in next(legs)[: rank - len(vee.ranks) - 1 : -1]:
                if vee.board.left(Kind.F, stage):
                    vee.board.run(Kind.F, stage)


def _backward_turn(vee: _Vee) -> None:
    """One B on every rank: on its way home where it has come that far, from the last rank up, then on its way out, from the first down."""
    board = vee.board
    homeward = [not board.left(Kind.B, vee.home[r]) or board.arrival(Kind.B, vee.out[r]) is not None for r in vee.ranks]
    for rank in reversed(vee.ranks):
        if homeward[rank]:
            vee.run(Kind.B, vee.out[rank], fill=True)
    for rank in vee.ranks:
        if not homeward[rank]:
            vee.run(Kind.B, vee.home[rank], fill=vee.fills.backward)


def _forward_turn(vee: _Vee) -> None:
    """One F on every rank where one can run, on its way home if it may."""
    for rank in vee.ranks:
        for stage in (vee.home[rank], vee.out[rank]):
            if vee.board.arrival(Kind.F, stage) is not None:
                vee.run(Kind.F, stage, vee.fills.forward)
                break
