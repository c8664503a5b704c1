"""The offline page of a building block and the four steps to its schedule, in the viewer."""

from __future__ import annotations

from dataclasses import replace
from html import escape

from zerobubble.blocks import Block, Steps, lifespans, memory_law
from zerobubble.costs import UNIT_BYTES
from zerobubble.export.blocks import Panel, layout_figures, panels, terms
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.view.columns import Viewed
from zerobubble.view.page import LAYOUT_SOURCE, header, page, section, table, viewer


def block_html(block: Block, steps: Steps) -> str:
    """Return the page: the steps on one axis, their figures, the lifespans with the memory law, and the block in its text form."""
    title = f"{block.name} on {block.placement.num_ranks} ranks, {steps.reordered.num_microbatches} microbatches"
    drawn = panels(block, steps)
    figures = table(("step", "makespan", "span", "bubble", "peak"), ([panel.title, *layout_figures(panel.layout)] for panel in drawn[1:]))
    law_rows = (
        [f"rank {rank}", "; ".join(f"stage {life.stage}: {life.slots}" for life in lives), " + ".join(terms(block, rank)), str(held)]
        for rank, (lives, held) in enumerate(zip(lifespans(block), memory_law(block), strict=True))
    )
    law = table(("rank", "lifespans in slots", "intervals", "at most"), law_rows)
    sections = (
        section("steps", "Steps, in slots and stage activations", figures),
        section("law", "Lifespans and the memory law", law),
        section("text", "The block as text", f'<pre tabindex="0">{escape(block.to_text())}</pre>'),
    )
    return page(escape(title), (header(title), viewer(), *sections), block_views(block, steps))


def block_views(block: Block, steps: Steps) -> list[Viewed]:
    """Return the block and the three steps after it in the form of the viewer, with slots of 1 ms."""
    return list(map(_viewed, panels(block, steps)))


def _viewed(panel: Panel) -> Viewed:
    units = [UNIT_BYTES] * panel.layout.placement.num_ranks
    return Viewed(_timeline(panel), microbatch_bytes=units, memory_unit="stage activations", caption=panel.text, unit="slots")


def _timeline(panel: Panel) -> Timeline:
    """The step in time, with the reason for every start where no pass waits without one; else as the block lays it out."""
    laid_out = replace(panel.layout.timeline, name=panel.title, source=LAYOUT_SOURCE)
    played = replace(simulate(panel.layout.schedule, panel.layout.costs), name=panel.title)
    return played if _starts(played) == _starts(laid_out) else laid_out


def _starts(timeline: Timeline) -> list[int]:
    return [span.start for _, span in timeline.spans()]
