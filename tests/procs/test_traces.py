"""Profiler traces of PyTorch's own pipeline schedules are read correctly."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.procs.programs import ROOT, programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.procs.traced_runs import BACKWARD, FORWARD, record
from tests.procs.versions import needs_torchs_runtime
from tests.refusals import raises, states
from zerobubble.cli import main

pytestmark = needs_torchs_runtime
MICROBATCHES, STEPS = 4, 2


@pytest.mark.parametrize(
    ("name", "per_rank", "known", "ranks", "named"),
    [
        ("Schedule1F1B", 1, "1f1b", 3, True),
        ("ScheduleInterleaved1F1B", 2, "interleaved-1f1b", 2, False),
        ("ScheduleZBVZeroBubble", 2, "zb-v", 2, True),
    ],
)
def test_a_recorded_run_is_its_schedule(
    world: Ranks, tmp_path: Path, name: str, per_rank: int, known: str, ranks: int, named: bool
) -> None:
    run = zb.io.read_trace(world.run(record, name, per_rank, MICROBATCHES, STEPS, str(tmp_path), named, ranks=ranks))
    wanted = zb.make(known, ranks, MICROBATCHES)
    assert run.labels == (1, 2)
    assert [run.schedule(step) for step in range(STEPS)] == [wanted, wanted]
    costs = run.costs()
    for stage, (forward, backward, weight) in enumerate(zip(costs.forward, costs.backward, costs.weight, strict=True)):
        times = 2 if stage == 1 else 1
        assert times * FORWARD <= forward / 1e9 <= times * FORWARD + 0.5
        assert times * BACKWARD <= (backward + weight) / 1e9 <= times * BACKWARD + 0.5
    assert {account.total for account in run.difference(schedule=wanted).accounts} == {run.timeline().makespan}
    assert [clock.shift for clock in run.clocks] == [0] * ranks


@pytest.mark.long
def test_the_page_s_program_records_and_its_commands_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = programs_of("docs/traces.md")
    printed = run_forked(program, tmp_path, 2)
    states(printed, "1f1b", "rank 0", "rank 1")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ zerobubble (.*)$", (ROOT / "docs/traces.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        done = CliRunner().invoke(main, shlex.split(command))
        assert done.exit_code == 0, done.output
    assert all(Path(name).exists() for name in ("trace.html", "trace.svg", "costs.json", "run.json", "plan.json"))


def test_only_stages_of_pytorch_are_named() -> None:
    with raises(zb.InputError, "name_passes", "PipelineStage", "torch.distributed.pipelining", "int"):
        zb.io.name_passes(3)
