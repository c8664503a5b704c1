"""Adds the README to the package. An index shows it alone, so its links become absolute once `[project.urls]` has a `Repository`."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {}).get("Repository", "")
RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)\s]+)\)")


def absolute(link: re.Match[str]) -> str:
    """Returns a link to a page of the repository, or to the bytes of an image."""
    image, text, path = link.groups()
    return f"{image}{text}({REPOSITORY.rstrip('/')}/{'raw' if image else 'blob'}/HEAD/{path})"


README = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=RELATIVE.sub(absolute, README) if REPOSITORY else README,
    long_description_content_type="text/markdown",
)
