"""Timelines as one SVG picture: a row per rank, timelines stacked on one time axis. For papers, slides and READMEs.

Every timeline is drawn from its own first start, so a plan and its measurement begin at the same left edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from zerobubble.arguments import each, takes
from zerobubble.errors import InputError
from zerobubble.explain import Window
from zerobubble.export.lanes import lanes
from zerobubble.export.palette import COPY_COLOURS, REDUCTION_COLOUR, ink, num_shades, shade, stage_order
from zerobubble.kinds import KINDS, Kind, traits_of
from zerobubble.timeline import Copy, Copying, Reduction, Span, Timeline
from zerobubble.units import counted, ms, show_bytes, show_ms, show_percent, ticks

LEFT, RIGHT, ROW, GAP, CAPTION, STRIP, AXIS, BAR = 62, 18, 22, 4, 30, 16, 44, 6
PEAK_LABEL, MICROBATCHES_LABEL = 58, 106
NARROWEST = 640

STYLE = """
svg{color-scheme:light dark;font-family:"Helvetica Neue",Helvetica,Arial,sans-serif;font-size:12px;font-variant-numeric:tabular-nums}
.paper{fill:#fff}.ink{fill:#1b1f24}.soft{fill:#59636e}.small{font-size:11px}.tiny{font-size:9px}.bold{font-weight:600}.title{font-size:15px;font-weight:600}
.idle{fill:#eef1f4}.hatch{stroke:#c9d0d8;stroke-width:1}.grid{stroke:#1b1f24;stroke-opacity:.13;stroke-width:1}
.held{fill:#8b95a1;fill-opacity:.38;stroke:#59636e;stroke-width:.8}.end{text-anchor:end}.middle{text-anchor:middle}
@media (prefers-color-scheme:dark){.paper{fill:#14181d}.ink{fill:#e6eaef}.soft{fill:#9aa5b1}.idle{fill:#1f252c}
.hatch{stroke:#343c46}.grid{stroke:#e6eaef}.held{fill:#9aa5b1;stroke:#9aa5b1}}
"""

WINDOW_STYLE = """.window{fill:#fff;fill-opacity:.75;stroke:#1b1f24;stroke-width:1;stroke-dasharray:3 2}
@media (prefers-color-scheme:dark){.window{fill:#14181d;stroke:#e6eaef}}
"""

HATCH = (
    '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="idle"/><path d="M0 0V6" class="hatch"/></pattern>'
)


class _Shape(NamedTuple):
    """A box in its row: where it starts and how high it is, the class of its text, how wide a digit is and how far below the middle."""

    top: float
    height: float
    text: str
    digit: float
    drop: float


_HALF = (ROW - 1) / 2
_SHAPES = {
    (0, 1): _Shape(0, ROW, "small", 6.3, 4),
    (0, 2): _Shape(0, _HALF, "tiny", 5.2, 3.2),
    (1, 2): _Shape(ROW - _HALF, _HALF, "tiny", 5.2, 3.2),
}
"""By lane and number of lanes."""
_COPIES = {Copying.TO_HOST: "out", Copying.FROM_HOST: "home"}
"""The classes of copies."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The common scale: `width` in pixels, `duration` in ns, `peak` in bytes for full strips (0: no strips drawn).

    `microbatch_bytes` are those of a microbatch on each rank where peaks are written in microbatches, None where they are written in bytes.
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


@takes(timelines=each(Timeline), title=str)
def timeline_svg(
    *timelines: Timeline,
    title: str = "",
    width: int = 1100,
    memory: bool = False,
    microbatch_bytes: Sequence[int] | None = None,
    windows: Sequence[Sequence[Window]] = (),
) -> str:
    """An SVG document of `timelines`, one below the other, `width` pixels wide.

    Passes are boxes with the microbatch's number where it fits and a tooltip with times and reason, of half the height where two run
    overlapped; idle time is hatched; a rank's later stages are lighter; its sums over replicas and its copies to the host and back
    are thin bars below it.
    `memory` adds a strip below each rank with what it holds; its peak is written in bytes, or in microbatches where `microbatch_bytes`
    gives those of one for each rank. `windows`, as `zb.explain.windows` finds them for the schedule of a single timeline, are framed, with
    their length and free memory as a tooltip. Raises `InputError` for no timeline, a width below 640, memory asked of timelines that carry
    none, and windows of other ranks or for several timelines.
    """
    if not timelines:
        raise InputError("a picture needs at least one timeline, got none")
    if width < NARROWEST:
        raise InputError(f"a picture needs a width of at least {NARROWEST} pixels, got {width}")
    if memory and not any(timeline.peak_bytes for timeline in timelines):
        raise InputError("no timeline carries memory: simulate them, or leave memory out")
    if windows and (len(timelines) > 1 or len(windows) != timelines[0].num_ranks):
        ranks = f"{len(windows)} ranks to {counted(len(timelines), 'timeline')} of {timelines[0].num_ranks} ranks"
        raise InputError(f"windows are drawn into one timeline of their schedule, got those of {ranks}: draw each timeline by itself")
    peak = max(timeline.peak_bytes or 0 for timeline in timelines) if memory else 0
    frame = _Frame(width, max(timeline.makespan for timeline in timelines), peak, num_shades(*timelines), microbatch_bytes)
    return "\n".join(_document(frame, timelines, title, windows)) + "\n"


def _document(frame: _Frame, timelines: Sequence[Timeline], title: str, windows: Sequence[Sequence[Window]]) -> Iterator[str]:
    top = 44
    bottom = top + sum(frame.panel_height(timeline) for timeline in timelines)
    height = bottom + AXIS
    label = escape(title or "; ".join(f"{timeline.name}, {timeline.source}" for timeline in timelines))
    size = f'viewBox="0 0 {frame.width} {height}" width="{frame.width}" height="{height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    yield f"<title>{label}</title>"
    yield f"<style>{STYLE}{WINDOW_STYLE if windows else ''}{''.join(_shade_rules(frame, timelines))}</style><defs>{HATCH}</defs>"
    yield f'<rect class="paper" width="{frame.width}" height="{height}"/>'
    yield f'<text class="ink title" x="{LEFT - 46}" y="28">{escape(title)}</text>'
    yield from _legend(frame, timelines, has_windows=bool(windows))
    for timeline in timelines:
        yield from _grid(frame, top + CAPTION - 4, top + frame.panel_height(timeline) - 8)
        yield from _panel(frame, timeline, top)
        for rank, own in enumerate(windows):
            for window in own:
                yield _window(frame, window, top + CAPTION + rank * frame.pitch(timeline))
        top += frame.panel_height(timeline)
    yield from _axis(frame, bottom)
    yield "</svg>"


def _kinds(timelines: Sequence[Timeline]) -> list[Kind]:
    present = {span.op.kind for timeline in timelines for _, span in timeline.spans()}
    return [kind for kind in KINDS if kind in present]


def _shade_rules(frame: _Frame, timelines: Sequence[Timeline]) -> Iterator[str]:
    for kind in _kinds(timelines):
        for place in range(frame.shades):
            colour = shade(kind, place, frame.shades)
            yield f".{kind}{place}{{fill:{colour}}}.on{kind}{place}{{fill:{ink(colour)}}}"
    if any(timeline.reductions for timeline in timelines):
        yield f".sum{{fill:{REDUCTION_COLOUR}}}"
    if any(timeline.copies for timeline in timelines):
        yield "".join(f".{_COPIES[way]}{{fill:{colour}}}" for way, colour in COPY_COLOURS.items())


def _legend(frame: _Frame, timelines: Sequence[Timeline], *, has_windows: bool) -> Iterator[str]:
    """Swatches at the top right, one per stage of a rank, written from right to left."""
    entries = [(f"{kind} {traits_of(kind).phrase}", [f"{kind}{place}" for place in range(frame.shades)]) for kind in _kinds(timelines)]
    right = float(frame.width - RIGHT)
    sums = [("sum over replicas", ["sum"])] if any(timeline.reductions for timeline in timelines) else []
    copies = [(f"copy {way}", [name]) for way, name in _COPIES.items()] if any(timeline.copies for timeline in timelines) else []
    windows = [("window", ["window"])] if has_windows else []
    for text, classes in reversed([*entries, *sums, *copies, ("idle", [""]), *windows]):
        right -= len(text) * 5.9
        yield f'<text class="soft small" x="{right:.1f}" y="27">{escape(text)}</text>'
        for name in reversed(classes):
            right -= 12
            fill = f'class="{name}"' if name else 'fill="url(#idle)"'
            yield f'<rect {fill} x="{right - 3:.1f}" y="18" width="11" height="11" rx="1.5"/>'
        right -= 16


def _grid(frame: _Frame, top: int, bottom: int) -> Iterator[str]:
    for tick in ticks(frame.duration, 12):
        yield f'<path class="grid" d="M{frame.x(tick):.2f} {top}V{bottom}"/>'


def _axis(frame: _Frame, bottom: int) -> Iterator[str]:
    for tick in ticks(frame.duration, 12):
        x = frame.x(tick)
        yield f'<path class="grid" d="M{x:.2f} {bottom - 4}v6"/>'
        yield f'<text class="soft small middle" x="{x:.2f}" y="{bottom + 18}">{ms(tick):g}</text>'
    yield f'<text class="soft small middle" x="{(LEFT + frame.right) / 2:.1f}" y="{bottom + 35}">time in ms</text>'


def caption(timeline: Timeline) -> str:
    """The figures of a timeline in one line: makespan, longest span of a rank, and the bubble rate of each."""
    whole = f"makespan {show_ms(timeline.makespan)}, bubble {show_percent(timeline.bubble_makespan)}"
    return f"{whole} · longest rank span {show_ms(timeline.span)}, bubble {show_percent(timeline.bubble_span)}"


def _panel(frame: _Frame, timeline: Timeline, top: int) -> Iterator[str]:
    name = f'<tspan class="ink bold">{escape(timeline.name)}</tspan><tspan class="ink" dx="6">{escape(timeline.source)}</tspan>'
    yield f'<text class="soft" x="{LEFT}" y="{top + 18}">{name}<tspan dx="12">{escape(caption(timeline))}</tspan></text>'
    places = stage_order(timeline)
    for rank, row in enumerate(timeline.rows):
        y = top + CAPTION + rank * frame.pitch(timeline)
        yield f'<text class="ink small end" x="{LEFT - 10}" y="{y + 15}">rank {rank}</text>'
        end = frame.x(timeline.makespan)
        yield f'<rect fill="url(#idle)" x="{LEFT}" y="{y}" width="{end - LEFT:.2f}" height="{ROW}"/>'
        for span, lane in zip(row, lanes(row), strict=True):
            yield _box(frame, timeline, span, places[rank][span.op.stage], y, _SHAPES[lane])
        for one in timeline.reductions_of(rank):
            yield _bar(frame, timeline, one, "sum", f"gradients of stage {one.stage} summed over replicas", y + ROW + GAP)
        for copy in timeline.copies_of(rank):
            what = f"what F of stage {copy.stage} and microbatch {copy.microbatch} saved, {copy.copying}"
            below = y + ROW + GAP + (BAR + GAP if timeline.reductions else 0)
            yield _bar(frame, timeline, copy, _COPIES[copy.copying], what, below)
        if frame.peak and timeline.memory:
            yield from _strip(frame, timeline, rank, y + frame.pitch(timeline) - STRIP - GAP)


def _box(frame: _Frame, timeline: Timeline, span: Span, place: int, y: int, shape: _Shape) -> str:
    x, end = frame.x(span.start - timeline.start), frame.x(span.end - timeline.start)
    width = max(0.4, end - x - 0.7)
    name, top = f"{span.op.kind}{place}", y + shape.top
    box = (
        f'<g class="pass"><rect class="{name}" x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{shape.height:g}" rx="1.5"/>'
        f"<title>{escape(describe(timeline, span))}</title>"
    )
    label = str(span.op.microbatch)
    if width >= shape.digit * len(label) + 3:
        middle = f'x="{x + width / 2:.2f}" y="{top + shape.height / 2 + shape.drop:g}"'
        box += f'<text class="on{name} {shape.text} middle" {middle}>{label}</text>'
    return box + "</g>"


def _bar(frame: _Frame, timeline: Timeline, one: Reduction | Copy, name: str, what: str, y: int) -> str:
    x, end = frame.x(one.start - timeline.start), frame.x(one.end - timeline.start)
    when = f"{show_ms(one.start - timeline.start)} to {show_ms(one.end - timeline.start)}"
    bar = f'<rect class="{name}" x="{x:.2f}" y="{y}" width="{max(0.4, end - x - 0.7):.2f}" height="{BAR}" rx="1.5"/>'
    return f"<g>{bar}<title>{escape(what)}; {when}</title></g>"


def _window(frame: _Frame, window: Window, y: int) -> str:
    x, end = frame.x(window.start), frame.x(window.end)
    box = f'<rect class="window" x="{x + 1:.2f}" y="{y + 3}" width="{max(0.4, end - x - 2.7):.2f}" height="{ROW - 6}" rx="1.5"/>'
    told = f"window of {show_ms(window.duration)} before step {window.step}, {show_bytes(window.free)} free"
    return f"<g>{box}<title>{escape(told)}</title></g>"


def describe(timeline: Timeline, span: Span) -> str:
    """One pass in a sentence: what it is, when it ran counted from the timeline's first start, and why not earlier."""
    what = f"{span.op}: {traits_of(span.op.kind).phrase} of stage {span.op.stage}, microbatch {span.op.microbatch}"
    when = f"{show_ms(span.start - timeline.start)} to {show_ms(span.end - timeline.start)}"
    return f"{what}; {when}" + (f"; {span.why}" if span.why else "")


def _strip(frame: _Frame, timeline: Timeline, rank: int, y: int) -> Iterator[str]:
    """What a rank holds as an area of steps, all ranks and timelines on one scale, with the peak written at the right."""
    base = y + STRIP
    path = f"M{LEFT} {base}"
    for time, held in timeline.memory[rank]:
        path += f"H{frame.x(time - timeline.start):.2f}V{base - STRIP * held / frame.peak:.2f}"
    yield f'<path class="held" d="{path}H{frame.x(timeline.makespan):.2f}V{base}Z"/>'
    peak = timeline.ranks[rank].peak_bytes or 0
    text = show_bytes(peak) if frame.microbatch_bytes is None else counted(peak / frame.microbatch_bytes[rank], "microbatch")
    yield f'<text class="soft small" x="{frame.right + 8}" y="{base - 3}">{text}</text>'
