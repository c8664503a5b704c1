"""Export to torchtitan: under the exported settings it places stages as the exported CSV does."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.pure.shapes import IN_TORCH_CSV, shape
from tests.refusals import raises, states
from zerobubble.cli import main
from zerobubble.export.torchtitan import torchtitan_settings
from zerobubble.io import from_torch_csv


def as_torchtitan_lays(name: str, degree: int, num_stages: int) -> list[tuple[int, ...]]:
    """The stages of each rank, by torchtitan's rule: there and back for two of PyTorch's schedules, else round and round."""
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    kind = schedules.get_schedule_class(name)
    per_rank = num_stages // degree
    assert (per_rank == 1) == issubclass(kind, schedules.PipelineScheduleSingle)
    if kind in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV):
        assert per_rank == 2
        return [(rank, num_stages - 1 - rank) for rank in range(degree)]
    return [tuple(rank + turn * degree for turn in range(per_rank)) for rank in range(degree)]


def stages_of_torchtitan(layers: int, per_stage: int, degree: int) -> int:
    """How many stages torchtitan makes of layers by their number in each; it refuses what ranks cannot share out."""
    stages = math.ceil((layers + 1 + 1) / per_stage)
    assert stages % degree == 0
    return stages


def test_several_stages_on_a_rank_come_with_their_number_of_layers_where_there_is_one() -> None:
    def per_stage(stages_per_rank: int, layers: int) -> object:
        schedule = zb.make("interleaved-1f1b", 2, 4, stages_per_rank)
        return torchtitan_settings(schedule, "x.csv", layers).get("pipeline_parallel_layers_per_stage")

    assert per_stage(3, 16) == 3
    assert stages_of_torchtitan(16, 3, 2) == 6
    assert per_stage(4, 10) is None  # 12 layers, ends counted, make 6 stages by two and 12 by one
    assert "pipeline_parallel_layers_per_stage" not in torchtitan_settings(zb.make("1f1b", 2, 4), "x.csv", 6)


@pytest.mark.parametrize("name", IN_TORCH_CSV)
def test_torchtitan_lays_stages_as_the_schedule_has_them_or_it_is_refused(name: str) -> None:
    schedule = zb.make(name, *shape(name, 4, 8))
    placement = schedule.placement
    ours = [tuple(stage for _, stage in placement.stages(rank)) for rank in range(4)]
    known = {zb.Placement.linear(4).routes, zb.Placement.vee(4).routes, zb.Placement.looped(4, placement.stages_per_rank).routes}
    if placement.routes not in known:
        with raises(zb.InputError, "torchtitan", "linearly", "loop", "V"):
            torchtitan_settings(schedule, "x.csv")
        return
    settings = torchtitan_settings(schedule, "x.csv", layers=30)
    assert as_torchtitan_lays(str(settings["pipeline_parallel_schedule"]), 4, schedule.num_stages) == ours
    parts = settings["module_fqns_per_model_part"]
    assert isinstance(parts, list)
    assert len(parts) == schedule.num_stages
    per_stage = settings.get("pipeline_parallel_layers_per_stage")
    assert per_stage is None or stages_of_torchtitan(30, int(str(per_stage)), 4) == schedule.num_stages
    assert [module for part in parts for module in part] == [
        "tok_embeddings",
        *(f"layers.{number}" for number in range(30)),
        "norm",
        "lm_head",
    ]


def test_the_file_and_the_settings_belong_together(tmp_path: Path) -> None:
    csv = tmp_path / "zbv.csv"
    made = CliRunner().invoke(
        main, ["make", "zb-v", "--ranks", "2", "--microbatches", "4", "--format", "torchtitan", "--layers", "5", "-o", str(csv)]
    )
    assert made.exit_code == 0
    assert made.stdout.splitlines() == [
        "--parallelism.pipeline_parallel_degree 2",
        "--parallelism.pipeline_parallel_schedule ZBVZeroBubble",
        f"--parallelism.pipeline_parallel_schedule_csv {csv}",
        "--parallelism.num_pp_microbatches 4",
        "--parallelism.pipeline_parallel_layers_per_stage 2",
        "parallelism.module_fqns_per_model_part = [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2'], ['layers.3'], "
        "['layers.4', 'norm', 'lm_head']]",
    ]
    assert from_torch_csv(csv.read_text()).steps == zb.make("zb-v", 2, 4).steps


def test_what_torchtitan_cannot_be_reported_is_refused(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["make", *arguments, "--format", "torchtitan"])
        assert (result.exit_code, result.stdout) == (2, "")
        return result.stderr

    states(refused("zb-h1", "--ranks", "2", "--microbatches", "4"), "--format", "FILE")
    csv = str(tmp_path / "x.csv")
    states(refused("hanayo", "--ranks", "4", "--microbatches", "8", "--stages-per-rank", "4", "-o", csv), "stages", "torchtitan")
    many = ["interleaved-1f1b", "--ranks", "2", "--microbatches", "4", "--stages-per-rank", "3", "-o", csv]
    states(refused(*many), "place 1", 2, "interleaved-1f1b", 3)
    plan = ["zb-v", "--ranks", "8", "--microbatches", "8", "--layers", "10", "-o", csv]
    states(refused(*plan), 10, 4, 16, "layers", "stages")
    assert not Path(csv).exists()
