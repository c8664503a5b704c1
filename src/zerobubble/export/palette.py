"""One set of colours for every picture: distinct for colour-blind readers, readable on white and on black."""

from __future__ import annotations

import math

from zerobubble.explain import WaitsFor
from zerobubble.kinds import Kind, traits_of
from zerobubble.timeline import Timeline

WAIT_COLOURS: dict[WaitsFor, str] = {WaitsFor.PASS: "#bcc6d1", WaitsFor.MESSAGE: "#8f74dd", WaitsFor.HOST: "#e2574c"}
"""The colour of idle time by what a rank waits for."""

_LIGHTEST = 0.5
_EVEN = 0.207  # where white and near-black have the same contrast


def shade(kind: Kind, index: int, count: int) -> str:
    """The colour of `kind` on the `index`-th of the `count` stages of a rank: later stages are lighter."""
    colour = traits_of(kind).colour
    mix = _LIGHTEST * index / (count - 1) if count > 1 else 0.0
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * mix):02x}" for c in channels)


def ink(colour: str) -> str:
    """Near-black or white, whichever reads better on `colour`."""
    return "#ffffff" if luminance(colour) < _EVEN else "#1b1f24"


def luminance(colour: str) -> float:
    """How bright `colour` (`#rrggbb`) is, from 0 to 1, in linear light."""
    red, green, blue = (math.pow(int(colour[at : at + 2], 16) / 255, 2.2) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def stage_order(timeline: Timeline) -> tuple[dict[int, int], ...]:
    """Per rank, the place of each of its stages in increasing order: what tells one shade from the next."""
    stages = (sorted({span.op.stage for span in row}) for row in timeline.rows)
    return tuple({stage: place for place, stage in enumerate(held)} for held in stages)


def num_shades(*timelines: Timeline) -> int:
    """The most stages that any rank of `timelines` runs, at least 1."""
    return max((len(places) for timeline in timelines for places in stage_order(timeline)), default=0) or 1
