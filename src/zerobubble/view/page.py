"""A page of the viewer: one HTML file that opens offline. It makes no requests and needs no framework and no build step.

`comparison_html` has a table of figures over the timelines of several schedules. `embedded_viewer` is a frame within another page, such as
that of a notebook, over a picture of the same.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from typing import Any

from zerobubble.errors import InputError
from zerobubble.explain import WaitsFor
from zerobubble.export.palette import COPY_COLORS, REDUCTION_COLOR, WAIT_COLORS, ink, num_shades, shade
from zerobubble.kinds import KINDS
from zerobubble.rules import gathered, given_to
from zerobubble.timeline import Doing, Timeline
from zerobubble.view.assets import asset, script, shell
from zerobubble.view.columns import COPYING, WAITS, Viewed, timeline_columns

WAITING = {
    WaitsFor.PASS: "waiting for a pass of another rank",
    WaitsFor.MESSAGE: "waiting for a message",
    WaitsFor.HOST: "waiting for the host",
}
"""Descriptions of what idle ranks wait for."""

DOING = {
    Doing.SEND: ("#3d8fa8", "sends a message"),
    Doing.WAIT: (WAIT_COLORS[WaitsFor.MESSAGE], "waits for a message"),
    Doing.OPTIMIZER: ("#7d6a4f", "steps the optimizer"),
}
"""The activities of a measured rank outside its passes: the color in the lane of messages, and the text."""

MESSAGE_OR_HOST = {"color": "#b48ac4", "text": "waiting for a message or the host"}
"""The legend of idle time in a measured timeline without times of messages."""


LAYOUT_SOURCE = "laid out"
"""The source of a timeline that was read from a building block, not simulated. Its passes may begin later than they could."""

AVOIDABLE_IDLE = {"color": "#c2a878", "text": "idle though the next pass could run"}
"""The legend of avoidable idle time in a timeline from `LAYOUT_SOURCE`."""


COPY_WAIT = {"color": "#4f9d86", "text": "waiting for a copy to the host or back"}
"""The legend of idle time that waits for a copy, in a simulated timeline with offloads."""


def page(
    title: str,
    body: Iterable[str],
    viewed: Sequence[Viewed] = (),
    losses: Sequence[dict[str, Any]] = (),
    front: dict[str, Any] | None = None,
    *,
    packed: bool = False,
) -> str:
    """Returns a page with a title, the sections of `body`, and the data of the viewer. `title` and `body` are HTML.

    `losses` are the training losses, one dict for each run. With a Pareto `front`, the viewer shows the timeline of the point that the
    reader selects. The script of a `packed` page is compressed.
    """
    data = viewer_data(viewed, losses) | {"front": front}
    return shell(title, "".join(body), asset("page.css"), _packed(script()) if packed else script(), data=data)


@cache
def _packed(text: str) -> str:
    """Returns a script that runs the compressed script `text`, in a third of its size."""
    data = b64encode(zlib.compress(text.encode(), 9)).decode()
    return (
        f'const bytes = Uint8Array.from(atob("{data}"), (letter) => letter.charCodeAt(0));\n'
        'const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));\n'
        'const made = document.createElement("script");\nmade.type = "module";\n'
        "made.textContent = await new Response(stream).text();\ndocument.body.append(made);\n"
    )


def viewer() -> str:
    """Returns the element in which the viewer draws the page's timelines."""
    return '<div id="viewer"></div>\n'


def section(name: str, title: str, body: str, lead: str = "") -> str:
    """Returns a section with its heading; an empty string if it has no body."""
    intro = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>{intro}\n{body}</section>\n' if body else ""


def header(title: str, facts: Iterable[tuple[str, str]] = ()) -> str:
    """Returns the heading of a page, and its facts as labels and values. All text is escaped."""
    items = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in facts)
    listed = f'<dl class="facts">{items}</dl>' if items else ""
    return f"<header><h1>{escape(title)}</h1>\n{listed}</header>\n"


def table(titles: Iterable[str], rows: Iterable[Iterable[str]], look: str = "") -> str:
    """Returns a table in which the first cell of each row is the row's header. All text is escaped. `look` is another class of its style.

    Each cell has its title, which a narrow page shows next to the figure.
    """
    first, *others = map(escape, titles)
    head = "".join(f'<th scope="col">{title}</th>' for title in (first, *others))
    lines = "".join(_row(name, zip(others, cells, strict=True)) for name, *cells in rows)
    style = f"figures {look}".rstrip()
    return f'<div class="scroll" tabindex="0"><table class="{style}"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>\n'


def _row(name: str, cells: Iterable[tuple[str, str]]) -> str:
    figures = "".join(f'<td data-title="{title}">{escape(cell)}</td>' for title, cell in cells)
    return f'<tr><th scope="row">{escape(name)}</th>{figures}</tr>'


