"""Writes docs/api.md, every public name in one line, and a page of each namespace in docs/api. Run it after adding a name.

.venv/bin/python -m docs.api
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cached_property
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any, NamedTuple

from sphinx.pycode import ModuleAnalyzer

import zerobubble as zb
from docs.public_names import Namespace, is_refusal, namespaces

PAGE = Path(__file__).with_suffix(".md")
FOLDER = Path(__file__).with_suffix("")
WIDEST_CALL, WIDEST_DEFAULT = 120, 24

INTRODUCTION = """# Public names

`import zerobubble as zb` has the common names at the top, and others in namespaces such as `zb.planning`. Each name leads to its
arguments, attributes, methods and example. `help(zb.plan)` prints the same. In a namespace, the names that the pages use come first, and
then others, such as parts of results and what authors of transports need. `docs/api.py` writes these pages from the docstrings.
"""
LEAD = "Times are in ns and sizes in bytes, unless a line names another unit. Arguments after `*` are given by name."
HEADINGS = {"Args": "argument", "Arguments": "argument", "Attributes": "argument and attribute"}
LINK = re.compile(r"\bdocs/([\w-]+)\.md")
SECTION = re.compile(r"^([A-Z][\w ,]*):$")
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")


class Documentation(NamedTuple):
    """The parts of a docstring: paragraphs of prose, the program or session that shows a use, and headings over explained names."""

    prose: list[str]
    example: list[str]
    sections: dict[str, dict[str, str]]


class Member(NamedTuple):
    """An attribute or method of a class: its name, with its arguments if it is called, its docstring, and the function."""

    name: str
    call: str
    text: str
    value: Any


def pages() -> dict[Path, str]:
    """Returns the text of each page."""
    spaces = list(namespaces())
    contents = fill(", ".join(f"[`{space.title}`](#{space.title.replace('.', '')})" for space in spaces), 140)
    index = "\n".join([INTRODUCTION, f"{contents}\n", *map(section, spaces)])
    return {PAGE: index} | {FOLDER / f"{space.title}.md": details(space) for space in spaces}


def with_links(text: str) -> str:
    """Returns the text of the index with links to the entries of the reference, which only the built pages have."""
    for space in namespaces():
        text = re.sub(rf"\[`(\w+)`\]\(api/{space.title}\.md#\w+\)", rf"{{py:obj}}`\1 <{space.module.__name__}.\1>`", text)
    return text


def section(space: Namespace) -> str:
    """Returns the names of a namespace as a table, without those described at the top."""
    lead = "" if space.module is zb else f"{first_sentence(space.module.__doc__ or '')}\n\n"
    elsewhere = ", ".join(link("zb", name) for name in space.top)
    also = f"\nAlso at the top: {elsewhere}.\n" if elsewhere else ""
    texts = {name: docstring(space.module, name, getattr(space.module, name)) for name in space.names}
    rows = "".join(f"| {link(space.title, name)} | {cell(first_sentence(text))} |\n" for name, text in texts.items())
    return f"## `{space.title}`\n\n{lead}| name | description |\n|---|---|\n{rows}{also}"


def link(title: str, name: str) -> str:
    """Returns a name as a link from the index to its description."""
    return f"[`{name}`](api/{title}.md#{title.replace('.', '')}{name.lower()})"


def details(space: Namespace) -> str:
    """Returns the page that describes the names of a namespace."""
    blocks = [f"# `{space.title}`", f"{LEAD} [All names](../api.md)."]
    if space.top:
        blocks.append(f"On the [page of `zb`](zb.md): {', '.join(f'[`{name}`](zb.md#zb{name.lower()})' for name in space.top)}.")
    for name in space.names:
        value = getattr(space.module, name)
        blocks.extend(described(space.title, name, value, docstring(space.module, name, value)))
    return LINK.sub(r"[\1](../\1.md)", "\n\n".join(blocks)) + "\n"


def described(title: str, name: str, value: Any, text: str) -> Iterator[str]:
    """Yields the blocks that describe a name: heading, signature, prose, arguments, members and example."""
    yield f"## `{title}.{name}`"
    if call := signature(value):
        yield f"```text\n{folded(f'{title}.{name}', call)}\n```"  # ruff would put each argument on a line
    parts = parsed(text)
    explained = {each for entries in parts.sections.values() for each in entries}
    arguments = [each for each in (inspect.signature(value).parameters if call else ()) if each not in ("args", "kwargs")]
    has_all = bool(arguments) and set(arguments) <= explained
    yield from parts.prose[:1] if has_all else parts.prose
    yield from tables(value, parts.sections)
    found = list(members(value, set(parts.sections.get("Attributes", ())))) if inspect.isclass(value) else []
    if found:
        rows = "".join(f"| `{member.call}` | {cell(first_sentence(member.text))} |\n" for member in found)
        yield f"| attribute or method | description |\n|---|---|\n{rows}".rstrip()
    for member in found:
        if sections := parsed(inspect.cleandoc(member.text)).sections:
            yield f"### `{title}.{name}.{member.name}`"
            yield from tables(member.value, sections)
    if parts.example:
        language = "pycon" if parts.example[0].startswith(">>>") else "python"
        yield "\n".join([f"```{language}", *parts.example, "```"])


def tables(value: Any, sections: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yields the names that the docstring of `value` explains as a table for each heading, arguments with their defaults."""
    for heading, entries in sections.items():
        rows = "".join(f"| `{each}{defaults(value).get(each, '')}` | {cell(entries[each])} |\n" for each in entries)
        yield f"| {HEADINGS.get(heading, heading.lower())} | description |\n|---|---|\n{rows}".rstrip()


