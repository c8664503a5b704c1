"""docs/api.md lists the public names, and the pages of docs/api describe their arguments, attributes and methods."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from inspect import Parameter, isclass, isfunction, signature
from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from docs.api import FOLDER, PAGE, docstring, is_without_signature, members, pages, parsed, with_links
from docs.public_names import Namespace, is_refusal, namespaces
from tests.procs.programs import programs_of

COLLECTING = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
NAME = re.compile(r"^\| \[`(\w+)`\]\((\S+)\) \| (.+) \|$", re.MULTILINE)
ENTRY = re.compile(r"^\| `(\w+)")


def test_the_pages_have_the_names_that_there_are() -> None:
    """The sentences may lag behind the docstrings until `make gallery`, names, arguments and members may not."""
    written = {path: names_on(path.read_text(encoding="utf-8")) for path in (PAGE, *FOLDER.iterdir())}
    assert written == {path: names_on(text) for path, text in pages().items()}, "docs/api is stale: run `make gallery`"


def names_on(text: str) -> list[str]:
    """The headings, the signatures, and the names in tables."""
    lines = re.sub(r"^\| \[`(\w+)`\]\(\S+\)", r"| `\1`", text, flags=re.MULTILINE).splitlines()
    return [line.split(" | ")[0] for line in lines if line.startswith(("## ", "| `", "zb."))]


def test_every_link_of_the_index_leads_to_a_heading() -> None:
    headings = {
        f"{path.relative_to(PAGE.parent)}#{found.replace('.', '').lower()}"
        for path, text in pages().items()
        for found in re.findall(r"^## `(.+)`$", text, re.MULTILINE)
    }
    links = [target for _, target, _ in NAME.findall(PAGE.read_text(encoding="utf-8"))]
    assert links
    assert {*links} <= headings


def test_namespaces_list_public_names_only() -> None:
    for space in namespaces():
        if space.module is not zb:
            assert dir(space.module) == sorted(space.module.__all__), space.title


def test_every_name_is_linked_to_its_entry_on_the_built_page() -> None:
    linked = re.findall(r"^\| \{py:obj\}`(\w+) <([\w.]+)>` \|", with_links(PAGE.read_text(encoding="utf-8")), re.MULTILINE)
    assert linked == [(name, f"{space.module.__name__}.{name}") for space in namespaces() for name in space.names]


@pytest.mark.long
def test_every_name_has_one_sentence() -> None:
    for name, _, sentence in NAME.findall(pages()[PAGE]):
        assert 15 < len(sentence) < 240, f"the docstring of {name} begins with {sentence!r}"


FUNCTIONS = [value for value in (getattr(zb, name) for name in zb.__all__) if isfunction(value)]
VALUES = [zb.Schedule, zb.Placement, zb.Op, zb.Costs, zb.Limits, zb.Workload, zb.Program, zb.Timeline]


@pytest.mark.parametrize("value", [*FUNCTIONS, *VALUES], ids=lambda value: value.__name__)
def test_what_stands_at_the_top_has_an_example(value: Any) -> None:
    """`make test` runs it with the other doctests, or on a page where it needs ranks."""
    if value.__module__.startswith("zerobubble.runtime"):
        assert f"zb.{value.__name__}(" in value.__doc__
        pages = ("docs/checkpoints.md", "docs/any-model.md", "docs/train-on-gpus.md")
        programs = [program for page in pages for program in programs_of(page)]
        assert any(f"zb.{value.__name__}(" in program for program in programs)
    else:
        assert ">>> import zerobubble as zb\n" in value.__doc__


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_argument_is_reported(function: Any) -> None:
    found = set(re.findall(r"`(\w+)`|^\s*(\w+): ", function.__doc__, re.MULTILINE))
    words = {word for pair in found for word in pair}
    assert [name for name in signature(function).parameters if name not in words] == []


COMPLETE = ("zb", "zb.errors", "zb.explain", "zb.planning")
"""The namespaces in which every argument and attribute has a line of its own."""


CASES = [(space, name) for space in namespaces() if space.title in COMPLETE for name in space.names]


@pytest.mark.parametrize(("space", "name"), CASES, ids=lambda value: value if isinstance(value, str) else value.title)
def test_every_argument_and_attribute_has_a_line(space: Namespace, name: str) -> None:
    value = getattr(space.module, name)
    if not (isfunction(value) or isclass(value)) or (isclass(value) and issubclass(value, Enum)):
        return
    lines = {each for entries in parsed(docstring(space.module, name, value)).sections.values() for each in entries}
    arguments = [] if is_without_signature(value) else [*signature(value).parameters]
    one_in_prose = len(arguments) == 1 and f"`{arguments[0]}`" in value.__doc__
    assert one_in_prose or [each for each in arguments if each not in lines] == []
    if isclass(value):
        described = lines | {member.name for member in members(value, set())}
        public = [each for each in vars(value) if not each.startswith("_") and not hasattr(value.__base__, each)]
        assert [each for each in public if each not in described and not is_refusal(getattr(value, each))] == []


def calls_of(space: Namespace) -> Iterator[tuple[str, Any, str]]:
    """The functions, classes and methods of a namespace with what explains their arguments.

    Exceptions, enumerations and protocols are not called, so only their methods are among them.
    """
    for name in space.names:
        value = getattr(space.module, name)
        if isfunction(value):
            yield name, value, docstring(space.module, name, value)
        elif isclass(value):
            found = list(members(value, set()))
            if not is_without_signature(value):
                fields = " ".join(f"`{member.name}`" for member in found if "(" not in member.call)
                yield name, value, docstring(space.module, name, value) + fields
            yield from ((f"{name}.{member.name}", member.value, member.text) for member in found if isfunction(member.value))
            undescribed = [each for each, held in vars(value).items() if isfunction(held) and not each.startswith("_") and not held.__doc__]
            yield from ((f"{name}.{each}", vars(value)[each], "") for each in undescribed)


@pytest.mark.parametrize("space", list(namespaces()), ids=lambda space: space.title)
def test_every_argument_of_a_call_is_explained_in_its_docstring(space: Namespace) -> None:
    """In backticks, or with a line of its own; not the receiver of a method, and not what `*args` and `**kwargs` collect."""
    silent = {}
    for name, value, text in calls_of(space):
        explained = {word for quoted in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", quoted)}
        explained |= {word for names in re.findall(r"^ +(\w+(?:, \w+)*): ", text, re.MULTILINE) for word in names.split(", ")}
        arguments = [each.name for each in signature(value).parameters.values() if each.kind not in COLLECTING]
        if lacking := [each for each in arguments if each not in (*explained, "self", "cls")]:
            silent[name] = lacking
    assert silent == {}


def test_the_pages_say_what_a_pipeline_and_its_error_have() -> None:
    page = (FOLDER / "zb.md").read_text(encoding="utf-8")
    sections = {part.partition("`")[0]: part for part in page.split("\n## `zb.")[1:]}
    entries = {name: set(re.findall(r"^\| `(\w+)", part, re.MULTILINE)) for name, part in sections.items()}
    assert {"device", "slices", "mesh", "timeout", "step", "eval_step", "timeline", "rank", "modules"} <= entries["Pipeline"]
    assert {"inputs", "targets", "kwargs", "num_microbatches", "scaler"} <= entries["Pipeline"]  # of `step`
    assert {"rank", "op", "is_of_other_rank", "fields"} <= entries["PipelineError"]
    assert {"faults", "name"} <= entries["ScheduleError"]


def test_the_folder_has_no_other_page() -> None:
    assert {*FOLDER.iterdir()} == {path for path in pages() if path.parent == FOLDER}


def test_links_of_the_pages_lead_to_files() -> None:
    for path in FOLDER.iterdir():
        for target in re.findall(r"\]\(([^)#]+\.md)", path.read_text(encoding="utf-8")):
            assert Path(path.parent, target).exists(), (path.name, target)
