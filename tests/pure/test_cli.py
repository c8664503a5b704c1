"""The command line: figures, files, and one-sentence errors.

Every failure is one sentence on stderr and exit code 2, never a traceback.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from tests.pure.shapes import IN_TORCH_CSV, shape
from tests.pure.test_export_pictures import PASSES
from tests.refusals import states
from tests.thinned import every
from zerobubble.cli import main
from zerobubble.export.document import dumps, loads
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.schedules import SCHEDULES, make

PAPER = ["--ranks", "8", "--microbatches", "24", "--times", "18.522,18.086,9.337", "--comm", "0.601"]


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, args, input=stdin)


def refused(*args: str) -> str:
    """The one sentence that `args` are refused with."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("zerobubble: ")
    return result.stderr.removeprefix("zerobubble: ").rstrip()


def test_list_names_every_schedule() -> None:
    rows = json.loads(run("list", "--json").stdout)
    assert [row["name"] for row in rows] == list(SCHEDULES)
    for row, recipe in zip(rows, SCHEDULES.values(), strict=True):
        found = (row["stages_per_rank"], row["any_stages"], row["torch_csv"], row["splits"], row["needs"], row["options"])
        held = (recipe.stages_per_rank, recipe.any_stages, recipe.torch_csv, recipe.splits, recipe.condition, recipe.options)
        assert found == held
        words = (row["summary"], row["formulas"], row["good_for"], row["source"])
        assert words == (recipe.summary, list(recipe.formulas), recipe.good_for, recipe.source)
    lines = run("list").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(SCHEDULES)
    assert all(line.endswith(recipe.summary) for line, recipe in zip(lines, SCHEDULES.values(), strict=True))


def test_an_option_of_the_schedules_own() -> None:
    shape = ("--ranks", "2", "--microbatches", "6")
    made = run("make", "interleaved-1f1b", *shape, "--set", "group=3").stdout
    assert made == make("interleaved-1f1b", 2, 6, group=3).to_text() != make("interleaved-1f1b", 2, 6).to_text()
    peaks = [
        json.loads(run("show", "interleaved-1f1b", *shape, "--set", f"group={group}", "--json").stdout)["peak_microbatches"]
        for group in (2, 6, "null")
    ]
    assert peaks == [2.5, 4.5, 2.5]


def test_show_gives_the_papers_bubble() -> None:
    figures = json.loads(run("show", "zb-h1", *PAPER, "--json").stdout)
    assert round(figures["bubble_span"], 4) == 0.1585
    assert len(figures["ranks"]) == figures["num_ranks"] == 8


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_figures_of_show_add_up(name: str) -> None:
    figures = json.loads(run("show", name, "--ranks", "4", "--microbatches", "8", "--times", "3,2,1", "--comm", "0.25", "--json").stdout)
    work = 8 * (6 if SCHEDULES[name].trains else 3)
    for rank in figures["ranks"]:
        assert rank["lead_ms"] + rank["work_ms"] + rank["gaps_ms"] + rank["tail_ms"] == pytest.approx(figures["makespan_ms"])
        assert rank["work_ms"] == pytest.approx(work)
    assert figures["span_ms"] == max(rank["span_ms"] for rank in figures["ranks"])
    assert figures["peak_microbatches"] == max(rank["peak_microbatches"] for rank in figures["ranks"])
    assert figures["bubble_makespan"] == pytest.approx(1 - work / figures["makespan_ms"])


def test_peak_microbatches_follow_held() -> None:
    peaks = [
        json.loads(run("show", "zb-h1", "--ranks", "4", "--microbatches", "8", "--held", held, "--json").stdout)["ranks"][3][
            "peak_microbatches"
        ]
        for held in ("1", "0")
    ]
    assert peaks == [4, 1]


def test_the_drawing_has_a_line_per_rank_as_wide_as_asked() -> None:
    lines = run("show", "zb-v", "--ranks", "3", "--microbatches", "5", "--width", "90").stdout.splitlines()
    rows = [line for line in lines if line.startswith("rank ") and "F0" in line]
    assert [len(row) for row in rows] == [90, 90, 90]
    assert rows[0].startswith("rank 0 F0")
    assert rows[2].startswith("rank 2 ·")
    assert "b4" in rows[0]


def test_the_table_has_the_idle_fraction_of_each_rank() -> None:
    lines = [line.split() for line in run("show", "1f1b", "--ranks", "2", "--microbatches", "3").stdout.splitlines()]
    at = next(number for number, words in enumerate(lines) if words[:2] == ["rank", "work"])
    header, first, second = lines[at : at + 3]
    assert [float(row[header.index("idle")]) for row in (first, second)] == [25, 25]
    assert [float(row[header.index("work")]) for row in (first, second)] == [9, 9]


