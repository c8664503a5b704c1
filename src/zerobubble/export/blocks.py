"""A picture of a building block and the four steps to its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from zerobubble.blocks import Block, Layout, Steps, lifespans, memory_law
from zerobubble.costs import NS_PER_MS
from zerobubble.export.heading import LegendEntry, heading, swatch
from zerobubble.export.palette import NUMBERS, ink, shade
from zerobubble.export.svg import APART, HATCH, beginning, describe, digits_of, fitting, has_numbers, require_width
from zerobubble.kinds import KINDS, Kind, traits_of
from zerobubble.timeline import Span

SHADES = 4
"""Number of shades for consecutive copies."""

LEFT, RIGHT, ROW, GAP, CAPTION, AXIS = 62, 58, 20, 3, 34, 40


class Panel(NamedTuple):
    """One step: its title, its text, its layout, and a note for each rank."""

    title: str
    text: str
    layout: Layout
    notes: tuple[str, ...]


def panels(block: Block, steps: Steps) -> tuple[Panel, ...]:
    """Return the four panels of the picture, in order."""
    count = "one microbatch" if block.num_microbatches == 1 else f"{block.num_microbatches} microbatches"
    law = tuple(f"at most {' + '.join(terms(block, rank))} = {held}" for rank, held in enumerate(memory_law(block)))
    later = [
        Panel(title, f"{text}: {_figures(layout)}", layout, tuple(str(peak) for peak in layout.peaks))
        for title, text, layout in (
            ("Repeated", f"a copy every {block.interval} slots", steps.repeated),
            ("Squeezed", "same order, no idle time without a cause", steps.squeezed),
            ("Reordered", "warm-up and cool-down filled within the peak", steps.reordered),
        )
    ]
    return Panel("Block", f"{count}; stage activations held: the sum of ceil(lifespan / {block.interval})", steps.block, law), *later


def terms(block: Block, rank: int) -> list[str]:
    """Return the term of each lifespan of a rank in the memory bound, as text."""
    return [f"ceil({life.slots}/{block.interval})" for life in lifespans(block)[rank]]


def layout_figures(layout: Layout) -> list[str]:
    """Return makespan, span and bubble in slots, and the peak stage activations of a rank."""
    timeline = layout.timeline
    return [str(timeline.makespan // NS_PER_MS), str(timeline.span // NS_PER_MS), str(layout.bubble), str(max(layout.peaks))]


def _figures(layout: Layout) -> str:
    makespan, span, bubble, peak = layout_figures(layout)
    return f"makespan {makespan}, span {span}, bubble {bubble}, peak {peak}"


class _Scale(NamedTuple):
    """The common scale of the panels: the width of the picture, and the number of slots across it."""

    width: int
    slots: int

    def x(self, slot: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * slot / self.slots

    def height(self, panel: Panel) -> int:
        return CAPTION + (ROW + GAP) * panel.layout.placement.num_ranks + 10


def block_svg(block: Block, steps: Steps, width: int = 1100) -> str:
    """Return an SVG document of the four steps on one axis, `width` pixels wide.

    Consecutive copies have four shades in turn, and each pass shows its microbatch. A bar in a pass marks a later stage of its rank. The
    number at the right of a rank is its peak in stage activations. Raises `InputError` for a width below 640.
    """
    require_width(width)
    scale = _Scale(width, max(layout.timeline.end for layout in steps) // NS_PER_MS)
    return "\n".join(_document(scale, block, panels(block, steps))) + "\n"


def _document(scale: _Scale, block: Block, drawn: Sequence[Panel]) -> Iterator[str]:
    title = f"{block.name} on {block.placement.num_ranks} ranks, {drawn[1].layout.num_microbatches} microbatches"
    kinds = [kind for kind in KINDS if any(start.op.kind is kind for row in block.starts for start in row)]
    shaded = drawn[1].layout.num_microbatches > block.num_microbatches
    pixels = (scale.x(1) - scale.x(0)) / NS_PER_MS
    numbered = any(has_numbers(panel.layout.timeline, pixels) for panel in drawn)
    head = heading(title, _legend(kinds, numbered=numbered, shaded=shaded, later=block.placement.stages_per_rank > 1), scale.width)
    bottom = head.height + sum(scale.height(panel) for panel in drawn)
    yield from beginning(f"{title}: block, repeated, squeezed, reordered", scale.width, bottom + AXIS, "".join(_rules(kinds)), head, HATCH)
    top = head.height
    for number, panel in enumerate(drawn, 1):
        yield from _panel(scale, block, panel, number, top)
        top += scale.height(panel)
    yield from _axis(scale, bottom)
    yield "</svg>"


def _rules(kinds: Iterable[Kind]) -> Iterator[str]:
    for kind in kinds:
        for copy in range(SHADES):
            color = shade(kind, copy, SHADES)
            yield f".{kind}{copy}{{fill:{color}}}.on{kind}{copy}{{fill:{ink(color)}}}"


def _legend(kinds: Sequence[Kind], *, numbered: bool, shaded: bool, later: bool) -> Iterator[LegendEntry]:
    for kind in kinds:
        yield LegendEntry(f"{kind} {traits_of(kind).phrase}", [swatch(f'class="{kind}0"')])
    yield LegendEntry("idle", [swatch('fill="url(#idle)"')])
    if numbered:
        yield LegendEntry(NUMBERS, [])
    if shaded:
        yield LegendEntry(f"lighter: later microbatch, {SHADES} shades in turn", [])
    if later:
        yield LegendEntry("bar: later stages of the rank", [])


def _panel(scale: _Scale, block: Block, panel: Panel, number: int, top: int) -> Iterator[str]:
    caption = f'<tspan class="ink bold">{number} {panel.title}</tspan><tspan dx="10">{escape(panel.text)}</tspan>'
    yield f'<text class="soft" x="{LEFT}" y="{top + 20}">{caption}</text>'
    end, digits = panel.layout.timeline.end // NS_PER_MS, digits_of(panel.layout.timeline)
    for rank, row in enumerate(panel.layout.timeline.rows):
        y = top + CAPTION - 4 + rank * (ROW + GAP)
        yield f'<text class="ink small end" x="{LEFT - 10}" y="{y + 14}">rank {rank}</text>'
        yield f'<rect fill="url(#idle)" x="{LEFT}" y="{y}" width="{scale.x(end) - LEFT:.2f}" height="{ROW}"/>'
        first = min(stage for _, stage in panel.layout.placement.stages(rank))
        for span in row:
            yield _box(scale, block, panel.layout, span, span.op.stage > first, y, digits)
        yield f'<text class="soft small" x="{scale.x(end) + 8:.2f}" y="{y + 14}">{escape(panel.notes[rank])}</text>'


def _box(scale: _Scale, block: Block, layout: Layout, span: Span, later: bool, y: int, digits: int) -> str:
    x, end = scale.x(span.start / NS_PER_MS), scale.x(span.end / NS_PER_MS)
    width = max(0.4, end - x - APART)
    name = f"{span.op.kind}{span.op.microbatch // block.num_microbatches % SHADES}"
    text = ""
    if size := fitting(width, digits):
        middle = f'x="{x + width / 2:.2f}" y="{y + ROW / 2 - 0.5 + size.drop:g}"'
        text = f'<text class="on{name} {size.name} middle" {middle}>{span.op.microbatch}</text>'
    bar = f'<rect class="on{name}" x="{x + 1:.2f}" y="{y + ROW - 2.5}" width="{max(0.2, width - 2):.2f}" height="1.5"/>' if later else ""
    box = f'<rect class="{name}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" rx="1.5"/>'
    return f'<g class="pass">{box}<title>{escape(describe(layout.timeline, span))}</title>{text}{bar}</g>'


def _axis(scale: _Scale, bottom: int) -> Iterator[str]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, scale.slots) if scale.slots / step <= 16)
    for slot in range(0, scale.slots + 1, step):
        yield f'<path class="grid" d="M{scale.x(slot):.2f} {bottom - 4}v6"/>'
        yield f'<text class="soft small middle" x="{scale.x(slot):.2f}" y="{bottom + 16}">{slot}</text>'
    yield f'<text class="soft small middle" x="{(LEFT + scale.width - RIGHT) / 2:.1f}" y="{bottom + 32}">slots</text>'
