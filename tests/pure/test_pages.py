"""The pages build without warnings: every link works, every page is in the table of contents, every docstring is parsed."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.thinned import every
from zerobubble.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("theme", ["basic", pytest.param("furo", marks=pytest.mark.long)])
def test_the_pages_are_built_without_a_warning(tmp_path: Path, theme: str) -> None:
    """In Sphinx's own theme, in which they are written quicker, and in theirs."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-D", f"html_theme={theme}"]
    command += ["-d", str(tmp_path / "trees"), "docs"]
    done = subprocess.run([*command, str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("Pipeline", "Schedule", "plan"):
        assert f'id="zerobubble.{name}"' in (tmp_path / "html/reference/zb.html").read_text(encoding="utf-8")
    pages = {page.stem for page in (tmp_path / "html/reference").glob("*.html")}
    assert {f"zb.{name}" for name in ("planning", "explain", "io", "hooks", "blocks", "errors")} < pages


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([\w/-]+\.md)\)", index))
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts}
    assert named == {page for page in there if page != "index.md" and not page.startswith(("reference/", "api/"))}


EXTRAS = {"transformers": "transformers", "trl": "trl", "lightning": "lightning", "torchtitan": "torchtitan"}
EXTRAS |= {"deepspeed": "deepspeed", "megatron": "megatron"}
COMMANDS_WITH_EXTRAS = {"zerobubble explore": "explore", "zerobubble watch": "explore"}


@pytest.mark.parametrize("page", [page.name for page in sorted((ROOT / "docs").glob("*.md"))])
def test_a_page_installs_the_packages_of_its_programs(page: str) -> None:
    """What a program imports, or a command line needs, has its line of pip on the same page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|diff|console)\n(.*?)```", text, re.DOTALL)
    code = "\n".join(block for kind, block in blocks if kind != "console")
    shell = "\n".join(block for kind, block in blocks if kind == "console")
    named = set(re.findall(r"^[+ ]?\s*(?:from|import) (?:zerobubble\.integrations\.)?(\w+)", code, re.MULTILINE))
    needed = {EXTRAS[name] for name in named & set(EXTRAS)}
    needed |= {extra for command, extra in COMMANDS_WITH_EXTRAS.items() if f"$ {command}" in shell}
    assert {extra for extra in needed if not re.search(rf"pip install .*\[[\w,]*{extra}[\w,]*\]", text)} == set()
    assert "peft" not in named or re.search(r"pip install .*peft", text)


def test_no_page_has_a_program_that_no_test_takes_from_it() -> None:
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    pages = [page for page in (ROOT / "docs").glob("*.md") if "```python" in page.read_text(encoding="utf-8")]
    assert len(pages) > 20
    assert [page.name for page in pages if page.name not in tests] == []


def test_every_program_of_the_pages_can_be_parsed() -> None:
    """So no code of a page is wrapped as if it were prose."""
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            ast.parse(program, filename=page.name)
        outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for line in re.findall(r"^    (def .*|class .*)$", outside, re.MULTILINE):
            assert line.endswith((":", "...")), line


def test_the_reference_explains_arguments() -> None:
    """What `help()` shows of names and their meanings is a list there, and a program is shown as one."""
    sys.path.insert(0, str(ROOT / "docs/sphinx"))
    from docstrings import rewrite

    lines = (zb.Pipeline.__doc__ or "").splitlines()
    lines = [lines[0], *(line[4:] for line in lines[1:])]
    rewrite(lines)
    assert "    ``num_microbatches``" in lines
    assert any(line.endswith("::") for line in lines)


COMMANDS = [
    (page, command)
    for page in ("docs/mesh.md", "docs/fsdp.md")
    for command in re.findall(r"^    zerobubble (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize(("page", "command"), every(3, COMMANDS))
def test_a_command_of_a_page_on_clusters_runs(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    no_search = ["--budget", "0"] if command.startswith("plan") else []
    done = CliRunner().invoke(main, [*shlex.split(command), *no_search])
    assert done.exit_code == 0, done.output
    if "--weights" in command:
        assert zb.io.load_plan("plan.json").problem.sharded
        output = " ".join(done.output.split())
        assert "makespan with gathers 345 ms, 68 gathers of 408 GB" in output
        assert "No schedule on vee has fewer than 20 gathers" in output


def test_the_pages_on_clusters_have_commands() -> None:
    assert len(COMMANDS) == 4
