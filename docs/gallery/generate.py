"""The gallery: one page about every published schedule, with a picture of each, written into the folder of this file.

Everything on it comes from the table of schedules: their docstrings, their closed forms and what the simulation gives. The README's
picture and those of the pages on recomputation, unequal microbatches and divided heads are drawn here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from docs.gallery.recompute import RECOMPUTE, recompute_picture
from docs.gallery.unequal import UNEQUAL, unequal_picture
from docs.gallery.vocabulary import VOCABULARY, vocabulary_picture
from zerobubble import Costs, Schedule, make, simulate
from zerobubble.blocks import KNOWN, Block, Steps, four_steps, known_block
from zerobubble.cli.inputs.schedule_and_costs import Costed, equal_costs
from zerobubble.cli.outputs.evaluation import Evaluation, evaluate
from zerobubble.costs import UNIT_BYTES
from zerobubble.export import timeline_svg
from zerobubble.export.blocks import block_svg
from zerobubble.export.svg import caption, makespan_caption, without_tooltips
from zerobubble.formulas import FORMULAS, Formula, setting
from zerobubble.kinds import KINDS
from zerobubble.schedules import SCHEDULES, Recipe
from zerobubble.units import show_ms, show_percent

FOLDER = Path(__file__).parent
FRONT = FOLDER.parent / "timeline.svg"
RANKS, MICROBATCHES = 4, 8
WIDTH = 960
FRONT_WIDTH, FRONT_TIMES, FRONT_COMM = 900, (10, 10, 8), 0.2
"""Pixels of the README's picture, and its ms of F, B and W of a rank and of a message."""

FAMILIES = {
    "linear": "One stage per rank",
    "looped": "Stages in a loop",
    "vee": "Stages down and back",
    "wave": "Stages down and back",
    "bidirectional": "Two copies of the model",
}
"""The heading above the schedules of a placement, in the order of the page."""

INFERENCE = "Inference"

INTRODUCTION = f"""\
# Gallery

The published schedules at one shape: {RANKS} ranks, {MICROBATCHES} microbatches, 1 ms each for F, B and W of a rank and microbatch,
messages that take no time. A rank's work is the same however many stages it holds, so the figures can be compared.

The same at another shape and other costs:

```console
$ zerobubble show zb-h1 --ranks 8 --microbatches 24 --times 10,10,8 --comm 0.2
$ zerobubble compare 1f1b zb-h1 zb-v --ranks 8 --microbatches 24 --times 10,10,8 --comm 0.2
```

## How to read the pictures

- A line is a rank and time runs to the right. A box is one pass; the number in it is its microbatch.
- **F** (blue) is forward. **B** (green) is the gradient for the input, **W** (yellow) the gradient for the weights, **BW** (red) both
  in one pass.
- A lighter shade is a later stage of the same rank.
- Two boxes one above the other in one line are passes that run overlapped. Here overlapping saves no time: a pair takes as long as
  its two passes.
- Hatched is idle: the bubble.
- The gray strip below a rank is the activation memory it holds, with the peak at the right in microbatches of all its stages.

A schedule made from a building block has a second picture: the block, repeated, squeezed and reordered. There a lighter shade is a
later copy of the block, a bar below a pass marks a later stage of the rank, and the number at the right is the peak in stage
activations. F, B and W take a slot each, BW two.

## Overview

*Makespan* runs from the first start to the last end over all ranks; *span* is the longest time a single rank works, from its own first
start to its own last end. A *bubble* is the share of that time in which ranks are idle. *Peak* is the activation memory of a rank in
microbatches, from the rank with least to the one with most; what is held from B to W counts in full, and weights do not count.
*Messages* are those between ranks.
"""

NO_BREAK = "\N{NO-BREAK SPACE}"

TITLES = ("schedule", "stages per rank", "passes", "makespan", "bubble", "bubble of the span", "peak", "messages")


