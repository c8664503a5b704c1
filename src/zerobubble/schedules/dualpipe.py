"""DualPipe and DualPipeV (DeepSeek-V3 technical report, arXiv 2412.19437, and the published code)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from zerobubble.ir import Kind, Op, Placement, Schedule, Step
from zerobubble.schedules.recipe import OF_SHAPE


def even_and_twice_the_ranks(ranks: int, microbatches: int, stages_per_rank: int) -> str:
    """An even number of ranks, and an even number of microbatches that is at least twice the number of ranks."""
    if ranks % 2:
        return f"needs an even number of ranks, got {ranks}"
    if microbatches % 2 or microbatches < 2 * ranks:
        return f"needs an even number of microbatches, at least twice the ranks ({2 * ranks}), got {microbatches}"
    return ""


def twice_the_ranks(ranks: int, microbatches: int, stages_per_rank: int) -> str:
    """At least twice as many microbatches as ranks."""
    too_few = microbatches < 2 * ranks
    return f"needs at least twice as many microbatches as ranks ({2 * ranks}), got {microbatches}" if too_few else ""


@OF_SHAPE
def dualpipe(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Two copies of the model in opposite directions, each forward overlapped with a backward of the other direction.

    Half of the microbatches flow down the ranks, half up. Rank r of the first half (the second half mirrors it) is d = p/2-1-r ranks
    from the middle; f and b are its passes of the other direction: F x 2d; r+1 times F f; d times b split into B and W, then f;
    m/2-p+r+1 times F overlapped with b, f with B (on the middle ranks the first F and b run one after the other); d times b, then f
    with B; r+1 times b B, the second half of these split; then d times W B, B split; then the remaining W. Exists for even p and even
    m >= 2p.

    - bubble (makespan), T_F = T_B >= T_W, overlapping saves nothing, no communication: (p/2-1)(T_FB + T_B + T_W - 3 T_W), where T_FB is
      the time of an overlapped step: (p/2-1)(T_F + 2 T_B - T_W)
    - peak memory of every rank: p+1 microbatches, and two copies of the weights

    Good for: mixture-of-experts models, where a backward hides the all-to-all messages of a forward, if a second copy of the weights
    fits.

    Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.2.1, and the code published with it.

    >>> from zerobubble import picture
    >>> print(picture(dualpipe(4, 8)))
    F0 F1 F2 f4 b4 w4 f5 F3&bw5   .  f6&BW0   bw6   .  f7&BW1   bw7   B2 W2 B3 W3
    .  F0 f4 F1 f5 F2 bw4   f6&BW0   F3&bw5   f7&BW1   bw6   BW2   .  b7 B3 w7 W3
    .  f4 F0 f5 F1 f6 BW0   F2&bw4   f7&BW1   F3&bw5   BW2   bw6   .  B3 b7 W3 w7
    f4 f5 f6 F0 B0 W0 F1 f7&BW1   .  F2&bw4   BW2   .  F3&bw5   BW3   b6 w6 b7 w7
    """
    half, per_route = ranks // 2, microbatches // 2
    rows = []
    for rank in range(ranks):
        near_route, far_route = (0, 1) if rank < half else (1, 0)
        depth = min(rank, ranks - 1 - rank)
        near = _StagePasses(depth, range(near_route * per_route, (near_route + 1) * per_route))
        far = _StagePasses(ranks - 1 - depth, range(far_route * per_route, (far_route + 1) * per_route))
        rows.append(_row(near, far, depth, half))
    return Schedule.of_steps("dualpipe", Placement.bidirectional(ranks), microbatches, rows, (0,) * per_route + (1,) * per_route)


@OF_SHAPE
def dualpipe_v(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """DualPipe cut in half and folded: one copy of the model in a V, each forward overlapped with a backward of the other direction.

    Rank r of p holds stages r (passes F B) and 2p-1-r (f b). It runs the row of a first-half rank of DualPipe on 2p ranks, with all m
    microbatches in both flows. Exists for m >= 2p.

    - bubble (makespan), T_F = T_B >= T_W, overlapping saves nothing, no communication: (p-1)(T_F + 2 T_B - T_W)/2, T per rank
    - peak memory of every rank: 2p+1 stage activations

    Good for: the same models as DualPipe, without a second copy of the weights.

    Source: DualPipeV of the DualPipe repository (DeepSeek, 2025), after "cut-in-half" by Sea AI Lab.

    >>> from zerobubble import picture
    >>> print(picture(dualpipe_v(2, 4)))
    F0 F1 F2 f0 b0 w0 f1 F3&bw1   .  f2&BW0   bw2   .  f3&BW1   bw3   B2 W2 B3 W3
    .  F0 f0 F1 f1 F2 bw0   f2&BW0   F3&bw1   f3&BW1   bw2   BW2   .  b3 B3 w3 W3
    """
    every = range(microbatches)
    rows = [_row(_StagePasses(r, every), _StagePasses(2 * ranks - 1 - r, every), r, ranks) for r in range(ranks)]
    return Schedule.of_steps("dualpipe-v", Placement.vee(ranks), microbatches, rows)


class _StagePasses:
    """The remaining passes of one stage, each kind in microbatch order."""

    def __init__(self, stage: int, microbatches: range) -> None:
        self.stage = stage
        self.count = len(microbatches)
        self._left = {kind: iter(microbatches) for kind in (Kind.F, Kind.B)}

    def forward(self) -> Op:
        return Op(Kind.F, self.stage, next(self._left[Kind.F]))

    def backward(self, kind: Kind = Kind.BW) -> Op:
        return Op(kind, self.stage, next(self._left[Kind.B]))


def _row(near: _StagePasses, far: _StagePasses, depth: int, half: int) -> Iterator[Step]:
    """Yield the steps of a rank that is `depth` ranks from the start of its `near` flow and `half - 1 - depth` from the middle."""
    to_middle = half - 1 - depth
    pending: deque[Op] = deque()

    def split(passes: _StagePasses) -> Step:
        pending.append(passes.backward(Kind.B))
        return (pending[-1],)

    def weight() -> Step:
        return (pending.popleft()._replace(kind=Kind.W),)

    for _ in range(2 * to_middle):
        yield (near.forward(),)
    for _ in range(depth + 1):
        yield (near.forward(),)
        yield (far.forward(),)
    for _ in range(to_middle):
        yield split(far)
        yield weight()
        yield (far.forward(),)
    for turn in range(near.count - 2 * half + depth + 1):
        first = near.forward(), far.backward()
        yield from zip(first) if turn == 0 and to_middle == 0 else (first,)
        yield far.forward(), near.backward()
    for _ in range(to_middle):
        yield (far.backward(),)
        yield far.forward(), near.backward()
    for turn in range(2 * (depth + 1)):
        passes = near if turn % 2 else far
        yield split(passes) if turn > depth else (passes.backward(),)
    for _ in range(to_middle):
        yield weight()
        yield split(near)
    while pending:
        yield weight()
