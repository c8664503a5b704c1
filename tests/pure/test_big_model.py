"""The 70B example: its program writes the files, and the commands of docs/planner.md plan them within memory."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from zerobubble.cli import main
from zerobubble.partition import parameter_bytes

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/big_model"
SECTION = (ROOT / "docs/planner.md").read_text(encoding="utf-8").partition("## A 70B model in one command")[2].partition("\n## ")[0]
SHOWN = re.findall(r"^    zerobubble ((?:.*\\\n)*.*)$", SECTION, re.MULTILINE)
COMMANDS = [" ".join(lines.replace("\\\n", " ").split()) for lines in SHOWN]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import make_layers

    yield make_layers
    del sys.modules["make_layers"]


def test_the_files_are_what_the_program_writes(program: Any) -> None:
    for name, content in program.files().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == content, f"{name} is stale: run examples/big_model/make_layers.py"


def test_the_commands_have_the_options_that_it_prints(program: Any) -> None:
    assert len(COMMANDS) == 2
    for command in COMMANDS:
        words = shlex.split(command)
        for option, value in program.options().items():
            assert words[words.index(option) + 1] == value


def test_layers_are_uneven_and_split_backwards_take_longer() -> None:
    data = json.loads((FOLDER / "layers_fused.json").read_text(encoding="utf-8"))
    blocks = data["layers"][1:-1]
    assert len(blocks) == 80
    assert blocks[-1]["forward"] > 1.2 * blocks[0]["forward"]
    assert all(block["fused"] < 0.95 * (block["backward"] + block["weight"]) for block in blocks)


@pytest.mark.long(all=True)
@pytest.mark.parametrize("number", [pytest.param(0, id="recompute"), pytest.param(1, id="fused")])
def test_a_command_plans_it_within_the_memory(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer microbatches, without a search: seconds instead of a minute."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(COMMANDS[number].replace("--budget 20", "--evaluations 0").replace("-m 16", "-m 8"))
    words[words.index("--layers") + 1] = str(ROOT / words[words.index("--layers") + 1])
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    found = zb.io.load_plan(words[words.index("-o") + 1])
    assert zb.schedule_faults(found.schedule) == ()
    assert found.time is not None
    assert found.time >= found.bound.time
    assert found.cut is not None
    kept = parameter_bytes(found.cut.layers, found.cut.cuts, found.placement)
    room = int(words[words.index("--memory") + 1].removesuffix("GB")) * 10**9
    assert max(held + peak for held, peak in zip(kept, found.peaks, strict=True)) <= room
    assert found.problem.sharded is not None
    assert found.problem.head is not None
    assert bool(found.costs.fused) == bool(number)
    assert (found.problem.recomputation is None) == bool(number)
