"""docs/api.md lists the public names, each with what it cannot be called without and a sentence."""

from __future__ import annotations

import re

from docs.api import PAGE, page

ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)


def test_the_page_lists_the_names_that_there_are() -> None:
    """The sentences may lag behind the docstrings until `make gallery`, the names and arguments may not."""
    assert columns(PAGE.read_text(encoding="utf-8")) == columns(page()), "docs/api.md is stale: run `make gallery`"


def columns(text: str) -> list[tuple[str, list[str]]]:
    """The names of each section."""
    return [(part.partition("\n")[0], [name for name, _ in ROW.findall(part)]) for part in text.split("## ")[1:]]


def test_every_name_has_one_sentence() -> None:
    for name, sentence in ROW.findall(page()):
        assert 15 < len(sentence) < 240, f"the docstring of {name} begins with {sentence!r}"
