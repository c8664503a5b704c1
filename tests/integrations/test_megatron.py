"""Megatron-Core's own functions read our layouts, and give interleaved 1F1B in the order of ours. Its schedules run on GPUs only."""

from __future__ import annotations

import warnings
from itertools import chain, zip_longest
from types import SimpleNamespace

import pytest

import zerobubble as zb
from tests.pure.test_other_suites import GROUPS, LAYOUTS
from zerobubble.export.megatron import balanced_layers, from_megatron_layout, to_megatron_layout
from zerobubble.ir import Kind, Op, Placement

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about packages for GPUs that are missing
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
BALANCED = [(to_megatron_layout(balanced_layers(Placement.looped(8, loops), layers)), 8) for loops in (2, 4) for layers in (61, 80)]


@pytest.mark.feature("layouts of layers")
@pytest.mark.parametrize(("text", "ranks"), [*((text, ranks) for text, ranks, _ in LAYOUTS), *BALANCED])
def test_megatron_reads_a_layout_as_we_do(text: str, ranks: int) -> None:
    read = PipelineParallelLayerLayout(text, ranks)
    loops = read.virtual_pipeline_model_parallel_size
    stages = tuple("".join(LETTERS[layer.name] for layer in read.layout[rank][loop]) for loop in range(loops) for rank in range(ranks))
    assert from_megatron_layout(text, ranks)[1] == stages


SHAPES = [(ranks, group, m, loops) for ranks, group in GROUPS for m in (8, 32) for loops in (2, 4, 8) if m % group == 0]


@pytest.mark.feature("interleaved order with groups of microbatches")
@pytest.mark.parametrize(("ranks", "group", "microbatches", "loops"), SHAPES)
def test_interleaved_order_is_that_of_megatron(ranks: int, group: int, microbatches: int, loops: int) -> None:
    table = get_schedule_table(microbatches, loops, group)
    for rank, row in enumerate(zb.make("interleaved-1f1b", ranks, microbatches, loops, group=group).rows):
        group_of_ranks = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        ranks_of_it = SimpleNamespace(pp_group=group_of_ranks, virtual_pipeline_model_parallel_size=loops)
        _, _, warmup, _ = get_pp_rank_microbatches(microbatches, loops, group, p2p_communicator=ranks_of_it)
        forward = [Op(Kind.F, loop * ranks + rank, m) for m, loop in table]
        backward = [Op(Kind.BW, (loops - 1 - loop) * ranks + rank, m) for m, loop in table]
        steady = chain.from_iterable(zip_longest(forward[warmup:], backward))
        assert list(row) == [*forward[:warmup], *(op for op in steady if op is not None)]
