"""docs/gpu.md says for each feature which tests cover it and how; its table agrees with the tests."""

from __future__ import annotations

import ast
import json
from functools import cache

import pytest

from tests.nearest import ROOT

PAGE = ROOT / "docs" / "gpu.md"
NONE = "no"
BY_MODEL = {
    "messages of all schedules": "test_every_schedule_finishes",
    "divided heads": "test_schedules_with_divided_heads_finish",
    "tied weights and copied stages": "test_tied_gradients_and_replicas_finish",
    "sums over replicas": "test_tied_gradients_and_replicas_finish",
    "`PostValidation`": "test_random_schedules_finish",
    "aborts after a failure": "test_after_a_failure_every_rank_must_abort",
    "hardware queues": "test_streams_that_share_a_hardware_queue_stop_a_step",
    "communicators: number and memory": "test_communicators_are_few_and_their_kernels_leave_multiprocessors",
}
"""By feature, the test in `test_communicators` that runs the model of NCCL's rules."""
BY_CHECKED_DEVICE = {
    "messages of all schedules": "messages that streams wait for, as with NCCL",
    "divided heads": "divided heads",
    "recompute": "recompute",
    "offload": "offload",
    "skip connections": "offload with dropout, skips, tied weights and buffers",
    "tied weights and copied stages": "offload with dropout, skips, tied weights and buffers",
    "sums over replicas": "sums over replicas",
    "FSDP2": "FSDP2",
    "expert parallelism": "expert parallelism",
    "`PostValidation`": "`PostValidation`",
    "`BubbleWork`": "`BubbleWork`",
    "background checkpoints": "checkpoints in the background",
    "aborts after a failure": "messages of a failed step",
    "CUDA graphs": "CUDA graphs",
    "CUDA graphs of whole steps": "CUDA graphs of whole steps",
    "survival of lost ranks": "test_streams_stay_ordered_when_a_rank_is_killed",
}
"""By feature, its case in `test_checked_device`, or its test in `test_survival`."""
BY_RANKS = {
    "messages of all schedules": "test_gradients",
    "divided heads": "test_divided_head",
    "recompute": "test_recompute_runs",
    "offload": "test_offload_runs",
    "skip connections": "test_skips",
    "tied weights and copied stages": "test_tied",
    "sums over replicas": "test_mesh",
    "FSDP2": "test_fsdp",
    "expert parallelism": "test_experts",
    "`PostValidation`": "test_post_validation",
    "`BubbleWork`": "test_bubble_work",
    "background checkpoints": "test_background_saves",
    "survival of lost ranks": "test_survival",
    "aborts after a failure": "test_failures",
    "CUDA graphs": "test_cuda_graphs",
}
"""By feature, its file in `tests/procs`, which runs on CPUs and, with `make gpu`, on GPUs."""


def table() -> list[str]:
    """The lines of the table: what passes on a GPU first, then what passes in part, then what has not run there."""
    features = sorted(dict.fromkeys([*BY_RANKS, *BY_MODEL, *BY_CHECKED_DEVICE]), key=lambda feature: -share_on_gpu(BY_RANKS.get(feature)))
    lines = ["| feature | model of NCCL | checked device | ranks on CPUs | ranks on one GPU |", "|---|---|---|---|---|"]
    for feature in features:
        file = BY_RANKS.get(feature)
        cells = ["yes" if feature in known else NONE for known in (BY_MODEL, BY_CHECKED_DEVICE)]
        lines.append(f"| {feature} | {' | '.join(cells)} | {f'`{file}`' if file else NONE} | {on_gpu(file) if file else NONE} |")
    return lines


@cache
def runs() -> dict[str, dict[str, int]]:
    """The results on a GPU, by file."""
    rows = json.loads((ROOT / "benchmarks/gpu/tests.json").read_text())["files"]
    return {row["file"]: row for row in rows}


def share_on_gpu(file: str | None) -> float:
    """The share of the tests of a file that have passed on a GPU, of those that ran; negative without any."""
    passed, _, ran = ("no" if file is None else on_gpu(file)).partition(" of ")
    return int(passed) / int(ran) if ran else -1.0


def on_gpu(file: str) -> str:
    """How many tests of a file have passed on a GPU, of those that ran."""
    row = runs()[file]
    if "tests" not in row:
        return "hung"
    ran = row["tests"] - row["skipped"]
    return f"{ran - row['failures'] - row['errors']} of {ran}"


def test_the_table_says_how_each_feature_was_shown_to_work() -> None:
    assert "\n".join(table()) in PAGE.read_text(), "\n".join(table())


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["tests/pure/test_communicators.py"], BY_MODEL),
        (["tests/procs/test_checked_device.py", "tests/procs/test_survival.py"], BY_CHECKED_DEVICE),
    ],
)
def test_what_the_table_relies_on_exists(paths: list[str], names: dict[str, str]) -> None:
    nodes = [node for path in paths for node in ast.walk(ast.parse((ROOT / path).read_text()))]
    known = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    known |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert set(names.values()) <= known
    for file in BY_RANKS.values():
        assert (ROOT / "tests/procs" / f"{file}.py").exists()