def viewer_data(viewed: Sequence[Viewed], losses: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Returns the data of the viewer as a value for `json`: the timelines, and the kinds and colors with which they are drawn.

    `losses` are the training losses, one dict for each run.
    """
    return {
        "kinds": _kinds([view.timeline for view in viewed]),
        "timelines": [timeline_columns(view) for view in viewed],
        "waiting": [
            *({"color": WAIT_COLORS[waiting], "text": WAITING[waiting]} for waiting in WAITS),
            MESSAGE_OR_HOST,
            AVOIDABLE_IDLE,
            COPY_WAIT,
        ],
        "summing": REDUCTION_COLOR,
        "copying": [{"color": COPY_COLORS[way], "text": f"copy {way}"} for way in COPYING],
        "doing": [{"color": DOING[doing][0], "text": DOING[doing][1]} for doing in Doing],
        "losses": losses,
    }


def _kinds(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Returns the table of kinds: what each uses, makes, gathers and gives (on other stages, on the last one), and how it is drawn."""
    shades = num_shades(*timelines)
    return [
        {
            "letters": kind,
            "phrase": traits.phrase,
            "uses": traits.uses,
            "makes": traits.makes,
            "gathers": [[collective.value for collective in gathered(kind, stage, 2)] for stage in range(2)],
            "gives": [[collective.value for collective in given_to(kind, stage, 2)] for stage in range(2)],
            "forward": traits.forward.makes if traits.forward else [],
            "fills": traits.fills_from_start,
            "colors": [shade(kind, place, shades) for place in range(shades)],
            "inks": [ink(shade(kind, place, shades)) for place in range(shades)],
        }
        for kind, traits in KINDS.items()
    ]


def comparison_html(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    viewed: Sequence[Viewed],
    note: str,
    sections: Sequence[str] = (),
    periods: Sequence[int] = (),
) -> str:
    """The page that compares timelines: a table of their figures, then the viewer.

    The first columns compare each makespan, and each of the `periods`, with those of the first timeline.

    Args:
        title: The title of the page.
        columns: The titles of the figures.
        rows: The figures of each timeline, as text.
        viewed: The timelines, in the same order.
        note: Text below the table.
        sections: Further sections of HTML below the viewer.
        periods: The period of each timeline in ns; empty to leave the column out.

    Raises `InputError` unless there is a row for each timeline.
    """
    if len(rows) != len(viewed):
        message = "a comparison has a row of figures for each timeline, got {num_rows} rows for {num_viewed} timelines"
        raise InputError(message, num_rows=len(rows), num_viewed=len(viewed))
    times = {"period": periods, "makespan": [view.timeline.makespan for view in viewed]}
    compared = {name: _differences(values) for name, values in times.items() if len(viewed) > 1 and values}
    titles = ("schedule", *(f"{name} against {viewed[0].timeline.name}" for name in compared), *columns)
    names = [view.timeline.name for view in viewed]
    figures = table(titles, ([name, *(cells[n] for cells in compared.values()), *rows[n]] for n, name in enumerate(names)))
    return page(escape(title), (header(title), figures, f'<p class="hint">{escape(note)}</p>\n', viewer(), *sections), viewed)


def _differences(times: Sequence[int]) -> list[str]:
    """Returns the difference of each time from the first, in percent."""
    first, *others = times
    return ["–", *(f"{100 * (time / first - 1):+.2f} %".replace("-", "\N{MINUS SIGN}") if first else "–" for time in others)]


COMPACT = "<style>main { padding: 6px 10px; max-width: none; }</style>\n"
AROUND, ROW, HIGHEST = 270, 34, 720
"""Height of the frame in pixels: without rows, per row, and at most, beyond which it scrolls."""


def embedded_viewer(label: str, viewed: Sequence[Viewed], svg: str = "") -> str:
    """HTML in which the viewer draws the timelines. `svg` lies under the frame, and is seen where frames are left out, as on GitHub."""
    height = min(HIGHEST, AROUND + ROW * sum(view.timeline.num_ranks for view in viewed))
    document = escape(page(escape(label), (COMPACT, viewer()), viewed, packed=True))
    data = b64encode(svg.encode()).decode()
    picture = f'<img alt="{escape(label)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}"/>' if svg else ""
    frame = f'<iframe title="{escape(label)}" sandbox="allow-scripts" style="{_STYLE}" srcdoc="{document}"></iframe>'
    return f'<div style="position:relative;min-height:{height}px">{picture}{frame}</div>'


_STYLE = "position:absolute;inset:0;width:100%;height:100%;border:0;background:canvas"
