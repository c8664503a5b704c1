"""Writes docs/api.md: every public name by namespace, with its signature and one line. Run it after adding a name.

.venv/bin/python -m docs.api
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any

import zerobubble as zb
from docs.public_names import Namespace, namespaces

PAGE = Path(__file__).with_suffix(".md")
WIDEST_CALL, WIDEST_DEFAULT = 90, 16

INTRODUCTION = """# Public names

`import zerobubble as zb` has the common names at the top, and others in namespaces such as `zb.planning`. `help(zb.plan)` describes all
arguments. `docs/api.py` writes this page from the docstrings.
"""


def page() -> str:
    """Returns the text of the page."""
    spaces = list(namespaces())
    contents = fill(", ".join(f"[`{space.title}`](#{space.title.replace('.', '')})" for space in spaces), 140)
    return "\n".join([INTRODUCTION, f"{contents}\n", *map(section, spaces)])


def with_links(text: str) -> str:
    """Returns the text of the page with a link from each name to its entry in the reference, which only the built pages have."""
    for space in namespaces():
        for name in space.names:
            entry = f"{space.module.__name__}.{name}"
            text = re.sub(rf"^\| `({name}(\(.*\))?)` \|", rf"| {{py:obj}}`\1 <{entry}>` |", text, flags=re.MULTILINE)
    return text


def section(space: Namespace) -> str:
    """Returns the names of a namespace as a table, without those described at the top."""
    lead = "" if space.module is zb else f"{first_sentence(space.module.__doc__ or '')}\n\n"
    also = f"\nAlso at the top: {', '.join(f'`{name}`' for name in space.top)}.\n" if space.top else ""
    return f"## `{space.title}`\n\n{lead}| name | description |\n|---|---|\n{''.join(rows(space.module, space.names))}{also}"


def rows(module: ModuleType, names: list[str]) -> Iterator[str]:
    """Yields a line of the table for each name."""
    for name in names:
        value = getattr(module, name)
        description = first_sentence(documentation(module, name, value)).replace("|", "\\|")
        yield f"| `{name}{call(value)}` | {description} |\n"


def call(value: Any) -> str:
    """Returns the signature of a function or class without types, with `...` for arguments that make it too long."""
    if not (inspect.isfunction(value) or inspect.isclass(value)) or is_without_signature(value):
        return ""
    words: list[str] = []
    parameters = list(inspect.signature(value).parameters.values())
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        words.append(argument(each))
        if len(f"{value.__name__}({', '.join(words)})") > WIDEST_CALL and each.default is not each.empty:
            return f"({', '.join([*words[:-1], '...'])})".replace("*, ...", "...")
    return f"({', '.join(words)})"


def is_without_signature(value: Any) -> bool:
    """Whether programs do not call a class: exceptions, enumerations and protocols."""
    return inspect.isclass(value) and (issubclass(value, (BaseException, Enum)) or getattr(value, "_is_protocol", False))


def argument(parameter: inspect.Parameter) -> str:
    """Returns the name of an argument, with its default if that is short."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return f"{'*' if parameter.kind is parameter.VAR_POSITIONAL else '**'}{parameter.name}"
    if parameter.default is parameter.empty:
        return parameter.name
    default = f"'{parameter.default}'" if isinstance(parameter.default, str) else repr(parameter.default)
    return f"{parameter.name}={default if len(default) <= WIDEST_DEFAULT and '<' not in default else '...'}"


def documentation(module: ModuleType, name: str, value: Any) -> str:
    """Returns the docstring of a class or function; of a constant, the string below its definition."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__doc__ or ""
    own = f"{module.__name__}."
    loaded = [path for path in sys.modules if path.startswith("zerobubble.")]
    sources = [sys.modules[path] for path in sorted(loaded, key=lambda path: (not f"{path}.".startswith(own), path))]
    for source in sources:
        for statement, below in pairwise(ast.parse(inspect.getsource(source)).body):
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if any(getattr(target, "id", "") == name for target in targets) and isinstance(below, ast.Expr):
                return str(ast.literal_eval(below.value))
    raise LookupError(f"{module.__name__}.{name} has no docstring below it")


def first_sentence(text: str) -> str:
    """Returns the first sentence on one line."""
    plain = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.split(r"(?<=\w\w[.)`])\s(?=[A-Z`])", plain)[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
