"""The colors of all pictures: distinct for color-blind readers, readable on white and on black."""

from __future__ import annotations

import math

from zerobubble.explain import WaitsFor
from zerobubble.kinds import KINDS, Kind, traits_of
from zerobubble.timeline import Copying, Timeline

WAIT_COLORS: dict[WaitsFor, str] = {WaitsFor.PASS: "#bcc6d1", WaitsFor.MESSAGE: "#8f74dd", WaitsFor.HOST: "#e2574c"}
"""Colors of idle time, by what a rank waits for."""

REDUCTION_COLOR = "#a0527f"
"""Color of sums over replicas."""
COPY_COLORS: dict[Copying, str] = {Copying.TO_HOST: "#b3541e", Copying.FROM_HOST: "#2f7f93"}
"""Colors of copies to the host and back."""

NUMBERS = "number: microbatch"
"""The numbers in boxes, in a legend."""
SOME_NUMBERS = f"{NUMBERS}, where there is room"
"""The same, if some boxes are too narrow for theirs."""
LATER_STAGES = "lighter: later stages of the rank"
"""The shades in a legend."""

_LIGHTEST = 0.5
_WHITE, _NEAR_BLACK, _BLACK = "#ffffff", "#1b1f24", "#000000"

LEAST_CONTRAST = 4.5
"""Contrast that WCAG 2.2 requires for small text."""


def shade(kind: Kind, index: int, count: int) -> str:
    """Return the color of `kind` on the `index`-th of `count` stages of a rank; later stages are lighter."""
    color = traits_of(kind).color
    mix = _LIGHTEST * index / (count - 1) if count > 1 else 0.0
    channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * mix):02x}" for c in channels)


def ink(color: str) -> str:
    """Return white or near-black, whichever has more contrast to `color`, or black if both have too little for small text."""
    best = max(_WHITE, _NEAR_BLACK, key=lambda text: contrast(text, color))
    return best if contrast(best, color) >= LEAST_CONTRAST else _BLACK


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colors (`#rrggbb`) as defined by WCAG 2.2, from 1 to 21."""
    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    """Return the relative luminance of `color` (`#rrggbb`) as defined by WCAG 2.2, from 0 to 1."""
    red, green, blue = (_linear(int(color[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else math.pow((channel + 0.055) / 1.055, 2.4)


def stage_order(timeline: Timeline) -> tuple[dict[int, int], ...]:
    """Return, for each rank, the position of each of its stages in increasing order, which determines its shade."""
    stages = (sorted({span.op.stage for span in row}) for row in timeline.rows)
    return tuple({stage: place for place, stage in enumerate(held)} for held in stages)


def num_shades(*timelines: Timeline) -> int:
    """Return the largest number of stages on a rank of `timelines`, at least 1."""
    return max((len(places) for timeline in timelines for places in stage_order(timeline)), default=0) or 1


def shades_drawn(*timelines: Timeline) -> dict[Kind, list[int]]:
    """Return the shades of each kind drawn, in order: the places of the stages with passes of this kind."""
    orders = [(timeline, stage_order(timeline)) for timeline in timelines]
    drawn = {(span.op.kind, places[rank][span.op.stage]) for timeline, places in orders for rank, span in timeline.spans()}
    shades = {kind: sorted(place for drawn_kind, place in drawn if drawn_kind is kind) for kind in KINDS}
    return {kind: places for kind, places in shades.items() if places}
