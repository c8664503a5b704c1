"""Write docs/api.md: every public name by its namespace, with the first sentence of its docstring. Run it after adding a name.

.venv/bin/python -m docs.api
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import zerobubble as zb
from docs.public_names import Namespace, namespaces

PAGE = Path(__file__).with_suffix(".md")

INTRODUCTION = """# The public names

`import zerobubble as zb` has what most programs need at the top and the rest in namespaces, such as `zb.planning`. `help(zb.plan)` tells
every argument. Names that need torch load it when first touched. `docs/api.py` writes this page from the docstrings.
"""


def page() -> str:
    """The text of the page."""
    return "\n".join([INTRODUCTION, *map(section, namespaces())])


def section(space: Namespace) -> str:
    """The names of a namespace as a table; those that also stand at the top are told there alone."""
    lead = "" if space.module is zb else f"{first_sentence(space.module.__doc__ or '')}\n\n"
    also = f"\nAt the top, too: {', '.join(f'`{name}`' for name in space.again)}.\n" if space.again else ""
    return f"## `{space.title}`\n\n{lead}| name | what it is |\n|---|---|\n{''.join(rows(space.module, space.names))}{also}"


def rows(module: ModuleType, names: list[str]) -> Iterator[str]:
    """A line of the table for each name."""
    for name in names:
        value = getattr(module, name)
        told = first_sentence(documentation(module, name, value)).replace("|", "\\|")
        yield f"| `{name}{call(value)}` | {told} |\n"


def call(value: Any) -> str:
    """The arguments that a function cannot do without, `...` for others."""
    if not inspect.isfunction(value):
        return ""
    parameters = inspect.signature(value).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return f"({', '.join(needed + ['...'] * (len(needed) < len(parameters)))})"


def documentation(module: ModuleType, name: str, value: Any) -> str:
    """The docstring of a class or function; of a constant, the string below the line that defines it."""
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
    """What stands before the first full stop that ends a sentence, on one line."""
    plain = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.split(r"(?<=\w\w[.)`])\s(?=[A-Z`])", plain)[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
