"""What `zb.hooks.Telemetry` writes with TensorBoard and Weights & Biases installed: their own readers find the numbers of each step."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

import zerobubble as zb
from tests.integrations.ranks import run_program
from zerobubble.runtime.hooks.step_recorder import scalars_of

PROGRAM = Path(__file__).with_name("train_with_telemetry.py")
HEADER, BLOCK = 7, 32768
WHOLE, LAST = 1, 4
"""The log format of LevelDB, in which W&B writes offline runs: the bytes of a header and of a block, and kinds of a record's end."""

Numbers = dict[int, dict[str, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("telemetry")
    run_program(PROGRAM, made, ranks=2)
    return made


def expected(folder: Path, rank: int) -> Numbers:
    """What a rank reported, by step."""
    reports = [zb.hooks.StepReport.from_dict(data) for data in json.loads((folder / f"reports-{rank}.json").read_text())]
    numbers = {report.step: scalars_of(report, zb.Costs.uniform(2)) for report in reports}
    assert {"loss", "bubble", "peak_bytes", f"drift/{rank}F", f"waits_for_rank/{1 - rank}"} <= numbers[1].keys()
    return {step: {f"pipeline/{name}": value for name, value in found.items()} for step, found in numbers.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_tensorboard_reads_the_numbers_of_each_step(folder: Path, rank: int) -> None:
    events = EventAccumulator(str(folder / f"rank-{rank}"))
    events.Reload()
    found: Numbers = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    reported = expected(folder, rank)
    assert found.keys() == reported.keys() == {0, 1, 2}
    for step, numbers in reported.items():
        assert found[step] == pytest.approx(numbers, rel=1e-5, abs=1e-5)


def test_wandb_has_a_run_with_the_numbers_of_each_rank(folder: Path) -> None:
    found = [logged(file) for file in folder.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(found) == 2
    for rank in (0, 1):
        reported = expected(folder, rank)
        (mine,) = [numbers for numbers in found if f"pipeline/waits_for_rank/{1 - rank}" in numbers[0]]
        assert mine.keys() == reported.keys()
        for step, numbers in reported.items():
            assert mine[step] == pytest.approx(numbers, rel=1e-5, abs=1e-5)


def logged(file: Path) -> Numbers:
    """The numbers that a run of W&B has of each step."""
    found: Numbers = {}
    for data in records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found[items["_step"]] = {name: value for name, value in items.items() if name.startswith("pipeline/")}
    return found


def records(data: bytes) -> Iterator[bytes]:
    """The records of a log: pieces with a checksum, a length and a kind, none of which crosses the end of a block."""
    at, whole = HEADER, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            yield whole
            whole = b""
