"""docs/api.md lists the public names, each with its required arguments and one sentence."""

from __future__ import annotations

import re
from inspect import isfunction, signature
from typing import Any

import pytest

import zerobubble as zb
from docs.api import PAGE, page, with_links
from docs.public_names import namespaces
from tests.procs.programs import programs_of

ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)


def test_the_page_lists_the_names_that_there_are() -> None:
    """The sentences may lag behind the docstrings until `make gallery`, the names and arguments may not."""
    assert columns(PAGE.read_text(encoding="utf-8")) == columns(page()), "docs/api.md is stale: run `make gallery`"


def columns(text: str) -> list[tuple[str, list[str]]]:
    """The names of each section."""
    return [(part.partition("\n")[0], [name for name, _ in ROW.findall(part)]) for part in text.split("## ")[1:]]


def test_every_name_is_linked_to_its_entry_on_the_built_page() -> None:
    linked = re.findall(r"^\| \{py:obj\}`(\w+)[^`]* <([\w.]+)>` \|", with_links(PAGE.read_text(encoding="utf-8")), re.MULTILINE)
    assert linked == [(name, f"{space.module.__name__}.{name}") for space in namespaces() for name in space.names]


@pytest.mark.long
def test_every_name_has_one_sentence() -> None:
    for name, sentence in ROW.findall(page()):
        assert 15 < len(sentence) < 240, f"the docstring of {name} begins with {sentence!r}"


FUNCTIONS = [value for value in (getattr(zb, name) for name in zb.__all__) if isfunction(value)]
VALUES = [zb.Schedule, zb.Placement, zb.Op, zb.Costs, zb.Limits, zb.Workload, zb.Program, zb.Timeline]


@pytest.mark.parametrize("value", [*FUNCTIONS, *VALUES], ids=lambda value: value.__name__)
def test_what_stands_at_the_top_has_an_example(value: Any) -> None:
    """`make test` runs it with the other doctests, or on a page where it needs ranks."""
    if value.__module__.startswith("zerobubble.runtime"):
        assert f"zb.{value.__name__}(" in value.__doc__
        programs = programs_of("docs/checkpoints.md") + programs_of("docs/any-model.md")
        assert any(f"zb.{value.__name__}(" in program for program in programs)
    else:
        assert ">>> import zerobubble as zb\n" in value.__doc__


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_argument_is_reported(function: Any) -> None:
    found = set(re.findall(r"`(\w+)`|^\s*(\w+): ", function.__doc__, re.MULTILINE))
    words = {word for pair in found for word in pair}
    assert [name for name in signature(function).parameters if name not in words] == []
