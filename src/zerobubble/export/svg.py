"""Timelines as one SVG picture, with a row per rank and all timelines on one time axis.

Every timeline is drawn from its own first start, so a plan and its measurement begin at the same left edge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from zerobubble.arguments import each, takes, wrong
from zerobubble.errors import InputError
from zerobubble.explain import Window
from zerobubble.export.heading import Heading, LegendEntry, heading, swatch
from zerobubble.export.palette import (
    COPY_COLORS,
    LATER_STAGES,
    NUMBERS,
    REDUCTION_COLOR,
    SOME_NUMBERS,
    ink,
    num_shades,
    shade,
    shades_drawn,
    stage_order,
)
from zerobubble.kinds import traits_of
from zerobubble.timeline import Awaited, Copying, HostCopy, ReplicaSum, Span, Timeline, Why, lanes
from zerobubble.units import counted, ms, show_bytes, show_ms, show_percent, ticks

LEFT, RIGHT, ROW, GAP, CAPTION, STRIP, AXIS, BAR = 62, 18, 22, 4, 30, 16, 44, 6
PEAK_LABEL, MICROBATCHES_LABEL = 58, 106
NARROWEST = 640

STYLE = """
svg{color-scheme:light dark;font-family:"Helvetica Neue",Helvetica,Arial,sans-serif;font-size:12px;font-variant-numeric:tabular-nums}
.paper{fill:#fff}.ink{fill:#1b1f24}.soft{fill:#59636e}.small{font-size:11px}.tiny{font-size:9px}.mini{font-size:8px}.bold{font-weight:600}.title{font-size:15px;font-weight:600}
.idle{fill:#eef1f4}.hatch{stroke:#c9d0d8;stroke-width:1}.grid{stroke:#1b1f24;stroke-opacity:.13;stroke-width:1}
.held{fill:#8b95a1;fill-opacity:.38;stroke:#59636e;stroke-width:.8}.end{text-anchor:end}
.middle,.pass text{text-anchor:middle}.pass text{stroke:none;pointer-events:none}
@media (prefers-color-scheme:dark){.paper{fill:#14181d}.ink{fill:#e6eaef}.soft{fill:#9aa5b1}.idle{fill:#1f252c}
.hatch{stroke:#4b5663}.grid{stroke:#e6eaef}.held{fill:#9aa5b1;stroke:#9aa5b1}}
"""

WINDOW_STYLE = """.window{fill:#fff;fill-opacity:.75;stroke:#1b1f24;stroke-width:1;stroke-dasharray:3 2}
@media (prefers-color-scheme:dark){.window{fill:#14181d;stroke:#e6eaef}}
"""

HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="idle"/><path d="M0 0V6" class="hatch"/></pattern></defs>'
)


class _Shape(NamedTuple):
    """A box in its row: its top and height, and the sizes that its text may have, from large to small."""

    top: float
    height: float
    sizes: tuple[TextSize, ...]


class TextSize(NamedTuple):
    """A size of text: its class, the width of a digit, the pixels needed next to the digits, and the offset of the baseline."""

    name: str
    digit: float
    margin: float
    drop: float


_HALF = (ROW - 1) / 2
SIZES = (TextSize("small", 6.3, 3, 4), TextSize("tiny", 5.2, 2.2, 3.2), TextSize("mini", 4.45, 0.4, 2.9))
"""Sizes of the numbers in boxes."""
APART = 0.7
"""Pixels between boxes."""
_SHAPES = {
    (0, 1): _Shape(0, ROW, SIZES),
    (0, 2): _Shape(0, _HALF, SIZES[1:]),
    (1, 2): _Shape(ROW - _HALF, _HALF, SIZES[1:]),
}
"""Shapes by lane and number of lanes."""
_COPIES = {Copying.TO_HOST: "out", Copying.FROM_HOST: "home"}
"""CSS classes of copies."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """The common scale: `width` in pixels, `duration` in ns, `peak` in bytes of a full memory strip (0 for no strips).

    `microbatch_bytes` are the bytes of a microbatch on each rank, to label peaks in microbatches; None to label them in bytes.
    """

    width: int
    duration: int
    peak: int
    shades: int
    microbatch_bytes: Sequence[int] | None = None

    @property
    def right(self) -> int:
        if not self.peak:
            return self.width - RIGHT
        return self.width - RIGHT - (PEAK_LABEL if self.microbatch_bytes is None else MICROBATCHES_LABEL)

    def pitch(self, timeline: Timeline) -> int:
        bars = bool(timeline.reductions) + bool(timeline.copies)
        return ROW + GAP + bars * (BAR + GAP) + (STRIP + GAP if self.peak and timeline.memory else 0)

    def x(self, time: int) -> float:
        return LEFT + (self.right - LEFT) * time / max(1, self.duration)

    def panel_height(self, timeline: Timeline) -> int:
        return CAPTION + self.pitch(timeline) * timeline.num_ranks + 8


_TOOLTIP = re.compile(r"(?<=>)<title>.*?</title>")
"""The title of the picture has a line of its own."""


def without_tooltips(svg: str) -> str:
    """Return a picture without its tooltips, which browsers do not show for an image on a page."""
    return _TOOLTIP.sub("", svg).replace("></path>", "/>")


@takes(timelines=each(Timeline), title=str)
def timeline_svg(
    *timelines: Timeline,
    title: str = "",
    width: int = 1100,
    memory: bool = False,
    microbatch_bytes: Sequence[int] | None = None,
    windows: Sequence[Sequence[Window]] = (),
    captions: Sequence[str] = (),
) -> str:
    """Return an SVG document of `timelines`, one below the other.

    Passes are boxes with the number of the microbatch, if the largest number fits, and a tooltip with times and cause; overlapped passes
    have half the height. Idle time is hatched, and later stages of a rank are lighter. Sums over replicas and copies to the host are thin
    bars below a rank.

    Arguments:
        timelines: the timelines to draw, at least one.
        title: the title of the picture; by default the schedules with their ranks and microbatches.
        width: the width in pixels, at least 640.
        memory: whether to draw a strip below each rank with the bytes that it holds.
        microbatch_bytes: bytes of a microbatch on each rank, to label peaks in microbatches instead of bytes.
        windows: windows of the schedule of a single timeline from `zb.explain.windows`, to outline with their length and free memory.
        captions: a text for the line above each timeline, instead of its makespan, span and bubbles.

    Raises `InputError` for other widths, `memory` for timelines without memory, windows of another number of ranks, and another number of
    captions than of timelines.
    """
    if not timelines:
        raise InputError("a picture needs at least one timeline, got none")
    require_width(width)
    if memory and not any(timeline.peak_bytes for timeline in timelines):
        raise InputError("no timeline has memory", remedy="simulate them, or leave memory out")
    if windows and (len(timelines) > 1 or len(windows) != timelines[0].num_ranks):
        ranks = f"{len(windows)} ranks to {counted(len(timelines), 'timeline')} of {timelines[0].num_ranks} ranks"
        raise InputError(
            "windows need a single timeline of their schedule, got those of {ranks}", ranks=ranks, remedy="draw each timeline separately"
        )
    if captions and len(captions) != len(timelines):
        raise wrong("the number of captions", len(captions), f"{len(timelines)}, one for each timeline")
    peak = max(timeline.peak_bytes or 0 for timeline in timelines) if memory else 0
    scale = _Scale(width, max(timeline.makespan for timeline in timelines), peak, num_shades(*timelines), microbatch_bytes)
    return "\n".join(_document(scale, timelines, title, windows, captions or [*map(caption, timelines)])) + "\n"


def shape_title(timelines: Sequence[Timeline]) -> str:
    """Return the names of timelines, with their ranks and microbatches: `1f1b, zb-v on 4 ranks, 8 microbatches`."""
    names = ", ".join(dict.fromkeys(timeline.name for timeline in timelines))
    ranks = max(timeline.num_ranks for timeline in timelines)
    microbatches = max(len({span.op.microbatch for _, span in timeline.spans()}) for timeline in timelines)
    return f"{names} on {counted(ranks, 'rank')}, {counted(microbatches, 'microbatch')}"


def require_width(width: int) -> None:
    """Raise `InputError` for a picture that is too narrow."""
    if width < NARROWEST:
        raise wrong("the width of a picture", width, f"at least {NARROWEST} pixels")


def beginning(title: str, width: int, height: int, style: str, head: Heading, definitions: str = "") -> Iterator[str]:
    """Yield the beginning of a picture: its size, title and style, its paper, and its heading."""
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
    yield f"<title>{escape(title)}</title>"
    yield f"<style>{STYLE}{style}</style>{definitions}"
    yield f'<rect class="paper" width="{width}" height="{height}"/>'
    yield from head.elements


def _document(
    scale: _Scale, timelines: Sequence[Timeline], title: str, windows: Sequence[Sequence[Window]], captions: Sequence[str]
) -> Iterator[str]:
    shape = shape_title(timelines)
    head = heading(title or shape, _legend(scale, timelines, has_windows=bool(windows)), scale.width)
    top = head.height
    bottom = top + sum(scale.panel_height(timeline) for timeline in timelines)
    height = bottom + AXIS
    drawn = "; ".join(f"{timeline.name}, {timeline.source}: {figures}" for timeline, figures in zip(timelines, captions, strict=True))
    style = f"{WINDOW_STYLE if windows else ''}{''.join(_shade_rules(scale, timelines))}"
    yield from beginning(title or f"{shape}. {drawn}", scale.width, height, style, head, HATCH)
    for timeline, figures in zip(timelines, captions, strict=True):
        yield from _grid(scale, top + CAPTION - 4, top + scale.panel_height(timeline) - 8)
        yield from _panel(scale, timeline, figures, top)
        for rank, rank_windows in enumerate(windows):
            for window in rank_windows:
                yield _window(scale, window, top + CAPTION + rank * scale.pitch(timeline))
        top += scale.panel_height(timeline)
    yield from _axis(scale, bottom)
    yield "</svg>"


def _shade_rules(scale: _Scale, timelines: Sequence[Timeline]) -> Iterator[str]:
    for kind, places in shades_drawn(*timelines).items():
        for place in places:
            color = shade(kind, place, scale.shades)
            name = f"{kind}{place}"
            yield f".{name}{{fill:{color}}}.pass.{name}{{stroke:{color}}}.{name} text{{fill:{ink(color)}}}"
    if any(timeline.reductions for timeline in timelines):
        yield f".sum{{fill:{REDUCTION_COLOR}}}"
    if any(timeline.copies for timeline in timelines):
        yield "".join(f".{_COPIES[way]}{{fill:{color}}}" for way, color in COPY_COLORS.items())


def _legend(scale: _Scale, timelines: Sequence[Timeline], *, has_windows: bool) -> Iterator[LegendEntry]:
    """Yield an entry per kind, with a swatch per shade drawn, and one for each other thing drawn."""
    for kind, places in shades_drawn(*timelines).items():
        yield LegendEntry(f"{kind} {traits_of(kind).phrase}", [swatch(f'class="{kind}{place}"') for place in places])
    pixels = scale.x(1) - scale.x(0)
    if any(has_numbers(timeline, pixels) for timeline in timelines):
        yield LegendEntry(NUMBERS if all(has_all_numbers(timeline, pixels) for timeline in timelines) else SOME_NUMBERS, [])
    if scale.shades > 1:
        yield LegendEntry(LATER_STAGES, [])
    if any(timeline.reductions for timeline in timelines):
        yield LegendEntry("sum over replicas", [swatch('class="sum"')])
    if any(timeline.copies for timeline in timelines):
        yield from (LegendEntry(f"copy {way}", [swatch(f'class="{name}"')]) for way, name in _COPIES.items())
    yield LegendEntry("idle", [swatch('fill="url(#idle)"')])
    if scale.peak:
        yield LegendEntry("activations", [swatch('class="held"')])
    if has_windows:
        yield LegendEntry("window", [swatch('class="window"')])


def _grid(scale: _Scale, top: int, bottom: int) -> Iterator[str]:
    for tick in ticks(scale.duration, 12):
        yield f'<path class="grid" d="M{scale.x(tick):.2f} {top}V{bottom}"/>'


def _axis(scale: _Scale, bottom: int) -> Iterator[str]:
    for tick in ticks(scale.duration, 12):
        x = scale.x(tick)
        yield f'<path class="grid" d="M{x:.2f} {bottom - 4}v6"/>'
        yield f'<text class="soft small middle" x="{x:.2f}" y="{bottom + 18}">{ms(tick):g}</text>'
    yield f'<text class="soft small middle" x="{(LEFT + scale.right) / 2:.1f}" y="{bottom + 35}">time in ms</text>'


def caption(timeline: Timeline) -> str:
    """Return the figures of a timeline in one line: the makespan, the span if it is shorter, and the bubble rate of each."""
    whole = makespan_caption(timeline)
    return (
        whole
        if timeline.span == timeline.makespan
        else f"{whole}; span {show_ms(timeline.span)}, bubble {show_percent(timeline.bubble_span)}"
    )


def period_caption(timeline: Timeline, period: int) -> str:
    """Return the `period` (ns) of the schedule of a timeline and its makespan, with the bubble rate of each: the terms of tables."""
    if period == timeline.makespan:
        return f"period and {makespan_caption(timeline)}"
    return f"period {show_ms(period)}, bubble {show_percent(timeline.bubble_at(period))}; {makespan_caption(timeline)}"


def makespan_caption(timeline: Timeline) -> str:
    """Return the makespan of a timeline, and its bubble rate."""
    return f"makespan {show_ms(timeline.makespan)}, bubble {show_percent(timeline.bubble_makespan)}"


def _panel(scale: _Scale, timeline: Timeline, figures: str, top: int) -> Iterator[str]:
    name = f'<tspan class="ink bold">{escape(timeline.name)}</tspan><tspan class="ink" dx="6">{escape(timeline.source)}</tspan>'
    yield f'<text class="soft" x="{LEFT}" y="{top + 18}">{name}<tspan dx="12">{escape(figures)}</tspan></text>'
    places, digits = stage_order(timeline), digits_of(timeline)
    for rank, row in enumerate(timeline.rows):
        y = top + CAPTION + rank * scale.pitch(timeline)
        yield f'<text class="ink small end" x="{LEFT - 10}" y="{y + 15}">rank {timeline.number_of(rank)}</text>'
        end = scale.x(timeline.makespan)
        yield f'<rect fill="url(#idle)" x="{LEFT}" y="{y}" width="{end - LEFT:.2f}" height="{ROW}"/>'
        yield from _boxes(scale, timeline, row, places[rank], y, digits)
        for replica_sum in timeline.reductions_of(rank):
            yield _bar(scale, timeline, replica_sum, "sum", f"gradients of stage {replica_sum.stage} summed over replicas", y + ROW + GAP)
        for copy in timeline.copies_of(rank):
            what = f"what F of stage {copy.stage} and microbatch {copy.microbatch} saved, {copy.copying}"
            below = y + ROW + GAP + (BAR + GAP if timeline.reductions else 0)
            yield _bar(scale, timeline, copy, _COPIES[copy.copying], what, below)
        if scale.peak and timeline.memory:
            yield from _strip(scale, timeline, rank, y + scale.pitch(timeline) - STRIP - GAP)


def _boxes(scale: _Scale, timeline: Timeline, row: Sequence[Span], places: dict[int, int], y: int, digits: int) -> Iterator[str]:
    """Yield the passes of a rank in groups of one color and height, whose attributes they share: most of a large picture are passes."""
    groups: dict[tuple[str, _Shape], list[Span]] = {}
    for span, lane in zip(row, lanes(row), strict=True):
        groups.setdefault((f"{span.op.kind}{places[span.op.stage]}", _SHAPES[lane]), []).append(span)
    for (name, shape), spans in groups.items():
        middle = y + shape.top + shape.height / 2
        look = f'class="pass {name}" transform="translate(0 {middle:g})" stroke-width="{shape.height:g}"'
        yield f"<g {look}>{''.join(_box(scale, timeline, span, shape, digits) for span in spans)}</g>"


def _box(scale: _Scale, timeline: Timeline, span: Span, shape: _Shape, digits: int) -> str:
    """Return a pass as a line from its start to its end, as wide as the group is high."""
    x, end = scale.x(span.start - timeline.start), scale.x(span.end - timeline.start)
    width = max(0.4, end - x - APART)
    box = f'<path d="M{x:.1f} 0h{width:.1f}"><title>{escape(describe(timeline, span))}</title></path>'
    if size := fitting(width, digits, shape.sizes):
        box += f'<text class="{size.name}" x="{x + width / 2:.1f}" y="{size.drop:g}">{span.op.microbatch}</text>'
    return box


def digits_of(timeline: Timeline) -> int:
    """Return the digits of the largest microbatch. Labels of all microbatches have its size, and appear only where it fits."""
    return len(str(max((span.op.microbatch for _, span in timeline.spans()), default=0)))


def has_numbers(timeline: Timeline, pixels: float) -> bool:
    """Return whether the longest pass has room for its number, with this many `pixels` per ns."""
    longest = max((span.end - span.start for _, span in timeline.spans()), default=0)
    return fitting(longest * pixels - APART, digits_of(timeline)) is not None


def has_all_numbers(timeline: Timeline, pixels: float) -> bool:
    """Return whether the shortest pass has room for its number, with this many `pixels` per ns."""
    shortest = min((span.end - span.start for _, span in timeline.spans()), default=0)
    return fitting(shortest * pixels - APART, digits_of(timeline)) is not None


def fitting(width: float, digits: int, sizes: Sequence[TextSize] = SIZES) -> TextSize | None:
    """Returns the largest size at which a number of `digits` digits fits into a box of `width` pixels; None if none does."""
    return next((size for size in sizes if width >= size.digit * digits + size.margin), None)


def _bar(scale: _Scale, timeline: Timeline, box: ReplicaSum | HostCopy, name: str, what: str, y: int) -> str:
    x, end = scale.x(box.start - timeline.start), scale.x(box.end - timeline.start)
    when = f"{show_ms(box.start - timeline.start)} to {show_ms(box.end - timeline.start)}"
    bar = f'<rect class="{name}" x="{x:.2f}" y="{y}" width="{max(0.4, end - x - APART):.2f}" height="{BAR}" rx="1.5"/>'
    return f"<g>{bar}<title>{escape(what)}; {when}</title></g>"


def _window(scale: _Scale, window: Window, y: int) -> str:
    x, end = scale.x(window.start), scale.x(window.end)
    box = f'<rect class="window" x="{x + 1:.2f}" y="{y + 3}" width="{max(0.4, end - x - 2.7):.2f}" height="{ROW - 6}" rx="1.5"/>'
    tooltip = f"window of {show_ms(window.duration)} before step {window.step}, {show_bytes(window.free)} free"
    return f"<g>{box}<title>{escape(tooltip)}</title></g>"


def describe(timeline: Timeline, span: Span) -> str:
    """Describe a pass, such as `B3 of stage 0; 10 to 20 ms; after 0F4`: its kind, microbatch and stage, when it ran, and after what.

    Times begin with the first start of the timeline.
    """
    what = f"{span.op.kind}{span.op.microbatch} of stage {span.op.stage}"
    when = f"{show_ms(span.start - timeline.start).removesuffix(' ms')} to {show_ms(span.end - timeline.start)}"
    return f"{what}; {when}" + (f"; {_cause(span.why)}" if span.why else "")


def _cause(why: Why) -> str:
    """Return a cause in fewer words than `str` does, since a picture has one for each pass."""
    words = {Awaited.ROW: f"after {why.op}", Awaited.MESSAGE: f"after the message of {why.op}"}
    return words.get(why.cause, str(why))


def _strip(scale: _Scale, timeline: Timeline, rank: int, y: int) -> Iterator[str]:
    """Yield the memory of a rank as a step curve, on one scale for all ranks and timelines, with its peak at the right."""
    base = y + STRIP
    path = f"M{LEFT} {base}"
    for time, held in timeline.memory[rank]:
        path += f"H{scale.x(time - timeline.start):.2f}V{base - STRIP * held / scale.peak:.2f}"
    yield f'<path class="held" d="{path}H{scale.x(timeline.makespan):.2f}V{base}Z"/>'
    peak = timeline.ranks[rank].peak_bytes or 0
    text = show_bytes(peak) if scale.microbatch_bytes is None else counted(peak / scale.microbatch_bytes[rank], "microbatch")
    yield f'<text class="soft small" x="{scale.right + 8}" y="{base - 3}">{text}</text>'
