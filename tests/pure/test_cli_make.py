"""`zerobubble make`: every file format and its requirements."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from tests.pure.shapes import IN_TORCH_CSV, shape
from tests.pure.test_export_pictures import PASSES
from tests.refusals import states
from zerobubble.cli import main
from zerobubble.export.document import loads
from zerobubble.lowering import lower
from zerobubble.program import Program
from zerobubble.schedules import SCHEDULES, make


def run(name: str, ranks: int, microbatches: int, *options: str) -> Result:
    return CliRunner().invoke(main, ["make", name, "--ranks", f"{ranks}", "--microbatches", f"{microbatches}", *options])


def refused(name: str, *options: str) -> str:
    result = run(name, 2, 4, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_program_is_the_one_we_run(name: str) -> None:
    schedule = make(name, *shape(name, 2, 4))
    text = run(name, *shape(name, 2, 4), "--format", "program").stdout
    assert Program.from_text(text) == lower(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures_hold_every_pass(name: str) -> None:
    schedule = make(name, *shape(name, 2, 4))
    passes = sum(map(len, schedule.rows))
    picture = ElementTree.fromstring(run(name, *shape(name, 2, 4), "--format", "svg").stdout)
    assert len(picture.findall(PASSES)) == passes
    events = json.loads(run(name, *shape(name, 2, 4), "--format", "perfetto").stdout)["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == passes
    longest = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert longest >= 1000 * 4 * (3 if SCHEDULES[name].trains else 1), "F, B and W of a rank take 1 ms each"


@pytest.mark.parametrize("form", ["torch-csv", "torch-csv-comms", "torch-csv-fsdp"])
@pytest.mark.parametrize("name", IN_TORCH_CSV)
def test_every_csv_is_read_back(name: str, form: str) -> None:
    text = run(name, *shape(name, 2, 4), "--format", form).stdout
    assert loads(text, name).steps == make(name, *shape(name, 2, 4)).steps
    assert ("SEND_F" in text, "UNSHARD" in text) == (form != "torch-csv", form == "torch-csv-fsdp")


def test_a_layout_shows_the_layers_of_each_stage() -> None:
    assert run("interleaved-1f1b", 4, 8, "--format", "megatron-layout", "--layers", "62").stdout == "Et*7|(t*8|)*6,t*7,L\n"
    assert run("1f1b", 4, 8, "--format", "megatron-layout", "--layers", "3").stdout == "Et|t|t|L\n"


def test_what_a_form_needs_or_cannot_hold_is_said() -> None:
    assert "--format megatron-layout needs --layers N" in refused("1f1b", "--format", "megatron-layout")
    states(refused("zb-v", "--format", "megatron-layout", "--layers", "8"), "vee", "--placement linear,looped-2")
    states(refused("1f1b", "--format", "megatron-layout", "--layers", "0"), "number", "transformer", "layers", 0)
    states(refused("1f1b", "--layers", "8"), "--layers", "--format", "megatron-layout")
    for form in ("torch-csv", "torch-csv-comms", "torch-csv-fsdp"):
        states(refused("chimera", "--format", form), 2, "PyTorch", "CSV")


STARTS = {
    "txt": b"zerobubble schedule",
    "json": b"{",
    "csv": b"0F0",
    "svg": b"<svg",
    "png": b"\x89PNG",
    "html": b"<!doctype html>",
}


@pytest.mark.parametrize("ending", STARTS)
def test_the_name_of_a_file_selects_its_form(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"out.{ending}"
    assert run("1f1b", 2, 4, "-o", str(file)).exit_code == 0
    assert file.read_bytes().lower().lstrip().startswith(STARTS[ending].lower()), file.read_bytes()[:40]


@pytest.mark.parametrize(
    ("form", "ending"),
    [("text", "svg"), ("json", "txt"), ("svg", "png"), ("torch-csv", "json"), ("perfetto", "html"), ("program", "csv"), ("svg", "pdf")],
)
def test_a_form_that_contradicts_the_name_of_its_file_is_refused(form: str, ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"out.{ending}"
    states(refused("1f1b", "--format", form, "-o", str(file)), form, ending)
    assert not file.exists()
