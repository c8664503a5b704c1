"""The README and the first pages: programs print the output shown, commands run, and the table names every schedule."""

from __future__ import annotations

import io
import json
import re
import shlex
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from click.testing import CliRunner

from docs import planner
from docs.gallery.generate import families, gallery
from zerobubble.cli import main
from zerobubble.io import load_plan
from zerobubble.schedules import registry

ROOT = Path(__file__).parents[2]
README, PLANNER, SCHEDULES, OWN = (
    (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/planner.md", "docs/schedules.md", "docs/own-schedule.md")
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMMAND = r"^\$ (?:\.venv/bin/)?zerobubble (.*)\n((?:(?!\$ |```).*\n)*)"
OWN = re.sub(r"```python\nimport torch\n.*?```", "", OWN, flags=re.DOTALL)
"""The page without the program that trains, which tests/procs runs."""


def test_the_readme_is_short() -> None:
    assert len(README.encode()) < 6400


def test_the_readme_has_the_figures_of_the_planner_page() -> None:
    assert planner.summary(PLANNER) in README
    (command,) = (model.command for model in planner.MODELS if model.name == planner.IN_README)
    assert f"$ {command} -o plan.json\n" in README
    (shown,) = re.findall(r"```text\n(placement .*?)```", README, re.DOTALL)
    assert f"\n{shown}" in PLANNER


def test_the_planner_page_has_the_figures_of_the_committed_benchmark() -> None:
    profiles = json.loads(planner.BENCHMARK.read_text(encoding="utf-8"))["profiles"]
    rows = [line for line in PLANNER.splitlines() if line.startswith(tuple(f"| {model.name} |" for model in planner.MODELS))]
    assert len(rows) == len(profiles) == len(planner.MODELS)
    for model, message in zip(planner.MODELS, rows, strict=True):
        assert message.endswith(f"| {planner.cells(profiles[model.name])} |")


def test_links_lead_to_sections() -> None:
    links = re.findall(r"\]\(([^)#]+)#?([^)]*)\)", README)
    assert [file for file, _ in links if not (ROOT / file).is_file()] == []
    assert [(file, anchor) for file, anchor in links if anchor and anchor not in anchors(ROOT / file)] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_extras_are_installed_in_one_spelling() -> None:
    """In quotes, since a shell may take brackets for a pattern, and by names that there are. `doctor` fills in those of `ENABLES`."""
    folders = (ROOT / folder for folder in ("src", "docs", "examples", "benchmarks"))
    files = [*ROOT.glob("*.md"), *(file for folder in folders for file in folder.rglob("*") if file.suffix in (".md", ".py"))]
    seen = [line for file in files for line in re.findall(r"pip install\b.*\[(?!\{).*", file.read_text(encoding="utf-8"))]
    assert len(seen) > 8
    for line in seen:
        spelled = re.match(r"pip install (?:-c requirements\.txt )?'(?:zerobubble|\.)\[([a-z,]+)\]'", line)
        assert spelled is not None, line
        assert set(spelled[1].split(",")) <= set(PROJECT["optional-dependencies"]), line


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
    program = re.search(r"```python\n(.*?)```", PLANNER, re.DOTALL)
    assert program is not None
    names: dict[str, object] = {}
    with redirect_stdout(io.StringIO()) as printed:
        exec(program[1].replace("seconds=5", "seconds=0"), names)
    assert printed.getvalue() == f"{names['plan']}\n"
    assert load_plan("plan.json").to_dict() == names["plan"].to_dict()  # type: ignore[attr-defined]


@pytest.mark.long
def test_commands_run_and_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = re.search(r"```text\n(zerobubble schedule 1\n.*?)```", OWN, re.DOTALL)
    layers = re.search(r"```json\n(.*?)```", PLANNER, re.DOTALL)
    assert mine is not None
    assert layers is not None
    Path("mine.txt").write_text(mine[1])
    Path("layers.json").write_text(layers[1])
    commands = re.findall(COMMAND, README + PLANNER + SCHEDULES + OWN + gallery()["README.md"], re.MULTILINE)
    assert len(commands) > 8
    for command, shown in commands:
        result = CliRunner().invoke(main, shlex.split(command))
        assert result.exit_code in (0, 1), result.output
        assert not shown or result.output == shown
        assert all(Path(file).exists() for file in re.findall(r"--(?:svg|html) (\S+)", command))


def test_the_table_names_every_schedule_in_its_family() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| (`.*`) \|$", SCHEDULES, re.MULTILINE)
    seen = [(family, names.strip("`").split("` `")) for family, names in rows]
    assert seen == [(family.lower(), [piece.name for piece in pieces]) for family, pieces in families().items()]