@dataclass(frozen=True)
class Piece:
    """A schedule of the gallery and what the simulation gives for it."""

    recipe: Recipe
    schedule: Schedule
    costs: Costs
    evaluation: Evaluation
    made_from: tuple[Block, Steps] | None

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.recipe.name

    @property
    def family(self) -> str:
        """The heading it stands under."""
        return FAMILIES[self.schedule.placement.name] if self.recipe.trains else INFERENCE

    @property
    def peaks(self) -> list[float]:
        """In microbatches, rank by rank."""
        return self.evaluation.peak_microbatches


Families = Mapping[str, Sequence[Piece]]


def gallery() -> dict[str, str]:
    """The text of every file of the gallery, by its name in the folder."""
    found = families()
    page = "\n".join([INTRODUCTION, *_overview(found), *_sections(found)])
    pictures = {name: text for pieces in found.values() for piece in pieces for name, text in _pictures(piece).items()}
    return {"README.md": page, **pictures}


def front() -> str:
    """Return the README's picture: one training step under 1F1B and under ZB-V, on one time axis."""
    schedules = [replace(make(name, RANKS, MICROBATCHES), name=title) for name, title in (("1f1b", "1F1B"), ("zb-v", "ZB-V"))]
    timelines = [simulate(schedule, equal_costs(schedule, FRONT_TIMES, FRONT_COMM)) for schedule in schedules]
    times = ", ".join(f"{name} {time:g} ms" for name, time in zip(("F", "B", "W", "messages"), (*FRONT_TIMES, FRONT_COMM), strict=True))
    title = f"{RANKS} ranks, same memory: {times}"
    # The README has no space to explain the span.
    captions = list(map(makespan_caption, timelines))
    return without_tooltips(timeline_svg(*timelines, title=title, width=FRONT_WIDTH, captions=captions))


def families() -> Families:
    """The published schedules under their headings, in the order of the page."""
    pieces = [_piece(recipe) for recipe in SCHEDULES.values()]
    headings = dict.fromkeys([*FAMILIES.values(), INFERENCE])
    return {heading: [piece for piece in pieces if piece.family == heading] for heading in headings}


def _piece(recipe: Recipe) -> Piece:
    schedule = make(recipe.name, RANKS, MICROBATCHES)
    costs = _costs(schedule)
    return Piece(recipe, schedule, costs, evaluate(Costed(schedule, costs, "1 ms for each of F, B and W")), _made_from(schedule))


def _costs(schedule: Schedule) -> Costs:
    """1 ms for each of F, B and W and `UNIT_BYTES` of a rank and microbatch, in equal parts on the stages that it passes there."""
    stages, parts = schedule.num_stages, schedule.num_stages / schedule.num_ranks
    times, held = [1 / parts] * stages, [round(UNIT_BYTES / parts)] * stages
    return Costs.from_ms(times, times, times, held_after_f=held, held_after_b=held)


def _made_from(schedule: Schedule) -> tuple[Block, Steps] | None:
    """The known block that gives this very schedule, with its steps."""
    if schedule.name not in KNOWN:
        return None
    block = known_block(schedule.name, RANKS)
    steps = four_steps(block, MICROBATCHES)
    return (block, steps) if steps.reordered.schedule == schedule else None


def _pictures(piece: Piece) -> dict[str, str]:
    """The timeline as SVG, and the four steps where the schedule is made from a block, by file name."""
    title = f"{RANKS} ranks, {MICROBATCHES} microbatches"
    unit = piece.evaluation.costed.microbatch_bytes
    picture = timeline_svg(piece.evaluation.timeline, title=title, width=WIDTH, memory=piece.recipe.trains, microbatch_bytes=unit)
    drawn = {f"{piece.name}.svg": picture}
    if piece.made_from:
        drawn[f"{piece.name}-block.svg"] = block_svg(*piece.made_from, WIDTH)
    return {name: without_tooltips(text) for name, text in drawn.items()}


def _overview(families: Families) -> Iterator[str]:
    yield f"| {' | '.join(TITLES)} |"
    yield _row(["---", "---", "---", *["--:"] * (len(TITLES) - 3)])
    for family, pieces in families.items():
        yield _row([f"**{family}**", *[""] * (len(TITLES) - 1)])
        for piece in pieces:
            yield _row(_cells(piece))
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace(' ', NO_BREAK) for cell in cells)} |"


def _cells(piece: Piece) -> list[str]:
    recipe, timeline = piece.recipe, piece.evaluation.timeline
    kinds = {op.kind for _, _, op in piece.schedule.ops()}
    return [
        f"[{piece.name}](#{piece.name})",
        f"{recipe.stages_per_rank} or any" if recipe.any_stages else str(recipe.stages_per_rank),
        " ".join(kind for kind in KINDS if kind in kinds),
        show_ms(timeline.makespan),
        show_percent(timeline.bubble_makespan),
        show_percent(timeline.bubble_span),
        _peak(piece),
        str(piece.evaluation.messages),
    ]


def _peak(piece: Piece) -> str:
    least, most = min(piece.peaks), max(piece.peaks)
    return f"{most:g}" if least == most else f"{least:g} to {most:g}"


def _sections(families: Families) -> Iterator[str]:
    everyone = [piece for pieces in families.values() for piece in pieces]
    for family, pieces in families.items():
        yield f"## {family}\n"
        for piece in pieces:
            yield from _section(piece, [other.name for other in everyone if other is not piece and _same_order(other, piece)])


def _same_order(one: Piece, other: Piece) -> bool:
    return replace(one.schedule, name=other.name) == other.schedule


def _section(piece: Piece, twins: Sequence[str]) -> Iterator[str]:
    recipe = piece.recipe
    yield f"### {piece.name}\n"
    yield f"{recipe.summary}\n"
    yield f"![Timeline of {piece.name} on {RANKS} ranks]({piece.name}.svg)\n"
    yield f"**Rule**: {recipe.rule}\n"
    if piece.made_from:
        yield f"![The block {piece.name}, repeated, squeezed and reordered]({piece.name}-block.svg)\n"
    yield from (f"- {formula}" for formula in recipe.formulas)
    yield f"\n**Here**: {_figures(piece)}{_confirmed(piece)}{_also(twins)}\n"
    if recipe.condition:
        yield f"**Needs**: {recipe.condition}\n"
    if recipe.options:
        yield f"**Options**: {', '.join(f'`{option}`' for option in recipe.options)}\n"
    yield f"**Good for**: {recipe.good_for}\n"
    yield f"**Source**: {_linked(recipe.source)}\n"


def _figures(piece: Piece) -> str:
    evaluation = piece.evaluation
    return f"{caption(evaluation.timeline)}; peak memory {_peak(piece)} microbatches; {evaluation.messages} messages."


def _confirmed(piece: Piece) -> str:
    """A sentence about the closed forms that hold here and give what was simulated."""
    timeline, at = piece.evaluation.timeline, setting(piece.schedule, piece.costs)
    bubble, peak = FORMULAS[piece.name].bubble(at), FORMULAS[piece.name].peak
    simulated: list[tuple[str, Formula, float]] = [
        ("bubble", bubble, timeline.span - timeline.work // RANKS),
        ("peak", peak, max(piece.peaks) * at.v),
    ]
    agreed = [f"{what} `{form.text}`" for what, form, value in simulated if form.holds(at) and form.value(at) == value]
    return f" The closed forms give the same: {', '.join(agreed)}." if agreed else ""


def _also(twins: Sequence[str]) -> str:
    return f" The order is that of {' and '.join(twins)}." if twins else ""


def _linked(text: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


if __name__ == "__main__":
    files = gallery()
    for old in FOLDER.glob("*.svg"):
        old.unlink()
    for name, text in files.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for file, text in (
        (FRONT, front()),
        (RECOMPUTE, recompute_picture()),
        (UNEQUAL, unequal_picture()),
        (VOCABULARY, vocabulary_picture()),
    ):
        file.write_text(text, encoding="utf-8")
