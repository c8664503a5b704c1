"""The command line on limited, full or closed terminals: pictures stay readable, and every failure is one sentence.

That holds for a full disk, too. Pictures use only the characters that the terminal can show.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pure.test_cli import refused, run
from tests.refusals import states
from tests.thinned import every_of
from zerobubble.cli.outputs.drawing import draw, legend
from zerobubble.costs import Costs
from zerobubble.schedules import make
from zerobubble.simulation import simulate

SHAPE = ("-p", "4", "-m", "8")
FULL = Path("/dev/full")
INTERRUPTING = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
"""
STARTS = {"module": ["-m", "zerobubble"], "installed": ["-c", "from zerobubble_command import main; main()"]}


def in_a_process(*args: str, stdout: int = subprocess.PIPE, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerobubble", *args]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, env=os.environ | variables)


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_one_sentence() -> None:
    with FULL.open("w") as full:
        done = in_a_process("show", "zb-h1", *SHAPE, stdout=full.fileno())
    assert (done.returncode, done.stderr) == (2, "zerobubble: cannot write the output: No space left on device\n")


def test_pictures_and_tables_are_drawn_in_ascii_where_there_is_nothing_else() -> None:
    done = in_a_process("show", "zb-h1", *SHAPE, "--width", "80", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert done.stdout == run("show", "zb-h1", *SHAPE, "--width", "80").stdout.replace("─", "-").replace("·", ".")


def test_what_has_no_form_in_ascii_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "größe.txt"
    file.write_text(make("1f1b", 2, 2).to_text(), encoding="utf-8")
    done = in_a_process("compare", str(file), PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C.UTF-8")
    assert done.returncode == 2
    assert re.fullmatch(r"zerobubble: the output has 'ö', which ascii cannot encode: .*\n", done.stderr)


@pytest.mark.parametrize(
    ("module", "start"), every_of(3, ["zerobubble.planning", "zerobubble.verify", "click", "zerobubble.cli.plan"], STARTS)
)
def test_ctrl_c_while_modules_are_imported_is_one_sentence(module: str, start: str, tmp_path: Path) -> None:
    """Whatever is being imported, the package itself, too: the interrupt comes with the module, so no moment has to be met."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING.format(module=module))
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *STARTS[start], "plan", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": paths})
    assert (done.returncode, done.stdout, done.stderr.lstrip("\n")) == (
        130,
        "",
        "zerobubble: interrupted\n",
    )  # after ^C, click ends the line


def on_a_terminal(*args: str, **variables: str) -> str:
    """What the command writes to a terminal with colors."""
    mine, its = pty.openpty()
    variables = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80"} | variables
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI", "PYTHONIOENCODING")}
    command = [sys.executable, "-m", "zerobubble", *args]
    with subprocess.Popen(command, stdout=its, stderr=its, env=plain | variables) as process:
        os.close(its)
        written = b""
        while chunk := _read(mine):
            written += chunk
        assert process.wait(300) == 0
    os.close(mine)
    return written.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so when the last writer has closed it
        return b""


@pytest.mark.long
def test_without_color_a_terminal_gets_the_letters() -> None:
    colored, plain = on_a_terminal("show", "zb-h1", *SHAPE), on_a_terminal("show", "zb-h1", *SHAPE, NO_COLOR="1")
    assert "\x1b[38;2;" in colored
    rows = [[line for line in text.split("\n") if line.startswith("rank 0 ")] for text in (plain, run("show", "zb-h1", *SHAPE).stdout)]
    assert re.sub(r"\x1b\[[0-9;]*m", "", rows[0][0]) == rows[1][0]


def test_a_table_shows_on_a_terminal_where_it_is() -> None:
    assert "zb-h1" in on_a_terminal("table", "1f1b", "zb-h1", *SHAPE, "--json").partition("[\n")[0]


# More passes than columns.


def test_passes_narrower_than_a_column_are_shown_as_density() -> None:
    timeline = simulate(make("1f1b", 8, 200), Costs.uniform(8))
    picture = draw(timeline, 100, colored=False)
    first, last = (picture.plain.split("\n")[rank] for rank in (0, 7))
    assert (len(first), len(last)) == (100, 100)
    assert last[7:].startswith(("·", "░"))
    assert set(first[12:95]) == {"█"}, "in the steady state the ranks are busy with forwards and backwards in turn"
    assert "█▓▒░ passes of several kinds" in legend(timeline, colored=False, drawn=[picture]).plain
    assert "█" not in draw(timeline, 2000, colored=False).plain


def test_a_pass_with_two_letters_has_another_letter_in_a_column() -> None:
    """Its first is that of another kind: a narrow BW must not read as a B. Without one, the legend has no more to explain."""
    for width in range(30, 120):
        timeline = simulate(make("1f1b", 4, 12), Costs.uniform(4))
        picture = draw(timeline, width, colored=False)
        assert not re.search("B(?!W)", picture.plain)
        assert ("X" in picture.plain) == ("X" in legend(timeline, colored=False, drawn=[picture]).plain)
        assert ("─" in picture.plain) == ("─" in legend(timeline, colored=False, drawn=[picture]).plain)


def test_the_legend_has_a_color_for_each_shade_drawn() -> None:
    """ZB-V has two stages per rank, and 1F1B, the only one with BW, has one."""
    timelines = [simulate(make(name, 4, 8), Costs.uniform(make(name, 4, 8).num_stages)) for name in ("1f1b", "zb-v")]
    shown = legend(*timelines, colored=True, drawn=[])
    assert len([span for span in shown.spans if "on #" in str(span.style)]) == 3 * 2 + 1


def test_a_column_of_one_kind_keeps_its_letter_and_idle_ones_their_dots() -> None:
    row = draw(simulate(make("gpipe", 4, 300), Costs.uniform(4)), 87, colored=False).plain.split("\n")[0][7:]
    assert re.fullmatch(r"F+[F█]?[·░▒▓]*X+", row), row


def test_in_color_the_kinds_of_a_column_mix() -> None:
    timeline = simulate(make("zb-h1", 8, 300), Costs.uniform(8))
    row = draw(timeline, 100, colored=True).split("\n")[0]
    assert len({str(span.style) for span in row.spans}) > 3
    assert set(row.plain[7:]) <= set("▌▓▒░·")


@pytest.mark.parametrize("words", ["show 1f1b", "compare 1f1b zb-v", "table 1f1b", "block v-half"])
def test_no_line_ends_in_spaces(words: str) -> None:
    assert [line for line in run(*words.split(), *SHAPE).stdout.splitlines() if line.endswith(" ")] == []


# What cannot be drawn or written.


@pytest.mark.parametrize("verb", ["show", "compare"])
def test_no_time_is_reported_instead_of_an_empty_picture(verb: str) -> None:
    states(run(verb, "zb-h1", *SHAPE, "--times", "0,0,0").stdout, "0 ms", "Nothing", "message")


@pytest.mark.parametrize("verb", ["show zb-h1", "compare zb-h1", "block v-half", "pareto"])
def test_pictures_are_not_written_under_the_name_of_another_form(verb: str) -> None:
    states(refused(*verb.split(), *SHAPE, "--svg", "x.pdf"), "pdf", "x.svg")
    states(refused(*verb.split(), *SHAPE, "--html", "x.pdf"), "pdf", "x.html")


def test_make_writes_no_png() -> None:
    states(refused("make", "zb-h1", *SHAPE, "--format", "svg", "-o", "x.png"), "--format", "x.svg")


def test_show_writes_the_page_too(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("show", "zb-h1", *SHAPE, "--html", str(page)).exit_code == 0
    assert "zb-h1" in page.read_text()


@pytest.mark.parametrize("verb", ["show zb-h1", "compare zb-h1", "block v-half", "pareto"])
def test_a_picture_is_a_png_if_its_name_says_so(verb: str, tmp_path: Path) -> None:
    assert run(*verb.split(), *SHAPE, "--svg", str(tmp_path / "x.png")).exit_code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_is_not_written_as_a_picture(tmp_path: Path) -> None:
    states(refused("plan", *SHAPE, "--budget", "0", "-o", str(tmp_path / "plan.svg")), "svg", "plan.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("missing", "advised"), [("regex", "regex"), ("torch", "zerobubble[transformers]")])
def test_split_names_a_missing_module_and_what_installs_it(missing: str, advised: str, tmp_path: Path) -> None:
    """Only a module of the extra is installed with it."""
    (tmp_path / "config.json").write_text("{}")
    for module in {"torch", missing}:
        (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('no module', name={missing!r})")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = in_a_process("split", str(tmp_path), "--stages", "2", PYTHONPATH=paths)
    assert done.returncode == 2
    states(done.stderr, "split", missing, advised)
    assert missing == "torch" or "zerobubble[" not in done.stderr
