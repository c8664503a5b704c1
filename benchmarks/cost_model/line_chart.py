"""A line chart as SVG: doubling numbers to the right, percent upwards."""

from __future__ import annotations

from html import escape
from math import ceil, log2
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 56, 40, 48, 44
COLORS = ("#2a78d6", "#d9822b")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#52514e}.title{font-weight:600}.grid{stroke:#8884;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#c3c2b7}}"
)


class Line(NamedTuple):
    """A named line through points."""

    name: str
    points: list[tuple[int, float]]


def line_chart(title: str, lines: list[Line]) -> str:
    """The chart of `lines`, whose points are at the same numbers."""
    numbers = [number for number, _ in lines[0].points]
    most = 10 * ceil(max(value for line in lines for _, value in line.points) / 10)
    first, last = log2(numbers[0]), log2(numbers[-1])

    def place(number: int, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (log2(number) - first) / (last - first)
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most, 1)

    body = [f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>']
    for percent in range(0, most + 1, 10):
        (x, y), (end, _) = place(numbers[0], percent), place(numbers[-1], percent)
        body.append(
            f'<line class="grid" x1="{x}" y1="{y}" x2="{end}" y2="{y}"/><text x="{x - 8}" y="{y + 4}" text-anchor="end">{percent}</text>'
        )
    for number in numbers:
        x, y = place(number, 0)
        body.append(f'<text x="{x}" y="{y + 20}" text-anchor="middle">{number:,}</text>')
    for color, line in zip(COLORS, lines, strict=True):
        body += _drawn(color, line, [place(*point) for point in line.points])
    inside = "\n".join(body)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return f"{opening}\n<style>{STYLE}</style>\n{inside}\n</svg>\n"


def _drawn(color: str, line: Line, places: list[tuple[float, float]]) -> list[str]:
    """A line with its points, values on hover, and its name at its last point: below a line that falls, above any other."""
    path = " ".join(f"{x},{y}" for x, y in places)
    drawn = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>']
    for (x, y), (number, value) in zip(places, line.points, strict=True):
        drawn.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"><title>{number:,}: {value:.1f} %</title></circle>')
    x, y = places[-1]
    falls = y - places[-2][1] > HEIGHT / 50
    drawn.append(f'<text x="{x}" y="{y + 24 if falls else y - 10}" text-anchor="end" style="fill:{color}">{escape(line.name)}</text>')
    return drawn
