"""A picture of the Pareto front of memory and bubble."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from html import escape
from math import asinh, hypot
from typing import NamedTuple
from zlib import crc32

from zerobubble.errors import InputError
from zerobubble.export.heading import Heading, LegendEntry, heading
from zerobubble.export.svg import beginning, require_width
from zerobubble.planning.answer import Choice, Status
from zerobubble.planning.pareto import Front, Point
from zerobubble.planning.problem.problem import Objective
from zerobubble.units import counted, show_percent

COLORS = {
    "linear": "#3465b8",
    "vee": "#d8662f",
    "looped-2": "#34a57c",
    "looped-3": "#a9305c",
    "looped-4": "#7d8791",
    "wave-3": "#c79a1e",
    "wave-4": "#8a6fd1",
}
"""Colors of placements in all pictures and pages. Color-blind readers can distinguish them, on white and on black."""

LEFT, RIGHT, PLOT, BOTTOM = 70, 30, 360, 64
"""Pixels left and right of the plot, its height, and pixels below it."""

NOTE = (
    "Each large dot is the best plan for that much memory, filled where it is proven optimal for its placement; small dots are the best "
    "found on other placements. The dashed line is a proven bound over all placements tried: no schedule on them lies below it."
)

RATES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Bubble rates that may be labeled on the axis."""

LEAST_KNEE, CLOSEST = 0.001, 18
"""The lowest rate above which the axis may be logarithmic, and the least distance of its labels in pixels."""
SMALL, APART = 3, 5.5
"""The radius of a small dot, and the least distance between the centers of two."""

LINES = """
.front{fill:none;stroke:#1b1f24;stroke-width:1.6;stroke-opacity:.55}.bound{fill:none;stroke:#59636e;stroke-width:1.4;stroke-dasharray:5 4}
.hollow{fill:#fff}@media (prefers-color-scheme:dark){.front{stroke:#e6eaef}.bound{stroke:#9aa5b1}.hollow{fill:#14181d}}
"""


