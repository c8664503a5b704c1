"""A picture of the Pareto front of memory and bubble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import asinh
from typing import NamedTuple

from zerobubble.arguments import wrong
from zerobubble.errors import InputError
from zerobubble.export.svg import NARROWEST, STYLE
from zerobubble.planning.answer import Choice, Status
from zerobubble.planning.pareto import Front, Point
from zerobubble.planning.problem.problem import Objective
from zerobubble.planning.table import percent
from zerobubble.units import counted

COLORS = ("#3465b8", "#d8662f", "#34a57c", "#a9305c", "#8a6fd1", "#c79a1e", "#4aa8c8", "#7d8791")
"""Colors of placements in order. Color-blind readers can distinguish them, on white and on black."""

LEFT, RIGHT, TOP, PLOT, BOTTOM = 70, 30, 84, 360, 64
HEIGHT = TOP + PLOT + BOTTOM

NOTE = (
    "Each large dot is the best plan for that much memory, filled where it is proven optimal for its placement; small dots are the best "
    "found on other placements. The dashed line is a proven bound over all placements tried: no schedule on them lies below it."
)

RATES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Bubble rates that may be labeled on the axis."""

LEAST_KNEE, CLOSEST = 0.001, 18

LINES = """
.front{fill:none;stroke:#1b1f24;stroke-width:1.6;stroke-opacity:.55}.bound{fill:none;stroke:#59636e;stroke-width:1.4;stroke-dasharray:5 4}
.hollow{fill:#fff}@media (prefers-color-scheme:dark){.front{stroke:#e6eaef}.bound{stroke:#9aa5b1}.hollow{fill:#14181d}}
"""