def test_a_drawing_without_time_still_works() -> None:
    result = run("show", "1f1b", "--ranks", "2", "--microbatches", "2", "--times", "0,0,0")
    assert result.exit_code == 0
    assert "makespan" in result.stdout


def test_show_takes_a_file_of_ones_own(tmp_path: Path) -> None:
    schedule = make("interleaved-1f1b", 2, 4)
    for suffix, text in (("txt", schedule.to_text()), ("json", dumps(schedule)), ("csv", to_torch_csv(schedule))):
        file = tmp_path / f"mine.{suffix}"
        file.write_text(text)
        own = json.loads(run("show", str(file), "--json").stdout)
        known = json.loads(run("show", "interleaved-1f1b", "--ranks", "2", "--microbatches", "4", "--json").stdout)
        assert own["ranks"] == known["ranks"]
    states(refused("show", str(file), "--ranks", "3"), "--ranks", 3)


def test_show_writes_the_picture(tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    assert run("show", "zb-h1", "--ranks", "2", "--microbatches", "3", "--svg", str(file)).exit_code == 0
    assert len(ElementTree.parse(file).findall(PASSES)) == 2 * 3 * 3
    assert os.listdir(tmp_path) == ["picture.svg"]
    assert run("make", "zb-h1", "--ranks", "2", "--microbatches", "3", "-o", str(tmp_path / "made.svg")).exit_code == 0
    for picture in tmp_path.iterdir():
        states(ElementTree.parse(picture).findtext("{*}text") or "", "zb-h1", "2 ranks", "3 microbatches")


@pytest.mark.parametrize(
    ("name", "form"),
    every(3, [*((name, form) for name in SCHEDULES for form in ("text", "json")), *((name, "torch-csv") for name in IN_TORCH_CSV)]),
)
def test_what_make_writes_check_accepts(name: str, form: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule"
    ranks, microbatches = shape(name, 3, 4)
    assert run("make", name, "--ranks", f"{ranks}", "--microbatches", f"{microbatches}", "--format", form, "-o", str(file)).exit_code == 0
    assert loads(file.read_text(), name).rows == make(name, ranks, microbatches).rows
    result = run("check", str(file))
    assert result.exit_code == 0
    states(result.stdout, ranks, "ranks")
    assert json.loads(run("check", str(file), "--json").stdout)["legal"] is True


def test_make_writes_pytorchs_csv_to_stdout() -> None:
    text = run("make", "zb-h1", "--ranks", "8", "--microbatches", "24", "--format", "torch-csv").stdout
    assert text.startswith("0F0,")
    assert len(text.splitlines()) == 8
    assert run("make", "zb-h1", "--ranks", "2", "--microbatches", "2", "--json").stdout == dumps(make("zb-h1", 2, 2))


def test_check_prints_every_fault_and_exits_with_1() -> None:
    text = make("zb-h1", 2, 2).to_text().replace("0B0 ", "").replace("1W1", "1W7")
    result = run("check", "-", stdin=text)
    assert result.exit_code == 1
    sentences = [line for line in result.stdout.splitlines() if not line.startswith("  ")]
    assert "1W7" in sentences[0]
    data = json.loads(run("check", "-", "--json", stdin=text).stdout)
    assert data["legal"] is False
    assert [fault["message"] for fault in data["faults"]] == sentences
    assert data["faults"][0]["rank"] == 1


def test_an_illegal_file_cannot_be_shown(tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("0B0,0F0\n1F0,1B0\n")
    states(refused("show", str(file)), "rank 0", "0BW0", "position 0", "0F0")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("shwo", "did you mean 'show'?"),
        ("draw", "did you mean 'show'?"),
        ("doctor --timeout -3", "above 0"),
        ("show 1f1b --ranks 2 --microbatches 2 --buckets 3", "--reduce"),
        ("plan --ranks 2 --microbatches 2 --budget 0 --within 3", "--weights"),
        ("explore --port 99999", "99999 is not in 0 to 65,535"),
        ("--bogus", "--bogus"),
        ("list --jsn", "--json"),
        ("list extra", "extra"),
        ("show", "NAME"),
        ("diff plan.json", "zerobubble diff plan.json run.json"),
        ("compare", "zerobubble compare 1f1b zb-h1"),
        ("show zb-h9 --ranks 2 --microbatches 2", "'zb-h1', 'zb-h2' or 'zb-v'"),
        ("show zb-h1", "needs --ranks P and --microbatches M"),
        ("show zb-h1 --ranks 2", "needs --microbatches M"),
        ("show zb-h1 --ranks 2 --microbatches", "--microbatches needs"),
        ("show zb-h1 --ranks 2 --json=3", "--json takes"),
        ("show zb-h1 further", "further"),
        ("compare zb-h1", "--ranks 4 --microbatches 8"),
        ("explore --host 192.0.2.1 --port 0 --no-browser", "give another --host"),
        ("show zb-h1 --ranks x --microbatches 2", "--ranks"),
        ("show zb-h1 --ranks 0 --microbatches 2", "got 0"),
        ("show zb-h1 --ranks 2 --microbatches -1", "got -1"),
        ("show zb-h1 --ranks 99999 --microbatches 99999", "at most 2,000,000"),
        (
            "show zb-h1 --ranks 2 --microbatches 2 --stages-per-rank 2",
            "zb-h1 needs exactly 1 stage per rank, got 2",
        ),
        ("show zb-h1 --ranks 2 --microbatches 2 --stages-per-rank 0", "got 0"),
        ("show chimera --ranks 3 --microbatches 4", "chimera needs an even number of ranks, got 3"),
        ("show zb-h1 --ranks 2 --microbatches 2 --set group=2", "zb-h1 has no option 'group'"),
        ("show interleaved-1f1b --ranks 2 --microbatches 2 --set grup=2", "did you mean 'group'? its options are group"),
        (
            "make interleaved-1f1b --ranks 2 --microbatches 2 --set group=two",
            "the option group of interleaved-1f1b must be a whole number or null, got 'two'",
        ),
        ("make interleaved-1f1b --ranks 4 --microbatches 8 --set group=2", "needs groups of at least 3 microbatches, got 2"),
        ("make interleaved-1f1b --ranks 2 --microbatches 2 --set group", "'group' is not KEY=VALUE, such as group=8"),
        ("show zb-h1 --ranks 2 --microbatches 2 --times 1,2", "F,B,W"),
        ("show zb-h1 --ranks 2 --microbatches 2 --times 1,2,x", "'x' is neither a number of ms nor a time with a unit"),
        ("show zb-h1 --ranks 2 --microbatches 2 --times 1,2,nan", "nan"),
        ("show zb-h1 --ranks 2 --microbatches 2 --times 1,2,-3", "-3"),
        ("show zb-h1 --ranks 2 --microbatches 2 --comm 1e400", "1e400"),
        ("show zb-h1 --ranks 2 --microbatches 2 --held nan", "nan"),
        ("show zb-h1 --ranks 2 --microbatches 2 --width 3", "--width"),
        ("show zb-h1 --ranks 2 --microbatches 2 --svg /no/such/folder/a.svg", "cannot write /no/such/folder/a.svg"),
        ("show missing.csv", "cannot read missing.csv: No such file"),
        ("make zb-h1 --ranks 2 --microbatches 2 --format yaml", "'yaml'"),
        ("make zb-h1 --ranks 2 --microbatches 2 --format torchcsv", "did you mean 'torch-csv'?"),
        ("make zb-h1 --ranks 2 --microbatches 2 --format text --json", "contradict"),
        ("make zb-h1 --ranks 2 --microbatches 2 -o /", "cannot write /"),
        ("check missing.csv", "cannot read missing.csv: No such file"),
        ("check /", "cannot read /: Is a directory"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(args: str, said: str) -> None:
    assert said in refused(*args.split())


@pytest.mark.parametrize("command", ["explain", "frobnicate"])
def test_far_words_are_not_taken_for_a_command(command: str) -> None:
    said = refused(command)
    assert "?" not in said
    states(said, command, "show", "plan")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("show", "FILE"), "schedule"),
        (("plan", "--costs", "FILE", "-m", "8"), "costs"),
        (("show", "1f1b", "-m", "8", "--costs", "FILE"), "costs"),
        (("diff", "1f1b", "FILE", "--times", "1,1,1"), "timeline"),
    ],
)
@pytest.mark.parametrize("text", ["", "{}", '{"format": "of another program"}'])
def test_a_file_without_what_is_expected_names_it(args: tuple[str, ...], expected: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    said = refused(*(str(file) if word == "FILE" else word for word in args))
    states(said, str(file), expected, "empty" if not text else "'format'")
    assert "write" in said
    assert len(said) < 300 + len(str(file))


def test_stdin_has_a_name() -> None:
    result = run("check", "-", stdin="")
    assert result.exit_code == 2
    states(result.stderr, "stdin", "empty")


def test_many_options_are_listed_by_section() -> None:
    text = run("plan", "--help").stdout
    sections = [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert len(sections) >= 7
    assert "Options" not in sections
    part = {name: text.partition(f"\n{name}:\n")[2].partition("\n\n")[0] for name in sections}
    of = {option: [name for name in sections if f"  {option} " in part[name]] for option in ("--budget", "--weights", "--model", "--html")}
    assert all(len(found) == 1 for found in of.values()), of
    assert len({found[0] for found in of.values()}) == 4
    assert all(f"  {option} " in part[sections[0]] for option in ("--gpu", "--gpus", "--pipeline-only"))


def test_an_unreadable_file_is_named_with_line_and_cell(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n1F0,1Q0\n")
    states(refused("check", str(file)), file, "line 2", "cell 2", "1Q0")
    file.write_bytes(b"\xff\xfe0F0")
    assert "not UTF-8" in refused("check", str(file))


def test_a_file_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "huge.txt"
    file.write_text(make("1f1b", 2, 2).to_text().replace("microbatches 2", "microbatches 999999999"))
    assert "1,999,999,998 passes" in refused("check", str(file))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schedule.txt"
    file.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    states(refused("make", "zb-h1", "--ranks", "2", "--microbatches", "2", "-o", str(file)), foreign="No space left")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["schedule.txt"]


@pytest.mark.long
def test_links_stay_and_what_they_lead_to_is_written(tmp_path: Path) -> None:
    """A file, and a device, which root could replace by a file."""
    to_file, to_device = tmp_path / "link", tmp_path / "device"
    to_file.symlink_to(tmp_path / "schedule.txt")
    to_device.symlink_to("/dev/stdout")
    command = [sys.executable, "-m", "zerobubble", "make", "zb-h1", "--ranks", "2", "--microbatches", "2", "-o"]
    done = subprocess.run([*command, to_device], capture_output=True, text=True, check=True, timeout=300)
    subprocess.run([*command, to_file], check=True, timeout=300)
    assert "0F0" in done.stdout
    assert (tmp_path / "schedule.txt").read_text() in done.stdout
    assert to_file.is_symlink()
    assert to_device.is_symlink()


@pytest.mark.parametrize("verb", main.commands)
def test_every_command_prints_json_and_describes_each_line_of_its_options(verb: str) -> None:
    text = run(verb, "--help").stdout
    assert "--json" in text
    assert not re.search(r"^  [A-Z.]+$", text, re.MULTILINE)  # an argument without a description


@pytest.mark.parametrize("verb", ["", *main.commands])
def test_help_begins_with_up_to_four_examples(verb: str) -> None:
    purpose, _, rest = run(*verb.split(), "--help").stdout.partition("\n\n  Examples:\n")
    examples = rest.partition("\n\n")[0].splitlines()
    assert 3 <= len(purpose.splitlines()) <= 5
    assert 1 <= len(examples) <= 4
    assert examples[0].startswith(f"    zerobubble {verb}")


@pytest.mark.parametrize("command", ["--help", "table --help", "block v-half -p 4 -m 8", "show 1f1b -p 2 -m 4 --json"])
def test_a_reader_that_is_gone_ends_every_command_alike(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "zerobubble", *command.split()], stdout=writing, stderr=subprocess.PIPE, timeout=200)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.long
def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "zerobubble", "make", "zb-h1", "--ranks", "64", "--microbatches", "512"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "zerobubble schedule 1\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(200) == 141


def test_version_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-m", "zerobubble", "--version"], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.startswith("zerobubble ")


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        ("--help", ["zerobubble.planning.answer", "zerobubble.schedules", "zerobubble.cli.make"]),
        ("--version", ["zerobubble.planning.answer", "zerobubble.schedules"]),
        (
            "make 1f1b --ranks 4 --microbatches 8",
            ["zerobubble.planning.competition", "zerobubble.cli.plan", "zerobubble.explorer", "importlib.metadata", "torch"],
        ),
    ],
)
def test_a_command_loads_only_what_it_uses(command: str, unused: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([name for name in {unused!r} if name in sys.modules], file=sys.stderr))\n"
        f"from zerobubble.cli import main; main({command.split()!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == "[]\n"


def test_the_short_help_of_every_command_is_listed() -> None:
    listed = run("--help").stdout
    for verb, command in main.commands.items():
        assert command.name == verb
        assert f"  {verb} " in listed