class _Scale(NamedTuple):
    """The scales of the picture: memory from `low` to `high` across `width` pixels, bubble rates from 0 to `top` below `head` pixels.

    Rates are linear below `knee` and logarithmic above it, so that one point far above the others does not squeeze them.
    """

    width: int
    head: int
    low: float
    high: float
    top: float
    knee: float
    objective: Objective

    def x(self, memory: float) -> float:
        share = (memory - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return LEFT + 14 + (self.width - LEFT - RIGHT - 28) * share

    def y(self, bubble: float) -> float:
        return self.head + PLOT * (1 - asinh(bubble / self.knee) / asinh(self.top / self.knee))


def front_svg(front: Front, title: str, width: int = 860) -> str:
    """Return an SVG document of bubble over memory, `width` pixels wide, with a dot for each plan and the bound as a dashed line.

    Raises `InputError` for a width below 640, and if no point of the front has a schedule.
    """
    require_width(width)
    points = points_with_schedules(front)
    colors = placement_colors(points)
    head = heading(title, _legend(colors), width)
    return "\n".join(_document(_scale(points, width, head.height + 10), head, points, colors, title)) + "\n"


def points_with_schedules(front: Front) -> list[Point]:
    """Return the points of the front at which a schedule fits; raises `InputError` if there are none."""
    points = [point for point in front.points if point.plan.order is not None]
    if not points:
        raise InputError("no schedule fits at any point of the front: {reason}", reason=str(front.points[-1].plan.reason))
    return points


def knee(points: Sequence[Point]) -> float:
    """Return the rate above which the axis is logarithmic: the smallest bubble rate of the front, at least 0.1 %."""
    return max(LEAST_KNEE, min(point.plan.bubble or 0.0 for point in points))


def _scale(points: Sequence[Point], width: int, head: int) -> _Scale:
    objective = points[0].plan.problem.objective
    worst = max(choice.plan.bubble or 0.0 for point in points for choice in point.plan.choices)
    return _Scale(width, head, points[0].memory, points[-1].memory, max(0.01, 1.12 * worst), knee(points), objective)


def _document(scale: _Scale, head: Heading, points: Sequence[Point], colors: Mapping[str, str], title: str) -> Iterator[str]:
    yield from beginning(title, scale.width, scale.head + PLOT + BOTTOM, LINES, head)
    yield from _axes(scale, points)
    yield f'<path class="bound" d="{_line([(scale.x(p.memory), scale.y(p.plan.lower_bound)) for p in points])}"/>'
    yield f'<path class="front" d="{_line([(scale.x(p.memory), scale.y(p.plan.bubble or 0.0)) for p in points])}"/>'
    for point in points:
        yield from _dots(scale, point, colors)
    yield "</svg>"


def placement_colors(points: Sequence[Point]) -> dict[str, str]:
    """Return the color of each placement, the best ones of the first point first."""
    names = [choice.name for point in points for choice in point.plan.choices]
    # The color of a placement outside the table depends on its name only.
    hues = {name: hls_to_rgb(crc32(name.encode()) / 2**32, 0.5, 0.4) for name in names}
    return {name: COLORS.get(name) or "#" + "".join(f"{round(255 * part):02x}" for part in hue) for name, hue in hues.items()}


def _legend(colors: Mapping[str, str]) -> Iterator[LegendEntry]:
    for name, color in colors.items():
        yield LegendEntry(name, [f'<circle cx="5.5" cy="5.5" r="5" fill="{color}"/>'])
    yield LegendEntry("bound", ['<path class="bound" d="M0 5.5h24"/>', ""])


def _axes(scale: _Scale, points: Sequence[Point]) -> Iterator[str]:
    for rate in _rates(scale):
        y = scale.y(rate)
        yield f'<path class="grid" d="M{LEFT} {y:.2f}H{scale.width - RIGHT}"/>'
        yield f'<text class="soft small end" x="{LEFT - 8}" y="{y + 4:.2f}">{100 * rate:g} %</text>'
    skip = -(-len(points) // 16)
    for point in points[::skip]:
        x = scale.x(point.memory)
        yield f'<path class="grid" d="M{x:.2f} {scale.head + PLOT}v6"/>'
        yield f'<text class="soft small middle" x="{x:.2f}" y="{scale.head + PLOT + 20}">{point.memory:g}</text>'
    middle = (LEFT + scale.width - RIGHT) / 2
    under = "activation memory of a rank, in microbatches of all its stages"
    yield f'<text class="soft small middle" x="{middle:.1f}" y="{scale.head + PLOT + 44}">{under}</text>'
    label = f"bubble of the {scale.objective}"
    yield f'<text class="soft small middle" transform="translate(18 {scale.head + PLOT / 2:g}) rotate(-90)">{label}</text>'


def _rates(scale: _Scale) -> list[float]:
    """Return the rates labeled on the axis, from the bottom up, each far enough above the one before."""
    labeled = [0.0]
    for rate in RATES:
        if rate <= scale.top and scale.y(labeled[-1]) - scale.y(rate) >= CLOSEST:
            labeled.append(rate)
    return labeled


def _line(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in places)


def _dots(scale: _Scale, point: Point, colors: Mapping[str, str]) -> Iterator[str]:
    """Yield the dots for one limit, the best plan large and on top. Small dots that would hide each other are drawn side by side."""
    best, *others = [choice for choice in point.plan.choices if choice.plan.bubble is not None]
    aside = -1 if point.memory == scale.high else 1
    taken: list[tuple[float, float]] = [(scale.x(point.memory), scale.y(best.plan.bubble or 0.0))]
    for choice in others:
        x, y = scale.x(point.memory), scale.y(choice.plan.bubble or 0.0)
        while any(hypot(x - left, y - top) < (APART if n else 2 * APART) for n, (left, top) in enumerate(taken)):
            x += aside
        taken.append((x, y))
        dot = f'<circle class="other" cx="{x:.2f}" cy="{y:.2f}" r="{SMALL}" fill="{colors[choice.name]}">'
        yield f"{dot}<title>{escape(_tooltip(point, choice))}</title></circle>"
    place, color = f'cx="{taken[0][0]:.2f}" cy="{taken[0][1]:.2f}"', colors[best.name]
    tooltip = f"<title>{escape(_tooltip(point, best))}</title>"
    if best.plan.status is Status.OPTIMAL:
        yield f'<circle class="best" {place} r="5.5" fill="{color}">{tooltip}</circle>'
    else:
        yield f'<circle class="best hollow" {place} r="4.4" stroke="{color}" stroke-width="2.4">{tooltip}</circle>'


def _tooltip(point: Point, choice: Choice) -> str:
    rates = f"bubble {show_percent(choice.plan.bubble or 0.0)}, bound {show_percent(choice.plan.least_bubble)}"
    return f"{choice.name} with memory for {counted(point.memory, 'microbatch')}: {rates}, {choice.plan.how}"
