"""Enumerates the candidates of `divide`: ways to divide a model over GPUs, with lower bounds on the time and memory of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise, product
from operator import le
from typing import NamedTuple

from zerobubble.cost_model.estimate import message_seconds, shared_layers
from zerobubble.cost_model.held import RUNTIME_BYTES, Parameters, parameters_of, state_bytes
from zerobubble.cost_model.kernels import Efficiency, Kernels
from zerobubble.cost_model.parts import ModelParts
from zerobubble.cost_model.setting import RECOMPUTE, Setting
from zerobubble.cost_model.step import update_seconds
from zerobubble.errors import InputError
from zerobubble.ir import Placement

MOST_STAGES_OF_A_RANK = 8
MOST_SEQUENCES = 8
"""Maximum number of sequences per microbatch to try."""
SLACK = 1e-6
"""Relative safety margin of the bound for rounding to whole nanoseconds."""


class TriedSchedule(NamedTuple):
    """A published schedule to try: its stages per rank `v`, its placement, and whether it has fused backward passes."""

    name: str
    v: int | None
    vee: bool = False
    fused: bool = False

    def placement(self, ranks: int, v: int) -> Placement:
        """Returns the placement of the stages."""
        return Placement.vee(ranks) if self.vee else Placement.looped(ranks, v) if v > 1 else Placement.linear(ranks)


SCHEDULES = (
    TriedSchedule("1f1b", 1, fused=True),
    TriedSchedule("zb-h1", 1),
    TriedSchedule("interleaved-1f1b", None, fused=True),
    TriedSchedule("zb-v", 2, vee=True),
    TriedSchedule("v-half", 2, vee=True),
    TriedSchedule("v-min", 2, vee=True),
)
"""The schedules to try. `v` is None for any number of stages per rank above 1; then the ranks must divide the microbatches."""


@dataclass(frozen=True, slots=True)
class DivisionCandidate:
    """A setting with a schedule; `seconds` and `rank_bytes` are lower bounds on its step time and peak memory."""

    setting: Setting
    parts: ModelParts
    layers: tuple[int, ...]
    tried: TriedSchedule
    num_microbatches: int
    seconds: float
    rank_bytes: float


class RankShare(NamedTuple):
    """The embeddings, layers and heads of a rank, and those before its first stage: `dense` layers have no experts, `routed` ones do."""

    stages_before: int
    embeddings_before: int
    dense_before: int
    routed_before: int
    embeddings: int
    heads: int
    dense: int
    routed: int


@lru_cache(4096)
def rank_shares(tried: TriedSchedule, ranks: int, v: int, layers: tuple[int, ...], dense_layers: int) -> tuple[RankShare, ...]:
    """Returns the shares of all ranks without dominated ones."""
    route = tried.placement(ranks, v).routes[0]
    shares: dict[int, RankShare] = {}
    before = list(accumulate(layers, initial=0))
    dense_before = [min(dense_layers, count) for count in before]
    dense_of = [after - first for first, after in pairwise(dense_before)]
    for stage, rank in enumerate(route):
        dense = dense_of[stage]
        share = shares.get(rank, RankShare(stage, int(stage > 0), dense_before[stage], before[stage] - dense_before[stage], 0, 0, 0, 0))
        shares[rank] = share._replace(
            embeddings=share.embeddings + (stage == 0),
            heads=share.heads + (stage == len(route) - 1),
            dense=share.dense + dense,
            routed=share.routed + layers[stage] - dense,
        )
    distinct = set(shares.values())
    return tuple(share for share in distinct if not any(share != other and all(map(le, share, other)) for other in distinct))


def candidates(
    base: Setting, efficiency: Efficiency, gpus: int, batch: int, *, pipeline_only: bool = False, smallest: bool = False
) -> Iterator[DivisionCandidate]:
    """Yields every way to divide the model of `base` over `gpus` GPUs, for steps of `batch` sequences.

    With `pipeline_only`, tp, cp and ep are 1. With `smallest`, only those that keep the fewest activations are listed: microbatches of one
    sequence, with full recomputation.
    """
    kernels = Kernels(base.gpu, efficiency)
    every_ep = (1,) if base.model.experts is None or pipeline_only else _powers(base.model.experts.routed)
    neighbors = _powers(1 if pipeline_only else base.gpu.domain_size)
    for tp, cp, ep, microbatch, recompute in product(
        *(neighbors, neighbors, every_ep),
        *(([1], ["full"]) if smallest else (_powers(MOST_SEQUENCES), RECOMPUTE)),
    ):
        if gpus % (tp * cp) or batch % microbatch:
            continue
        try:  # with enough replicas for `ep`: `ModelParts`, the work of a GPU per layer, does not depend on their number
            setting = replace(base, tp=tp, cp=cp, ep=ep, dp=ep, microbatch=microbatch, recompute=recompute)
        except InputError:  # incompatible shapes
            continue
        parts = ModelParts.from_setting(setting, kernels)
        for pp in range(1, base.model.layers + 1):
            replicas, rest = divmod(gpus, tp * cp * pp)
            if not rest and batch % (replicas * microbatch) == 0 and tp * cp * replicas % ep == 0:
                yield from _of_ranks(replace(setting, pp=pp, dp=replicas), kernels, parts, batch // (replicas * microbatch))


def _of_ranks(setting: Setting, kernels: Kernels, parts: ModelParts, microbatches: int) -> Iterator[DivisionCandidate]:
    """Yields the candidates for one division of the GPUs, by stages per rank and schedule."""
    for v in range(1, MOST_STAGES_OF_A_RANK + 1 if setting.pp > 1 else 2):
        if setting.pp * v > setting.model.layers:
            return
        here, layers = replace(setting, v=v), shared_layers(setting.model.layers, setting.pp * v)
        for tried in SCHEDULES if setting.pp > 1 else SCHEDULES[:1]:
            if tried.v == v or (tried.v is None and v > 1 and microbatches % setting.pp == 0):
                shares = rank_shares(tried, setting.pp, v, layers, setting.model.dense_layers)
                seconds = _least_seconds(here, kernels, parts, shares, tried.fused, microbatches)
                yield DivisionCandidate(here, parts, layers, tried, microbatches, seconds, _least_bytes(here, parts, shares))


def _least_seconds(
    setting: Setting, kernels: Kernels, parts: ModelParts, shares: Sequence[RankShare], fused: bool, microbatches: int
) -> float:
    """Returns a lower bound on the step time, in seconds.

    A rank does all its work after the F's of the stages before its first one. If backward passes are fused (`fused`), the BW's of these
    earlier stages follow its last pass.
    """
    message = message_seconds(setting, kernels) * (2 if fused else 1)
    # Layers without experts come first, those with experts last.
    embedding, dense, routed, head = (
        part.times.fused if fused else sum(part.times)
        for part in (parts.embedding, parts.layers[0].whole, parts.layers[-1].whole, parts.head)
    )
    if fused:
        embedding_before, dense_before, routed_before = embedding, dense, routed
    else:
        embedding_before, dense_before, routed_before = (
            part.times.forward for part in (parts.embedding, parts.layers[0].whole, parts.layers[-1].whole)
        )
    passes = max(
        share.stages_before * message
        + share.embeddings_before * embedding_before
        + share.dense_before * dense_before
        + share.routed_before * routed_before
        + microbatches * (share.embeddings * embedding + share.dense * dense + share.routed * routed + share.heads * head)
        for share in shares
    )
    update = max(update_seconds(setting, kernels, _parameters(setting, share)) for share in shares)
    return passes * kernels.efficiency.slowest_of(setting.gpus) * (1 - SLACK) + update


def _least_bytes(setting: Setting, parts: ModelParts, shares: Sequence[RankShare]) -> float:
    """Returns a lower bound on the peak bytes over all ranks: before its first B, a rank holds a microbatch in all its stages."""
    return RUNTIME_BYTES + max(
        state_bytes(setting, parameters)
        + share.embeddings * parts.embedding.saved
        + share.dense * parts.layers[0].whole.saved
        + share.routed * parts.layers[-1].whole.saved
        + share.heads * parts.head.saved
        for share, parameters in ((share, _parameters(setting, share)) for share in shares)
    )


def _parameters(setting: Setting, share: RankShare) -> Parameters:
    """Returns the parameters of a rank; a tied embedding counts once if there is only one stage."""
    vocabularies = share.embeddings + share.heads - (setting.model.tied and setting.pp == 1)
    return parameters_of(setting, share.dense, share.routed, vocabularies)


def _powers(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << power for power in range(most.bit_length())]
