"""A Sphinx extension: a page of the reference for each public namespace, written before the pages are read, and links to its entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docs.api import PAGE as PAGE_OF_NAMES
from docs.api import with_links
from docs.public_names import namespaces

PAGE = """# {title}
{also}
```{{eval-rst}}
.. automodule:: {module}
   :members: {members}
```
"""


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "reference"))
    app.connect("source-read", lambda app, page, source: link(page, source))
    return {"parallel_read_safe": True}


def link(page: str, source: list[str]) -> None:
    """Link the names on the page that lists them."""
    if page == PAGE_OF_NAMES.stem:
        source[:] = map(with_links, source)


def write(folder: Path) -> None:
    """Write the pages into `folder`."""
    folder.mkdir(exist_ok=True)
    for space in namespaces():
        top = ", ".join(f"{{py:obj}}`{name} <zerobubble.{name}>`" for name in space.top)
        also = f"\nOn the page of [`zb`](zb.md): {top}.\n" if top else ""
        page = PAGE.format(title=f"`{space.title}`", also=also, module=space.module.__name__, members=", ".join(space.names))
        file = folder / f"{space.title}.md"
        if not file.exists() or file.read_text(encoding="utf-8") != page:
            file.write_text(page, encoding="utf-8")
