"""docs/layers.md: its program prints the output shown, its commands run on the program's file, and its figures are reproduced."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.thinned import every
from zerobubble.cli import main
from zerobubble.cli.inputs.layers import read_layers

PAGE = (Path(__file__).parents[2] / "docs/layers.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| Llama-3-(\w+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's programs define, one after another, with what each printed and the folder that they wrote into."""
    found: dict[str, Any] = {"folder": tmp_path_factory.mktemp("page")}
    each = []
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as printed:
            patched.chdir(found["folder"])
            exec(program, found)
        each.append(printed.getvalue())
    return found | {"printed": each}


def test_the_programs_print_what_is_shown(names: dict[str, Any]) -> None:
    assert len(names["printed"]) == 2
    assert names["printed"] == re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.long
def test_the_commands_run_on_its_file(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(names["folder"])
    commands = re.findall(r"^\$ zerobubble (.*)$", PAGE, re.MULTILINE)
    for command in commands:
        result = CliRunner().invoke(main, [*shlex.split(command), "--placement", "vee", "--budget", "0"])
        assert result.exit_code == 0, result.output
        assert "GB of 80 GB" in result.output
    assert len(commands) == 4
    assert sum(zb.io.load_plan("plan.json").problem.layers_per_stage) == len(names["parts"])


def test_the_file_is_read_and_its_keys_are_reported(tmp_path: Path) -> None:
    shown = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    (tmp_path / "layers.json").write_text(shown[1])
    embedding, attention = read_layers(str(tmp_path / "layers.json"), 0, 1)
    assert (embedding.name, attention.block) == ("embed_tokens", "layers.0")
    found = {key for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert found == set(json.loads(shown[1])["layers"][1])


SIZES = {"8B": (4096, 14336, 32, 2048, 128256), "70B": (8192, 28672, 80, 2048, 128256)}
PLACEMENTS: list[Callable[[int], zb.Placement]] = [
    zb.Placement.linear,
    zb.Placement.vee,
    lambda ranks: zb.Placement.looped(ranks, 3),
    lambda ranks: zb.Placement.looped(ranks, 4),
]


@pytest.mark.parametrize(
    ("size", "ranks", "whole", "inside"), every(2, [(size, int(p), whole, inside) for size, p, whole, *inside in ROWS])
)
def test_the_figures_are_reached(names: dict[str, Any], size: str, ranks: int, whole: str, inside: list[str]) -> None:
    parts = names["llama"](*SIZES[size])
    assert f"{zb.partition.cut_layers(zb.partition.join_blocks(parts), zb.Placement.linear(ranks)).excess:.3f}" == whole
    reached = [f"{zb.partition.cut_layers(parts, place(ranks)).excess:.3f}" for place in PLACEMENTS]
    assert reached == inside
