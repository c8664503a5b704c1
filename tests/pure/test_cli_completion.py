"""The shell completes schedules, placements, models, GPUs and files: the protocol of click, as bash, zsh and fish call it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from zerobubble.cli import main
from zerobubble.cli.inputs.completion import FILES
from zerobubble.planning.placements import FAMILIES
from zerobubble.schedules import known_schedules

FILE = ("file", "")


def completions(*words: str) -> list[tuple[str, str]]:
    """The types and values that click offers for the last word."""
    *args, incomplete = words
    found = ShellComplete(main, {}, "zerobubble", "_ZEROBUBBLE_COMPLETE").get_completions(list(args), incomplete)
    return [(item.type, item.value) for item in found]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("show", "zb-h"), ["zb-h1", "zb-h2"]),
        (("make", "gp"), ["gpipe"]),
        (("compare", "1f1b", "zb-v"), ["zb-v"]),
        (("split", "config.json", "--schedule", "zb-h1"), ["zb-h1"]),
        (("trace", "a.json", "--schedule", "dualpipe-"), ["dualpipe-v"]),
        (("plan", "--gpu", "RTX3"), ["RTX3090"]),
        (("plan", "--model", "llama3-4"), ["llama3-405b"]),
    ],
)
def test_names_and_files_are_completed(words: tuple[str, ...], wanted: list[str]) -> None:
    assert completions(*words) == [("file", words[-1]), *(("plain", name) for name in wanted)]


def test_all_schedules_are_offered_with_their_help() -> None:
    offered = completions("show", "")
    assert [name for kind, name in offered if kind == "plain"] == list(known_schedules())


def test_placements_are_completed_one_after_another() -> None:
    assert completions("plan", "--placement", "lo") == [("plain", name) for name in FAMILIES if name.startswith("lo")]
    assert completions("plan", "--placement", "linear,ve") == [("plain", "linear,vee")]
    assert completions("pareto", "--placement", "an") == [("plain", "any")]


@pytest.mark.parametrize(
    "words",
    [
        ("plan", ""),
        ("plan", "--costs", ""),
        ("plan", "--layers", ""),
        ("diff", ""),
        ("diff", "plan.json", ""),
        ("trace", ""),
        ("split", ""),
        ("show", "zb-v", "--html", ""),
        ("make", "zb-v", "-o", ""),
        ("doctor", "--measure", ""),
    ],
)
def test_files_are_completed(words: tuple[str, ...]) -> None:
    assert FILE in completions(*words)


def test_blocks_folders_and_choices_are_completed() -> None:
    assert completions("block", "v-") == [("plain", name) for name in ("v-min", "v-half", "v-zb")]
    assert completions("watch", "") == [("dir", "")]
    assert ("plain", "svg") in completions("make", "zb-v", "--format", "s")


def test_every_option_for_a_file_completes_files() -> None:
    options = [option for command in main.commands.values() for option in command.params if option.metavar == "FILE"]
    assert len(options) > 20
    assert {type(option.type) for option in options} == {type(FILES)}


BASH = r"""
eval "$(_ZEROBUBBLE_COMPLETE=bash_source zerobubble)"
complete -o nosort -F _zerobubble_completion zb
compopt() { printf "files "; }
for line in "zb show zb-h" "zerobubble plan --placement linear,v" "zb show ./my"; do
    COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _zerobubble_completion "${COMP_WORDS[0]}" "${COMP_WORDS[-1]}"
    echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_both_names_of_the_command(tmp_path: Path) -> None:
    """Files are left to bash, after the names that fit."""
    for name in ("zerobubble", "zb"):
        script = tmp_path / name
        script.write_text(f"#!{sys.executable}\nfrom zerobubble_command import main\nmain()\n")
        script.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", BASH], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["files zb-h1 zb-h2", "linear,vee", "files "], done.stderr