class _Scale(NamedTuple):
    """The scales of the picture: memory from `low` to `high` across `width` pixels, bubble rates from 0 to `top`.

    Rates are linear below `knee` and logarithmic above it, so that one point far above the others does not squeeze them.
    """

    width: int
    low: float
    high: float
    top: float
    knee: float
    objective: Objective

    def x(self, memory: float) -> float:
        share = (memory - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return LEFT + 14 + (self.width - LEFT - RIGHT - 28) * share

    def y(self, bubble: float) -> float:
        return TOP + PLOT * (1 - asinh(bubble / self.knee) / asinh(self.top / self.knee))


def front_svg(front: Front, title: str, width: int = 860) -> str:
    """Return an SVG document of bubble over memory, `width` pixels wide, with a dot for each plan and the bound as a dashed line.

    Raises `InputError` for a width below 640, and if no point of the front has a schedule.
    """
    if width < NARROWEST:
        raise wrong("the width of a picture", width, f"at least {NARROWEST} pixels")
    points = points_with_schedules(front)
    return "\n".join(_document(_scale(points, width), points, title)) + "\n"


def points_with_schedules(front: Front) -> list[Point]:
    """Return the points of the front at which a schedule fits; raises `InputError` if there are none."""
    points = [point for point in front.points if point.plan.order is not None]
    if not points:
        raise InputError("no schedule fits at any point of the front: {reason}", reason=str(front.points[-1].plan.reason))
    return points


def knee(points: Sequence[Point]) -> float:
    """Return the rate above which the axis is logarithmic: the smallest bubble rate of the front, at least 0.1 %."""
    return max(LEAST_KNEE, min(point.plan.bubble or 0.0 for point in points))


def _scale(points: Sequence[Point], width: int) -> _Scale:
    objective = points[0].plan.problem.objective
    worst = max(point.plan.bubble or 0.0 for point in points)
    return _Scale(width, points[0].memory, points[-1].memory, max(0.01, 1.12 * worst), knee(points), objective)


def _document(scale: _Scale, points: Sequence[Point], title: str) -> Iterator[str]:
    size = f'viewBox="0 0 {scale.width} {HEIGHT}" width="{scale.width}" height="{HEIGHT}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    yield f"<title>{escape(title)}</title>"
    yield f"<style>{STYLE}{LINES}</style>"
    yield f'<rect class="paper" width="{scale.width}" height="{HEIGHT}"/>'
    yield f'<text class="ink title" x="16" y="28">{escape(title)}</text>'
    colors = placement_colors(points)
    yield from _legend(colors)
    yield from _axes(scale, points)
    yield f'<path class="bound" d="{_line([(scale.x(p.memory), scale.y(p.plan.lower_bound)) for p in points])}"/>'
    yield f'<path class="front" d="{_line([(scale.x(p.memory), scale.y(p.plan.bubble or 0.0)) for p in points])}"/>'
    for point in points:
        yield from _dots(scale, point, colors)
    yield "</svg>"


def placement_colors(points: Sequence[Point]) -> dict[str, str]:
    """Return a color for each placement, the best ones of the first point first; further points do not change it."""
    names = [choice.name for point in points for choice in point.plan.choices]
    return {name: COLORS[place % len(COLORS)] for place, name in enumerate(dict.fromkeys(names))}


def _legend(colors: dict[str, str]) -> Iterator[str]:
    x = 22.0
    for name, color in colors.items():
        yield f'<circle cx="{x:.1f}" cy="52" r="5" fill="{color}"/>'
        yield f'<text class="soft small" x="{x + 10:.1f}" y="56">{escape(name)}</text>'
        x += 30 + 6.4 * len(name)
    yield f'<path class="bound" d="M{x:.1f} 52h24"/><text class="soft small" x="{x + 30:.1f}" y="56">bound</text>'


def _axes(scale: _Scale, points: Sequence[Point]) -> Iterator[str]:
    for rate in _rates(scale):
        y = scale.y(rate)
        yield f'<path class="grid" d="M{LEFT} {y:.2f}H{scale.width - RIGHT}"/>'
        yield f'<text class="soft small end" x="{LEFT - 8}" y="{y + 4:.2f}">{100 * rate:g} %</text>'
    skip = -(-len(points) // 16)
    for point in points[::skip]:
        x = scale.x(point.memory)
        yield f'<path class="grid" d="M{x:.2f} {TOP + PLOT}v6"/>'
        yield f'<text class="soft small middle" x="{x:.2f}" y="{TOP + PLOT + 20}">{point.memory:g}</text>'
    middle = (LEFT + scale.width - RIGHT) / 2
    under = "activation memory of a rank, in microbatches of all its stages"
    yield f'<text class="soft small middle" x="{middle:.1f}" y="{TOP + PLOT + 44}">{under}</text>'
    label = f"bubble of the {scale.objective}"
    yield f'<text class="soft small middle" transform="translate(18 {TOP + PLOT / 2}) rotate(-90)">{label}</text>'


def _rates(scale: _Scale) -> list[float]:
    """Return the rates labeled on the axis, from the bottom up, each far enough above the one before."""
    labeled = [0.0]
    for rate in RATES:
        if rate <= scale.top and scale.y(labeled[-1]) - scale.y(rate) >= CLOSEST:
            labeled.append(rate)
    return labeled


def _line(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in places)


def _dots(scale: _Scale, point: Point, colors: dict[str, str]) -> Iterator[str]:
    """Yield the dots for one limit, the best plan large and on top."""
    for choice in reversed(point.plan.choices):
        rate, color = choice.plan.bubble, colors[choice.name]
        if rate is None or rate > scale.top:
            continue
        place = f'cx="{scale.x(point.memory):.2f}" cy="{scale.y(rate):.2f}"'
        tooltip = f"<title>{escape(_tooltip(point, choice))}</title>"
        if choice is not point.plan.choices[0]:
            yield f'<circle class="other" {place} r="2.6" fill="{color}" fill-opacity=".55">{tooltip}</circle>'
        elif choice.plan.status is Status.OPTIMAL:
            yield f'<circle class="best" {place} r="5.5" fill="{color}">{tooltip}</circle>'
        else:
            yield f'<circle class="best hollow" {place} r="4.4" stroke="{color}" stroke-width="2.4">{tooltip}</circle>'


def _tooltip(point: Point, choice: Choice) -> str:
    rates = f"bubble {percent(choice.plan.bubble or 0.0)}, bound {percent(choice.plan.least_bubble)}"
    return f"{choice.name} with memory for {counted(point.memory, 'microbatch')}: {rates}, {choice.plan.how}"