def members(value: type, explained: set[str]) -> Iterator[Member]:
    """Yields the public attributes and methods of a class, and of its private bases."""
    bases = [value, *(each for each in value.__mro__ if each is not value and each.__name__.startswith("_"))]
    for base in bases:
        below = attribute_strings(base.__module__)
        strings = {name: " ".join(lines) for (owner, name), lines in below.items() if owner == base.__qualname__}
        public = [name for name in {**dict.fromkeys(strings), **vars(base)} if not name.startswith("_") and name not in explained]
        for name in public:
            member = inspect.getattr_static(base, name, None)
            called = inspect.unwrap(getattr(member, "__func__", member))
            text = strings.get(name) or (member.__doc__ if is_described(member) else None)
            if text and not is_refusal(called):
                yield Member(name, f"{name}{signature(called, bound=True)}", text, called)


def is_described(member: Any) -> bool:
    """Whether the docstring of an attribute of a class is its own, not of the class of a constant."""
    return inspect.isroutine(member) or isinstance(member, (property, cached_property)) or hasattr(member, "__wrapped__")


def signature(value: Any, *, bound: bool = False) -> str:
    """Returns the signature of a function or class without types; `bound` leaves out the first argument of a method."""
    if not (inspect.isfunction(value) or inspect.isclass(value)) or is_without_signature(value):
        return ""
    parameters = list(inspect.signature(value).parameters.values())
    is_method = bound and parameters and parameters[0].name in ("self", "cls")
    return f"({', '.join(words(parameters[1:] if is_method else parameters))})"


def words(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    """Yields the arguments of a signature, with `*` before the first that is given by name only."""
    starred = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        prefix = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        yield f"{prefix}{each.name}{default(each)}"


def defaults(value: Any) -> dict[str, str]:
    """Returns the default of each argument as it follows its name: "=4"; empty for a required one."""
    if not callable(value) or is_without_signature(value):
        return {}
    return {each.name: default(each) for each in inspect.signature(value).parameters.values()}


def default(parameter: inspect.Parameter) -> str:
    """Returns the default of an argument as it follows its name, abbreviated if it is long."""
    if parameter.default is parameter.empty:
        return ""
    value = parameter.default
    text = repr(str(value)) if isinstance(value, str) else repr(value)
    return f"={text if len(text) <= WIDEST_DEFAULT and '<' not in text else '...'}"


def folded(name: str, call: str) -> str:
    """Returns a call on as many lines as it needs."""
    if len(name) + len(call) <= WIDEST_CALL:
        return f"{name}{call}"
    return f"{name}(\n{fill(call[1:-1], WIDEST_CALL - 4, initial_indent='    ', subsequent_indent='    ', break_long_words=False)},\n)"


def is_without_signature(value: Any) -> bool:
    """Whether programs do not call a class: exceptions, enumerations and protocols."""
    return inspect.isclass(value) and (issubclass(value, (BaseException, Enum)) or getattr(value, "_is_protocol", False))


def docstring(module: ModuleType, name: str, value: Any) -> str:
    """Returns the docstring of a class or function; of a constant, the string below its definition."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.cleandoc(value.__doc__ or "")
    for path, source in sorted(sys.modules.items()):
        if path.startswith("zerobubble.") and getattr(source, name, None) is value and (lines := attribute_strings(path).get(("", name))):
            return "\n".join(lines).strip()
    raise LookupError(f"{module.__name__}.{name} has no docstring below it")


def attribute_strings(path: str) -> dict[tuple[str, str], list[str]]:
    """Returns the strings below assignments of a module, by class ("" for none) and name."""
    found: dict[tuple[str, str], list[str]] = ModuleAnalyzer.for_module(path).find_attr_docs()
    return found


def parsed(text: str) -> Documentation:
    """Parses a docstring."""
    found = Documentation([], [], {})
    for block in text.split("\n\n"):
        lines = block.split("\n")
        heading = SECTION.match(lines[0])
        if heading and len(lines) > 1 and ENTRY.match(lines[1]):
            found.sections[heading[1]] = entries(lines[1:])
        elif lines[0].startswith(">>>") or (lines[0].startswith("    ") and not found.sections):
            found.example.extend([*([""] if found.example else []), *(line.removeprefix("    ") for line in lines)])
        else:
            found.prose.append(block)
    return found


def entries(lines: Iterable[str]) -> dict[str, str]:
    """Returns the explanation of each name of a section."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if entry := ENTRY.match(line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def cell(text: str) -> str:
    """Returns text for a cell of a table."""
    return text.replace("|", "\\|")


def first_sentence(text: str) -> str:
    """Returns the first sentence on one line."""
    plain = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.split(r"(?<=\w\w[.)`])\s(?=[A-Z`])", plain)[0]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
