"""What the README says of schedules: its programs print what it shows, its commands run, its table names every schedule."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from click.testing import CliRunner

from docs.gallery.generate import families, gallery
from zerobubble.cli import main
from zerobubble.io import load_plan
from zerobubble.schedules import registry

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
OWN = README.partition("## Your own schedule")[2]
COMMAND = r"^\$ (?:\.venv/bin/)?zerobubble (.*)\n((?:(?!\$ |```).*\n)*)"


def test_programs_print_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "registered", {})
    programs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", OWN, re.DOTALL)
    assert len(programs) == OWN.count("```python") == 2
    names: dict[str, object] = {"__name__": "own"}
    for program, shown in programs:
        with redirect_stdout(io.StringIO()) as printed:
            exec(program, names)
        assert printed.getvalue() == shown


def test_the_plan_in_python_is_saved_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = re.search(r"```python\n(.*?)```", README.partition("## Plan")[2], re.DOTALL)
    assert program is not None
    names: dict[str, object] = {}
    with redirect_stdout(io.StringIO()) as printed:
        exec(program[1].replace("seconds=5", "seconds=0"), names)
    assert printed.getvalue() == f"{names['plan']}\n"
    assert load_plan("plan.json") == names["plan"].best  # type: ignore[attr-defined]


def test_commands_run_and_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine, layers = (re.search(shown, README, re.DOTALL) for shown in (r"```text\n(zerobubble schedule 1\n.*?)```", r"```json\n(.*?)```"))
    assert mine is not None
    assert layers is not None
    Path("mine.txt").write_text(mine[1])
    Path("layers.json").write_text(layers[1])
    commands = re.findall(COMMAND, README + gallery()["README.md"], re.MULTILINE)
    assert len(commands) > 8
    for command, shown in commands:
        result = CliRunner().invoke(main, shlex.split(command))
        assert result.exit_code in (0, 1), result.output
        assert not shown or result.output == shown
        assert all(Path(file).exists() for file in re.findall(r"--(?:svg|html) (\S+)", command))


def test_the_table_names_every_schedule_in_its_family() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| (`.*`) \|$", README, re.MULTILINE)
    told = [(family, names.strip("`").split("` `")) for family, names in rows]
    assert told == [(family.lower(), [piece.name for piece in pieces]) for family, pieces in families().items()]
