"""A Sphinx extension: our docstrings are plain text with backquotes, as `help()` shows them; this makes them what docutils reads.

A paragraph that ends with a colon before an indented block is a program. A line that ends with a colon, with indented lines of
`name: text` right after it, is a heading over names that are explained. The file of a page is a link to it.
"""

from __future__ import annotations

import re
from typing import Any

from docs.public_names import is_refusal

PAGE = re.compile(r"\bdocs/([\w-]+)\.md")
NAME = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("autodoc-process-docstring", lambda app, what, name, value, options, lines: rewrite(lines))
    app.connect("autodoc-skip-member", lambda app, what, name, value, skip, options: skip or is_refusal(value))
    return {"parallel_read_safe": True}


def rewrite(lines: list[str]) -> None:
    """Rewrite the lines of a docstring in place."""
    written: list[str] = []
    explained = False
    for number, line in enumerate(lines):
        after = lines[number + 1] if number + 1 < len(lines) else ""
        block = lines[number + 2] if number + 2 < len(lines) else ""
        name = NAME.match(line)
        explained = (explained and line.startswith("    ")) or (line.endswith(":") and bool(NAME.match(after)))
        if explained and not line.startswith(" "):
            written += [f"**{line[:-1]}**", ""]
        elif explained and name:
            written += [f"    ``{name[1]}``", f"        {name[2]}"]
        elif line.endswith(":") and not after and block.startswith("    ") and not block.lstrip().startswith((">>>", "- ")):
            written.append(f"{line}:")
        else:
            written.append(line)
    lines[:] = [PAGE.sub(r":doc:`\1 </\1>`", line) for line in written]
