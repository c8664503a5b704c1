"""The commands of docs/view.md write the pages that they name."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerobubble.cli import main
from zerobubble.explorer import page as explorer_page
from zerobubble.view.assets import script
from zerobubble.watch import page as watch_page

PAGE = Path(__file__).parents[2] / "docs" / "view.md"
LINES = PAGE.read_text(encoding="utf-8").splitlines()
COMMANDS = [line.removeprefix("$ zerobubble ") for line in LINES if line.startswith("$ zerobubble ")]


@pytest.mark.sweep
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_writes_its_file(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert '<div id="viewer">' in Path(words[words.index("--html") + 1]).read_text(encoding="utf-8")


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) == 4


DECLARED = re.compile(r"^(?:async )?(?:function\*?|class|const|let) (\w+|\[[^\]]*\])((?:.*?, [A-Z]\w+ = )*)", re.MULTILINE)


@pytest.mark.parametrize(
    ("entry", "packages"),
    [
        *((entry, explorer_page.PACKAGES) for entry in ("main.js", "explore.js", "playground.js")),
        ("watch.js", watch_page.PACKAGES),
    ],
)
def test_modules_that_become_one_share_no_name(entry: str, packages: tuple[str, ...]) -> None:
    """A name that two of them have at their top is an error of the whole page, in which nothing is drawn."""
    found = [match.group(1) + match.group(2) for match in DECLARED.finditer(script(entry, packages))]
    names = Counter(name for declared in found for name in set(re.findall(r"(?:^\[?|, )(\w+)(?= =|,|\]|$| )", declared)))
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []
