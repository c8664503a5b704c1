"""What `plan --model` draws: the quickest ways to divide a model, the steps of the first of them, and everything assumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from zerobubble.cli.inputs.options import PictureFiles
from zerobubble.cost_model import Division, Divisions
from zerobubble.export.svg import timeline_svg
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_bytes, show_percent
from zerobubble.view import Viewed
from zerobubble.view.page import header, page, section, table, viewer
from zerobubble.whole_files import write_text

SHOWN = 3
"""So many of the quickest steps are drawn."""
TITLES = (
    *("way", "step", "TFLOP/s", "of the peak", "tp", "cp", "ep", "pp x v", "dp", "microbatches"),
    *("recompute", "schedule", "memory", "activations"),
)
MEANINGS = (
    "tp, cp, ep: GPUs that share a layer, a sequence, the experts of a layer; pp x v: ranks and the stages of each; dp: replicas. TFLOP/s: "
    "those of each GPU that training needs, and their share of the data sheet. Memory: what the fullest GPU holds, and activations in it."
)


def write_divisions(found: Divisions, pictures: PictureFiles) -> None:
    """Write the files that are asked for: the picture has the best step, the page the first few."""
    if pictures.svg is not None:
        write_text(pictures.svg, timeline_svg(_timeline(1, found.best), title=repr(found)[1:-1]))
    if pictures.html is not None:
        write_text(pictures.html, divisions_html(found))


def divisions_html(found: Divisions) -> str:
    """The page: all choices in a table, the steps of the first on their ranks, and what was assumed."""
    title = repr(found)[1:-1]
    drawn = found.choices[:SHOWN]
    viewed = [_viewed(place, choice, found.memory_bytes) for place, choice in enumerate(drawn, start=1)]
    rows = [_row(place, choice) for place, choice in enumerate(found.choices, start=1)]
    assumed = "".join(f"<li>{escape(sentence)}</li>" for sentence in found.assumptions)
    body = (
        header(title),
        table(TITLES, rows),
        f'<p class="hint">{escape(_note(found))}</p>\n',
        viewer(),
        section("assumed", "Assumed of the first", f"<ul>{assumed}</ul>"),
    )
    return page(escape(title), body, viewed)


def _row(place: int, choice: Division) -> list[str]:
    here, step = choice.setting, choice.step
    fullest = max(range(len(step.rank_bytes)), key=step.rank_bytes.__getitem__)
    return [
        f"way {place}",
        f"{step.seconds:.4g} s",
        f"{step.flops_per_gpu / 1e12:,.0f}",
        show_percent(step.utilization),
        *map(str, (here.tp, here.cp, here.ep)),
        f"{here.pp} x {here.v}",
        f"{here.dp:,}",
        f"{choice.num_microbatches:,} of {counted(here.microbatch, 'sequence')}",
        here.recompute,
        step.schedule,
        show_bytes(step.rank_bytes[fullest]),
        show_bytes(step.rank_activations[fullest]),
    ]


def _note(found: Divisions) -> str:
    searched = f"{found.ways:,} ways: {found.without_room:,} have no room, {found.played:,} were played, no other can be among these."
    drawn = "Below are the passes of the first, without the optimizer's step, and their memory of activations."
    return " ".join((MEANINGS, searched, drawn, *_shortened(found.choices[:SHOWN])))


def _shortened(drawn: tuple[Division, ...]) -> Iterator[str]:
    """Says of which steps only a part is drawn."""
    for place, choice in enumerate(drawn, start=1):
        if choice.repeated:
            few = choice.schedule.num_microbatches
            yield f"Of way {place} a step of {few:,} microbatches is drawn; the other {choice.num_microbatches - few:,} repeat its middle."


def _viewed(place: int, choice: Division, room: int) -> Viewed:
    costs = choice.estimate.costs
    limits = choice.estimate.limits(choice.schedule.placement, room).memory
    return Viewed(_timeline(place, choice), costs, limits=limits)


def _timeline(place: int, choice: Division) -> Timeline:
    """The step as it was played, under the name of the way."""
    return replace(simulate(choice.schedule, choice.estimate.costs), name=f"way {place}: {choice.schedule.name}")
