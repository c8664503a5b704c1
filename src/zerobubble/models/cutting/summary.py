"""Describes the cut of a model as text, with a bar for the time of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerobubble.partition import LayerCut, parameter_bytes
from zerobubble.units import show_bytes, show_ms

_WIDTH = 20


class StageSummary(NamedTuple):
    """A stage: its units in call order, the FLOPs of their forward on the example, their parameters, and its rank."""

    units: list[str]
    flops: int
    parameters: int
    rank: int


def cut_in_words(stages: Sequence[StageSummary], tied: Sequence[Sequence[tuple[int, str]]], cut: LayerCut) -> str:
    """Returns a line for each stage, each group of tied parameters and each rank, and the lower bound of all cuts."""
    whole = sum(stage.flops for stage in stages) or 1
    several = len(stages) > cut.placement.num_ranks
    lines = [
        f"stage {number}{f' on rank {stage.rank}' if several else ''}: {' to '.join(dict.fromkeys((stage.units[0], stage.units[-1])))}: "
        f"{stage.parameters:,} parameters, {stage.flops / whole:.1%} of the operations of a forward"
        for number, stage in enumerate(stages)
    ]
    groups = [" and ".join(f"{name} of stage {stage}" for stage, name in group) for group in tied]
    return "\n".join([*lines, *(f"tied: {group}" for group in groups), *_ranks(cut), *_bound(cut)])


def _ranks(cut: LayerCut) -> Iterator[str]:
    """Yields for each rank a bar for the time of its passes relative to the slowest, and its bytes."""
    kept, even = parameter_bytes(cut.layers, cut.cuts, cut.placement), sum(cut.rank_times) / cut.placement.num_ranks or 1
    for rank, time in enumerate(cut.rank_times):
        bar = "#" * round(_WIDTH * time / (cut.slowest or 1))
        yield (
            f"rank {rank} |{bar:{_WIDTH}}| {time / even:.3f} x an even share of F, B and W; keeps {show_bytes(kept[rank])}, "
            f"and {show_bytes(cut.rank_held[rank])} for a microbatch"
        )


def _bound(cut: LayerCut) -> Iterator[str]:
    """Yields the optimality gap of the cut, and the time of the heaviest part, such as the head."""
    if cut.placement.num_ranks > 1:
        yield (
            f"The slowest rank takes {show_ms(cut.slowest)} for a microbatch, {cut.excess:.3f} x an even share; no cut is below "
            f"{cut.least_excess:.3f} x: {cut.reason}."
        )
        yield f"{cut.heaviest_text[0].upper()}{cut.heaviest_text[1:]}."
