"""Pages and code use the words of the field: the project's former private words do not come back.

CONTRIBUTING.md describes the style. A word is refused if a reader would have to learn it here; its replacement stands next to it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    r"tells?|told": "reports, shows, prints, says",
    r"beside": "next to, in addition to, along with",
    r"bought": "savings, benefit",
    r"whoever": "any rank that",
    r"comes? apart|came apart": "is split",
    r"hangs? up": "disconnects",
    r"leaner": "with less recomputation, in less memory",
    r"stuffs?": "value kind",
    r"niches?": "gap, direction",
    r"rivals?": "candidates",
    r"habits?": "usage pattern",
    r"colours?|coloured": "color",
    r"neighbours?|neighbouring": "neighbor",
    r"recognised?": "recognize",
    r"behaviours?": "behavior",
    r"judgements?": "judgment",
}
"""Words that are refused, as patterns, and what to write instead."""
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for folder, pattern in ((".", "*.md"), ("docs", "*.md"), ("examples", "*.md"), ("benchmarks", "*.md"))
    for page in (ROOT / folder).glob(pattern)
    if page.name != "api.md"  # made of docstrings
)
FOLDERS = ("benchmarks", "docs", "examples", "src", "tests")
"""Folders of the code in which no identifier, docstring, comment or message has such a word."""
FILES = sorted(
    file.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for ending in ("*.py", "*.js")
    for file in (ROOT / folder).rglob(ending)
    if "_build" not in file.parts and file != Path(__file__)
)
ELSEWHERE = re.compile(r"\.tell\(\)")
"""Calls of methods that other libraries define: those of Python's files."""


def refused(text: str) -> list[str]:
    """The refused words of a text, with the number of their line and their replacement; parts of identifiers count as words."""
    lines = ELSEWHERE.sub("", text).replace("_", " ").splitlines()
    pattern = re.compile("|".join(rf"(?P<w{n}>\b(?:{words})\b)" for n, words in enumerate(WORDS)), re.IGNORECASE)
    instead = list(WORDS.values())
    return [
        f"line {number}: {found[0]!r}: write {instead[int(str(found.lastgroup)[1:])]}"
        for number, line in enumerate(lines, 1)
        for found in pattern.finditer(line)
    ]


def test_a_refused_word_is_found() -> None:
    assert refused("It works.\nEvery rank is told.") == ["line 2: 'told': write reports, shows, prints, says"]
    assert len(refused("status_beside = 1")) == 1
    assert refused("file.tell()") == []


@pytest.mark.parametrize("name", [*PAGES, *FILES])
def test_the_words_are_those_of_the_field(name: str) -> None:
    assert refused((ROOT / name).read_text(encoding="utf-8")) == []
