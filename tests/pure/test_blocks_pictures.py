"""The four-step picture, its page, and the command that makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from tests.refusals import raises
from zerobubble import InputError, Schedule, make
from zerobubble.blocks import KNOWN, known_block
from zerobubble.blocks.reordering import four_steps
from zerobubble.cli import main
from zerobubble.export.blocks import SHADES, block_svg
from zerobubble.view.block_page import block_html

SVG = "{http://www.w3.org/2000/svg}"


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, ["block", *arguments], input=text)


def drawn(name: str, ranks: int, microbatches: int) -> ElementTree.Element:
    block = known_block(name, ranks)
    return ElementTree.fromstring(block_svg(block, four_steps(block, microbatches)))


@pytest.mark.parametrize("name", KNOWN)
def test_every_pass_of_every_step_is_drawn(name: str) -> None:
    steps = four_steps(known_block(name, 3), 7)
    passes = [group for group in drawn(name, 3, 7).iter(f"{SVG}g") if group.get("class") == "pass"]
    assert len(passes) == sum(len(row) for layout in steps for row in layout.rows)


def test_passes_stand_in_their_slots_on_one_scale() -> None:
    picture = drawn("v-half", 4, 8)
    places: dict[str, list[float]] = {}
    for group in picture.iterfind(f".//{SVG}g[@class='pass']"):
        title, box = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None
        assert box is not None
        places.setdefault((title.text or "").partition(";")[0], []).append(float(box.get("x", 0)))
    block, repeated, _, reordered = places["B0 of stage 0"]
    slot = (places["F1 of stage 0"][0] - places["F0 of stage 0"][1]) / 6
    assert block == repeated
    assert (block - places["F0 of stage 0"][0]) / slot == pytest.approx(25, abs=0.01)
    assert (reordered - places["F0 of stage 0"][3]) / slot == pytest.approx(16, abs=0.01)


def test_copies_differ_in_shade() -> None:
    """Sixteen microbatches are eight copies of a pair, four are two."""

    def shades(microbatches: int) -> set[str | None]:
        return {box.get("class") for box in drawn("two-thirds", 3, microbatches).iter(f"{SVG}rect")}

    every = {f"{kind}{copy}" for kind in "FBW" for copy in range(SHADES)}
    assert shades(16) & every == every
    assert shades(4) & every == {"F0", "F1", "B0", "B1", "W0", "W1"}


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    block = known_block("v-half", 4)
    page = block_html(block, four_steps(block, 8))
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    cells = re.sub(r' data-title="[^"]*"', "", page)
    assert "<td>ceil(30/6) + ceil(6/6)</td><td>6</td>" in cells
    assert '<th scope="row">Reordered</th><td>53</td><td>53</td><td>5</td><td>6</td>' in cells
    assert "rank 0: 0F0@0 7F0@10 7B0@14 7W0@15 0B0@25 0W0@29" in page


def test_names_are_escaped() -> None:
    block = known_block("v-half", 2)
    odd = type(block)("<b>&", block.placement, block.interval, block.starts)
    page = block_html(odd, four_steps(odd, 2))
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page


def test_a_picture_too_narrow_is_refused() -> None:
    block = known_block("v-half", 2)
    with raises(InputError, 640, 639, "pixels"):
        block_svg(block, four_steps(block, 2), width=639)


def test_the_command_shows_memory_and_steps(tmp_path: Path) -> None:
    files = {option: tmp_path / f"steps.{suffix}" for option, suffix in (("svg", "svg"), ("html", "html"), ("output", "txt"))}
    options = [word for option, file in files.items() for word in (f"--{option}", str(file))]
    result = run("v-half", "--ranks", "4", "--microbatches", "8", *options)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["0", "0:", "30,", "7:", "6", "6", "6", "6", "6", "6"] in lines
    assert ["reordered", "53", "53", "5", "6"] in lines
    assert files["svg"].read_text().startswith("<svg")
    assert files["html"].read_text().startswith("<!doctype html>")
    assert Schedule.from_text(files["output"].read_text()).rows == make("v-half", 4, 8).rows


def test_the_command_takes_a_block_of_ones_own() -> None:
    text = known_block("1f1b", 3).to_text().replace("name 1f1b", "name mine")
    figures = json.loads(run("-", "--microbatches", "6", "--json", text=text).stdout)
    assert figures["block"] == text
    assert [rank["law"] for rank in figures["ranks"]] == [3, 2, 1]
    assert figures["ranks"][0]["lifespans"] == {"0.0": 9}
    assert figures["steps"]["reordered"] == {"makespan": 24, "span": 24, "bubble": 6, "peak": 3}
    assert Schedule.from_dict(figures["schedule"]).rows == make("1f1b", 3, 6).rows


def test_memory_and_through_change_the_result() -> None:
    def bubble(*options: str) -> int:
        figures = json.loads(run("1f1b-v", "--ranks", "5", "--json", *options).stdout)
        return int(figures["steps"]["reordered"]["bubble"])

    assert (bubble(), bubble("--reorder-steady")) == (19, 18)
    assert bubble("--reorder-steady", "--memory", "10") < 18


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (("v-half",), None, "v-half needs --ranks P"),
        (("nosuch",), None, "there is no block 'nosuch': known are gpipe, "),
        (("-",), "zerobubble block 1\nrank 0: x\n", "cannot read a block from -: line 2: 'x' is not a pass with its slot"),
        (("-", "--ranks", "2"), known_block("1f1b", 3).to_text(), "--ranks 2 does not fit -, which has 3: leave the option out"),
        (("-",), known_block("1f1b", 3).to_text().replace("interval 3", "interval 2"), "block '1f1b': on rank 0"),
        (("v-half", "--ranks", "99999999"), None, "v-half would have up to"),
    ],
)
def test_wrong_requests_are_one_sentence(arguments: tuple[str, ...], text: str | None, message: str) -> None:
    result = run(*arguments, text=text)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
