"""Megatron-Core reads our layouts, gives interleaved 1F1B in the order of ours, and trains with our schedules as with its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from itertools import chain, zip_longest
from pathlib import Path
from types import SimpleNamespace

import pytest

import zerobubble as zb
from tests.procs.ranks import free_port
from tests.pure.test_other_suites import GROUPS, LAYOUTS
from tests.refusals import raises
from zerobubble.errors import InputError
from zerobubble.export.megatron import balanced_layers, from_megatron_layout, to_megatron_layout
from zerobubble.ir import Kind, Op, Placement

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about packages for GPUs that are missing
    import megatron.core.pipeline_parallel
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from zerobubble.integrations.megatron import REFUSED, Player, _refuse, use_schedule

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


PROGRAM = Path(__file__).with_name("train_with_megatron.py")
REFERENCES = {"zb-h1": "1f1b", "interleaved-zb": "interleaved"}
"""Megatron's own schedule for each of ours."""
PLAIN = SimpleNamespace(cuda_graph_impl="none")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks found with Megatron's schedules and ours."""
    folder = tmp_path_factory.mktemp("megatron")
    root = PROGRAM.parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    command = [sys.executable, str(PROGRAM), str(folder), str(free_port()), *REFERENCES, *REFERENCES.values()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.mark.feature("losses of one device", "W computes weight gradients")
@pytest.mark.parametrize("case", REFERENCES)
def test_two_ranks_train_as_with_the_schedule_of_megatron(trained: Path, case: str) -> None:
    for rank in range(2):
        found, expected = (json.loads((trained / f"{name}-{rank}.json").read_text()) for name in (case, REFERENCES[case]))
        assert len(found["losses"]) == (24 if rank else 0)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        for name in ("gradients", "weights"):
            for own, other in zip(found[name], expected[name], strict=True):
                assert own == pytest.approx(other, rel=1e-6, abs=1e-6)
        assert set(found["shares"]) == {1.0}


@pytest.mark.feature("at most three changed lines")
def test_use_schedule_replaces_the_function_in_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (schedules, megatron.core.pipeline_parallel):
        monkeypatch.setattr(module, "get_forward_backward_func", schedules.get_forward_backward_func)
    player = use_schedule("zb-h1")
    assert megatron.core.pipeline_parallel.get_forward_backward_func(2, None) is player
    assert schedules.get_forward_backward_func(pp_size=4, vp_size=2) is player
    assert schedules.get_forward_backward_func(1, None) is schedules.forward_backward_no_pipelining


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("gpipe", 1), ("interleaved-zb", 2)])
def test_schedules_that_megatron_can_place_are_played(name: str, chunks: int) -> None:
    _refuse(zb.make(name, 2, 4), chunks, PLAIN)


@pytest.mark.refuses("placements other than loops")
@pytest.mark.parametrize(("name", "chunks", "stated"), [("zb-v", 2, "interleaved-zb"), ("zb-h1", 2, "2"), ("interleaved-zb", 1, "1")])
def test_a_schedule_that_does_not_fit_is_refused(name: str, chunks: int, stated: str) -> None:
    with raises(InputError, name, stated):
        _refuse(zb.make(name, 2, 4), chunks, PLAIN)


@pytest.mark.refuses("overlap_grad_reduce", "CUDA graphs")
def test_settings_that_the_player_does_not_support_are_refused_together() -> None:
    with raises(InputError, *REFUSED, "cuda_graph_impl='local'"):
        _refuse(zb.make("zb-h1", 2, 4), 1, SimpleNamespace(**dict.fromkeys(REFUSED, True), cuda_graph_impl="local"))


@pytest.mark.refuses("pipeline options that the integration sets")
def test_options_that_the_player_sets_are_refused() -> None:
    with raises(InputError, "mesh", "tied", argument="options"):
        Player("zb-h1", mesh=None, tied=())
