"""AGENTS.md and docs/command-line.md: all commands and programs run, in the order of the page.

The JSON of each command has the keys that AGENTS.md names.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.libraries import library
from tests.procs.programs import ROOT, programs_of, run_forked
from zerobubble.cli import main

pytestmark = pytest.mark.spread

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def commands_of(page: str) -> list[str]:
    """The commands of our command line on a page."""
    return re.findall(r"^\$ zerobubble (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)


def done(command: str) -> str:
    """What a command prints."""
    result = CliRunner().invoke(main, shlex.split(command))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.long
def test_assistants_plan_run_and_debug_as_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = commands_of("AGENTS.md")
    is_before = [not command.startswith("diff") for command in commands]
    first, later = commands[: is_before.index(False)], commands[is_before.index(False) :]
    data = {command.split()[0]: json.loads(done(command)) for command in first if "--json" in command}
    _has_the_keys(data)
    assert done(first[-1]).startswith("zerobubble program")
    (program,) = programs_of("AGENTS.md")
    assert "loss 0." in run_forked(program, tmp_path, 2)
    difference, better = (json.loads(done(command)) for command in later)
    assert len(difference["ranks"]) == 2
    assert all({"passes", "comm", "host", "plan"} <= set(rank) for rank in difference["ranks"])
    assert better["bubble_span"] >= better["lower_bound_span"]
    assert len(first) + len(later) == 8


def _has_the_keys(message: dict[str, Any]) -> None:
    """Each command has the keys that the table names."""
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|$", (ROOT / "AGENTS.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {verb for verb, _ in rows} == set(message)
    for verb, keys in rows:
        given = message[verb][0] if isinstance(message[verb], list) else message[verb]
        assert set(re.findall(r"`(\w+)`", keys)) <= set(given), verb
    assert {"reason", "searched"} <= set(message["plan"]["choices"][0])


def test_a_plan_is_seen_and_exported_in_two_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan, export = commands_of("docs/command-line.md")[:2]
    done(f"{plan} --budget 0 --placement vee")
    done(export)
    assert "runner-up" not in Path("plan.html").read_text(), "one placement has none"
    assert zb.io.load_schedule("plan.csv").rows == zb.io.load_plan("plan.json").schedule.rows


@pytest.mark.long
def test_both_tasks_of_the_page_are_done_as_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three commands on 16 ranks, and two from a configuration. The search tries so many schedules, on a busy machine, too."""
    library("transformers")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))
    plan, export, split, layers = commands_of("docs/command-line.md")
    (program,) = programs_of("docs/command-line.md")
    started = time.monotonic()
    best = done(f"{plan} --evaluations 5000").splitlines()[1]
    done(export)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run_forked(program, tmp_path, 16))]
    first = time.monotonic() - started
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert float(re.findall(r"([\d.]+) %", best)[0]) < 13, "1F1B needs more memory and has 19 %"
    done(split)
    assert re.search(r"holds [\d.]+ GB of 83.8 GB", done(layers))
    print(f"three commands took {first:.1f} s, two {time.monotonic() - started - first:.1f} s", file=sys.stderr)
    assert all(Path(file).exists() for file in ("plan.html", "plan.csv", "layers-plan.html", "layers-plan.json"))
