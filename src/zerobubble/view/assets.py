"""The viewer's ES modules and styles, put into a page: modules one after another, each after those it imports, without a build step.

A module in `web/` imports by whole lines, `import { a, b } from "./other.js";`. A page that is opened from a file cannot load modules from
next to it, so they become one, and share their top-level names.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const)\b)", re.MULTILINE)


def asset(name: str, packages: tuple[str, ...] = (__package__,)) -> str:
    """The text of a file in `web/` of the first of `packages` that has it."""
    folders = [files(package).joinpath("web") for package in packages]
    return next(folder for folder in folders if folder.joinpath(name).is_file()).joinpath(name).read_text(encoding="utf-8")


@cache
def script(entry: str = "main.js", packages: tuple[str, ...] = (__package__,)) -> str:
    """`entry` and everything that it imports, as one module."""
    placed: dict[str, str] = {}
    _place(entry, packages, placed)
    return "\n".join(placed.values())


def shell(title: str, body: str, style: str, module: str, **data: Any) -> str:
    """The document of a page. `title` and `body` are HTML; `module` is its script, which finds each of `data` as JSON by its name."""
    texts = {name: json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c") for name, value in data.items()}
    elements = "".join(f'<script type="application/json" id="{name}">{text}</script>\n' for name, text in texts.items())
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}</main>\n"
        f'{elements}<script type="module">\n{module}</script>\n</body>\n</html>\n'
    )


def _place(name: str, packages: tuple[str, ...], placed: dict[str, str]) -> None:
    if name in placed:
        return
    text = asset(name, packages)
    for imported in IMPORT.findall(text):
        _place(imported, packages, placed)
    placed[name] = EXPORT.sub("", IMPORT.sub("", text))
