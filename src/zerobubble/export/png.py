"""Pictures as PNG, rendered from their SVG by resvg."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from zerobubble.errors import InputError
from zerobubble.installing import install
from zerobubble.whole_files import write_bytes, write_text

PIXELS = 2
"""Pixels per unit of the SVG, for sharp text."""
_TEXT = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20"><text y="15" font-family="Helvetica,Arial,sans-serif">{}</text></svg>'
)


def svg_to_png(svg: str) -> bytes:
    """Returns the picture as a PNG file. Raises `InputError` without the extra "png", and on machines without fonts."""
    if not _has_fonts():
        raise InputError("PNG pictures need a font, and this machine has none", remedy="install one, such as DejaVu, or name the file .svg")
    return _rendered(svg)


def write_picture(file: str | Path, svg: str) -> None:
    """Writes a picture as PNG if `file` ends in .png, else as SVG. Raises `InputError` if it cannot be written."""
    if Path(file).suffix.lower() == ".png":
        write_bytes(file, svg_to_png(svg))
    else:
        write_text(file, svg)


def _rendered(svg: str) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise InputError("PNG pictures need a renderer", remedy=f"{install('png')}, or name the file .svg") from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, background="#fff", zoom=PIXELS))


@cache
def _has_fonts() -> bool:
    """Whether text is drawn: resvg leaves it out if no font is installed."""
    return _rendered(_TEXT.format("m")) != _rendered(_TEXT.format(""))
