"""The viewer within another page, such as that of a notebook: a frame that holds a page of its own, over a picture of the same."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape

from zerobubble.view.columns import Viewed
from zerobubble.view.page import page, viewer

COMPACT = "<style>main { padding: 6px 10px; max-width: none; }</style>\n"
AROUND, ROW, HIGHEST = 270, 34, 720
"""Height of the frame in pixels: without rows, per row, and at most, beyond which it scrolls."""


def embedded_viewer(label: str, viewed: Sequence[Viewed], svg: str = "") -> str:
    """HTML in which the viewer draws the timelines. `svg` lies under the frame, and is seen where frames are left out, as on GitHub."""
    height = min(HIGHEST, AROUND + ROW * sum(each.timeline.num_ranks for each in viewed))
    document = escape(page(escape(label), (COMPACT, viewer()), viewed))
    picture = f'<img alt="{escape(label)}" style="max-width:100%" src="data:image/svg+xml;base64,{_encoded(svg)}"/>' if svg else ""
    frame = f'<iframe title="{escape(label)}" sandbox="allow-scripts" style="{_STYLE}" srcdoc="{document}"></iframe>'
    return f'<div style="position:relative;min-height:{height}px">{picture}{frame}</div>'


_STYLE = "position:absolute;inset:0;width:100%;height:100%;border:0;background:canvas"


def _encoded(svg: str) -> str:
    return b64encode(svg.encode()).decode()
