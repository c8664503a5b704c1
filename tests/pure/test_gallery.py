"""The gallery in docs/gallery and the pictures of other pages are up to date and complete, and every link works."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.gallery import unequal
from docs.gallery.generate import FOLDER, FRONT, front, gallery
from docs.gallery.recompute import MEMORY, RECOMPUTE, WITH, WITHOUT, WORK, drawn, found
from docs.gallery.vocabulary import VOCABULARY, vocabulary_picture
from zerobubble import Schedule
from zerobubble.costs import NONE
from zerobubble.ir import Op, Placement
from zerobubble.planning.problem.recomputation import LEVELS
from zerobubble.schedules import SCHEDULES
from zerobubble.simulation import memory_faults, metrics
from zerobubble.verify import schedule_faults

HEADINGS = ("**Rule**", "- bubble", "- peak memory", "**Here**", "**Good for**", "**Source**")


@cache
def files() -> dict[str, str]:
    return gallery()


def page() -> str:
    return files()["README.md"]


def pictures() -> dict[str, str]:
    return {name: text for name, text in files().items() if name.endswith(".svg")}


def test_the_files_are_what_the_code_gives() -> None:
    there = {file.name: file.read_text(encoding="utf-8") for kind in ("*.md", "*.svg") for file in FOLDER.glob(kind)}
    differing = sorted(name for name in there.keys() | files().keys() if there.get(name) != files().get(name))
    assert differing == [], "stale, missing or left over in docs/gallery: run `make gallery`"


def test_the_picture_of_the_readme_is_what_the_code_gives() -> None:
    assert FRONT.read_text(encoding="utf-8") == front(), "docs/timeline.svg is stale: run `make gallery`"


def in_picture(picture: Path, name: str) -> Schedule:
    """The schedule of a vee in the timeline of that name in the picture, of which every pass has a tooltip."""
    _, *panels = picture.read_text(encoding="utf-8").split('<tspan class="ink bold">')
    panel = next(panel for panel in panels if panel.startswith(name))
    _, *ranks = re.split(r">rank \d</text>", panel)
    return Schedule(name, Placement.vee(4), 8, [row_in_picture(rank) for rank in ranks])


def row_in_picture(text: str) -> list[Op]:
    """The passes of a rank from left to right."""
    found = re.findall(r'd="M([\d.]+) \S+"><title>([A-Z]+)(\d+) of stage (\d+);', text)
    return [Op.parse(f"{stage}{kind}{microbatch}") for _, kind, microbatch, stage in sorted(found, key=lambda each: float(each[0]))]


@pytest.mark.long
def test_the_picture_of_recomputation_is_what_its_schedules_give_and_the_search_finds_none_much_shorter() -> None:
    """A search may find others on other machines, so that the schedules are read from the picture, judged, and drawn again."""
    text = RECOMPUTE.read_text(encoding="utf-8")
    stated = re.search(r"levels of stages [0-9to ]+: ([a-z, ]+)</tspan>", text)
    assert stated
    known = {level.name: level for level in (NONE, *LEVELS)}
    levels = [known[name] for name in stated[1].split(", ")]
    without, lean = in_picture(RECOMPUTE, WITHOUT), in_picture(RECOMPUTE, WITH)
    assert drawn(without, lean, levels) == text, "docs/recompute.svg is stale: run `make gallery`"
    costs = WORK.costs(lean.placement).with_recompute(levels)
    for schedule, recompute in ((without, "none"), (lean, "auto")):
        assert not schedule_faults(schedule)
        assert not memory_faults(schedule, costs, WORK.limits(MEMORY))
        shortest = found(recompute).time
        assert shortest is not None
        assert shortest > 0.95 * metrics(schedule, costs).span, "the search finds shorter ones: run `make gallery`"


def test_the_picture_of_unequal_microbatches_is_what_its_schedules_give_and_the_search_finds_none_much_shorter() -> None:
    equal, planned = in_picture(unequal.UNEQUAL, unequal.EQUAL), in_picture(unequal.UNEQUAL, unequal.PLANNED)
    assert unequal.drawn(equal, planned) == unequal.UNEQUAL.read_text(encoding="utf-8"), "docs/unequal.svg is stale: run `make gallery`"
    alike = unequal.WORK.costs(planned.placement)
    for schedule, shares in ((equal, ()), (planned, unequal.SHARES)):
        assert not schedule_faults(schedule)
        costs = replace(alike, shares=shares)
        shortest = metrics(unequal.found(shares), costs).span
        assert shortest > 0.95 * metrics(schedule, costs).span, "the search finds shorter ones: run `make gallery`"


def test_the_picture_of_divided_heads_is_of_the_schedules_and_costs_of_the_program_on_its_page() -> None:
    text = VOCABULARY.read_text(encoding="utf-8")
    assert text == vocabulary_picture(), "docs/vocabulary.svg is stale: run `make gallery`"
    program = re.search(r"```python\n(.*?)```", VOCABULARY.with_suffix(".md").read_text(encoding="utf-8"), re.DOTALL)
    assert program
    with redirect_stdout(io.StringIO()) as printed:
        exec(program[1], {})
    reported = re.findall(r"([\d.]+) ms$", printed.getvalue(), re.MULTILINE)
    assert [float(makespan) for makespan in reported] == [float(makespan) for makespan in re.findall(r"makespan ([\d.]+) ms", text)]


def test_every_link_leads_somewhere() -> None:
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page(), re.MULTILINE)}
    links = re.findall(r"\]\(([^)]+)\)", page())
    local = [link for link in links if not link.startswith("https://")]
    assert {link for link in local if link.removeprefix("#") not in anchors and link not in files()} == set()
    assert set(files()) - {"README.md"} <= set(local)


def test_every_schedule_is_on_the_page_in_full() -> None:
    overview, *sections = re.split(r"^### ", page(), flags=re.MULTILINE)
    assert {section.partition("\n")[0] for section in sections} == set(SCHEDULES)
    assert len(sections) == len(re.findall(r"^\| \[", overview, re.MULTILINE)) == len(SCHEDULES)
    for section in sections:
        places = [section.find(f"\n{heading}") for heading in HEADINGS]
        assert places == sorted(places)
        assert places[0] > 0, section[:200]


def test_pictures_are_small_and_number_every_pass() -> None:
    for name, text in pictures().items():
        assert len(text.encode()) < (125_000 if name.endswith("-block.svg") else 60_000), name
        groups = [group for group in ElementTree.fromstring(text).iter() if (group.get("class") or "").startswith("pass")]
        assert groups
        box = "rect[@height='20']" if name.endswith("-block.svg") else "path"
        numbered = [[len(group.findall(f"{{http://www.w3.org/2000/svg}}{tag}")) for tag in (box, "text")] for group in groups]
        assert all(passes == texts > 0 for passes, texts in numbered), name


def test_schedules_made_from_blocks_show_them() -> None:
    shown = {name.removesuffix("-block.svg") for name in pictures() if name.endswith("-block.svg")}
    assert shown == {name for name, recipe in SCHEDULES.items() if recipe.rule.startswith("The block ")}
