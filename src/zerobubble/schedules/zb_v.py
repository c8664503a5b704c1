"""ZB-V: the zero-bubble schedule on a V."""

from collections import deque

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.schedules.recipe import OF_SHAPE


@OF_SHAPE
def zb_v(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Two stages per rank in a V: zero bubble from step to step if F, B and W take equal time; 1F1B's peak memory, twice the messages.

    Rank r of p holds stages r (passes F B W below) and 2p-1-r (f b w): F x (2(p-r)-1); r times f F; p-r times f b w; then
    in turn F B W and f b w while F or f is left; then r times B b; then the remaining B, each with the oldest W; then the remaining W.
    For m < 2p-1 it is the schedule of 2p-1 microbatches without the surplus ones.

    - bubble (largest span), T_F = T_B = T_W, no communication, m >= 2p-1: 0
    - makespan at unit stage times, no communication, m >= 2p-1: 6m + p - 1
    - peak memory of rank r: min(m+r+1, 2m, 2p) stage activations, so p microbatches on every rank for m >= 2p-1

    Good for: zero bubble at 1F1B's memory, if F, B and W take about equal time and links are fast.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 v1, section 6 and Figure 8.

    >>> from zerobubble import picture
    >>> print(picture(zb_v(2, 3)))
    F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2 .
    .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2
    """
    full = max(2 * ranks - 1, microbatches)
    rows = tuple(tuple(op for op in _row(rank, 2 * ranks - 1 - rank, ranks, full) if op.microbatch < microbatches) for rank in range(ranks))
    return Schedule("zb-v", Placement.vee(ranks), microbatches, rows)


def _row(down: int, back: int, ranks: int, microbatches: int) -> list[Op]:
    """Return the row of the rank with stages `down` and `back`; the docstring of `zb_v` states the rule."""
    row = _Row(microbatches)
    row.run(down, *[Kind.F] * (2 * (ranks - down) - 1))
    for _ in range(down):
        row.run(back, Kind.F)
        row.run(down, Kind.F)
    for _ in range(ranks - down):
        row.run(back, Kind.F, Kind.B, Kind.W)
    while row.has_left(back, Kind.F):
        row.run(down, Kind.F, Kind.B, Kind.W)
        row.run(back, Kind.F, Kind.B, Kind.W)
    for _ in range(down):
        row.run(down, Kind.B)
        row.run(back, Kind.B)
    while row.has_left(down, Kind.B):
        row.run(down, Kind.B)
        row.run_oldest_weight()
    while row.pending:
        row.run_oldest_weight()
    return row.ops


class _Row:
    """A row under construction: its `ops` so far, and `pending`, each W whose B has run, oldest first."""

    def __init__(self, microbatches: int) -> None:
        self.ops: list[Op] = []
        self.pending: deque[Op] = deque()
        self._microbatches = microbatches
        self._count: dict[tuple[int, Kind], int] = {}

    def has_left(self, stage: int, kind: Kind) -> bool:
        """Whether some microbatch has not run this pass."""
        return self._count.get((stage, kind), 0) < self._microbatches

    def run(self, stage: int, *kinds: Kind) -> None:
        """Append the next pass of each kind, if one is left."""
        for kind in kinds:
            if self.has_left(stage, kind):
                self._add(Op(kind, stage, self._count.get((stage, kind), 0)))

    def run_oldest_weight(self) -> None:
        """Append the next W of the stage whose W has waited longest."""
        self.run(self.pending[0].stage, Kind.W)

    def _add(self, op: Op) -> None:
        self._count[op.stage, op.kind] = op.microbatch + 1
        self.ops.append(op)
        if op.kind is Kind.B:
            self.pending.append(Op(Kind.W, op.stage, op.microbatch))
        if op.kind is Kind.W:
            self.pending.remove(op)
