"""The workshop of building blocks: a block whose passes are moved, where its copies collide, what they hold, and its steps."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from zerobubble.blocks import Block, Steps, four_steps, known_block, lifespans, memory_law, steady_peaks
from zerobubble.blocks.conflicts import collision_sentence, early_sentence, find_collisions, find_early_starts
from zerobubble.errors import ScheduleError
from zerobubble.explorer.question import FieldError, errors_at, read_fields
from zerobubble.export.blocks import block_svg, layout_figures, terms
from zerobubble.export.document import dumps
from zerobubble.export.palette import ink, shade
from zerobubble.kinds import traits_of
from zerobubble.view.block_page import block_html, block_views
from zerobubble.view.page import viewer_data

MOST_DRAWN = 2_500
"""The most passes of a block that the page draws."""
MOST_PLAYED = 30_000
"""Maximum passes of the schedules made from a block; they are redrawn while a pass is dragged."""
MOST_SLOTS = 1_000_000
"""Maximum slots of the steps, over all ranks."""
MOST_REPORTED = 100
"""Maximum collisions, and passes that start early, that the page gets."""


@dataclass(frozen=True)
class BlockQuestion:
    """A published block, or any block in text form (`text`, which replaces `block` and `ranks`), and the steps to make from it.

    `memory` is the stage activations that a rank may hold when passes are reordered, and `reorder_steady` whether passes of the steady
    phase also move (1) or not (0).
    """

    block: str = "v-half"
    ranks: int = 4
    text: str = ""
    microbatches: int = 12
    memory: int | None = None
    reorder_steady: int = 0


RANGES: dict[str, tuple[float, float]] = {
    "ranks": (1, 32),
    "microbatches": (1, 1024),
    "memory": (1, 1_000_000),
    "reorder_steady": (0, 1),
}


@dataclass(frozen=True)
class BuiltBlock:
    """A block with its steps. The steps are None if the block cannot be repeated, for the reasons in `problems`."""

    question: BlockQuestion
    block: Block
    steps: Steps | None
    collisions: tuple[dict[str, Any], ...]
    early: tuple[dict[str, Any], ...]

    @property
    def problems(self) -> list[str]:
        return [fault["text"] for fault in (*self.collisions, *self.early)]


def read_block_question(data: Any) -> BlockQuestion:
    """Reads the question from the JSON that the page sends. Raises `FieldError` naming the field of a value that cannot be used."""
    return read_fields(BlockQuestion, RANGES, data)


def make_block(question: BlockQuestion) -> BuiltBlock:
    """Makes the block of the question, with its steps if it can be repeated. Raises `FieldError` naming the field that cannot be used."""
    block = _block(question)
    _require_size(block, question.microbatches)
    collisions = tuple(
        {"ops": [str(collision.first.op), str(collision.second.op)], "since": collision.since, "text": collision_sentence(block, collision)}
        for collision in islice(find_collisions(block), MOST_REPORTED)
    )
    early = tuple(
        {"ops": [str(start.start.op)], "text": early_sentence(start)} for start in islice(find_early_starts(block), MOST_REPORTED)
    )
    return BuiltBlock(question, block, None if collisions or early else _steps(block, question), collisions, early)


def _block(question: BlockQuestion) -> Block:
    if question.text:
        with errors_at("text"):
            return Block.from_text(question.text)
    with errors_at("block"):
        return known_block(question.block, question.ranks)


def _require_size(block: Block, microbatches: int) -> None:
    starts = [start for row in block.starts for start in row]
    passes, copies = len(starts), -(-microbatches // block.num_microbatches)
    taken = sum(block.length(start.op.kind) for start in starts)
    slots = (block.interval * copies + max(start.slot for start in starts)) * block.placement.num_ranks
    for field, count, most, what in (
        ("text", passes, MOST_DRAWN, "the block has {:,} passes; the page draws at most {:,}"),
        ("text", taken, MOST_SLOTS, "the passes of the block take {:,} slots; the workshop takes at most {:,}"),
        ("microbatches", passes * copies, MOST_PLAYED, "the schedule would have up to {:,} passes; the workshop takes at most {:,}"),
        ("microbatches", slots, MOST_SLOTS, "the schedule would go through {:,} slots on all ranks; the workshop takes at most {:,}"),
    ):
        if count > most:
            raise FieldError(field, what.format(count, most), "make it smaller, or use zerobubble block")


def _steps(block: Block, question: BlockQuestion) -> Steps:
    try:
        with errors_at("memory"):
            return four_steps(block, question.microbatches, question.memory, keep_steady_phase=not question.reorder_steady)
    except ScheduleError as error:
        raise FieldError("text", error.faults[0].message, "change the text, or reset it to the published block") from error


def block_to_dict(answer: BuiltBlock) -> dict[str, Any]:
    """Returns the contents of the page: the block with its lifespans and faults, and the steps in the viewer with their figures."""
    block, steps = answer.block, answer.steps
    later = {} if steps is None else {"repeated": steps.repeated, "squeezed": steps.squeezed, "reordered": steps.reordered}
    return {
        "name": block.name,
        "files": {name: f"{block.name}.{form.ending}" for name, form in BLOCK_FORMS.items()} | {"png": f"{block.name}.png"},
        "text": block.to_text(),
        "interval": block.interval,
        "rows": [list(map(list, _passes(block, rank))) for rank in range(block.placement.num_ranks)],
        "kinds": _kinds(block),
        "lifespans": [[list(life) for life in lives] for lives in lifespans(block)],
        "terms": [" + ".join(terms(block, rank)) for rank in range(block.placement.num_ranks)],
        "law": list(memory_law(block)),
        "steady": list(steady_peaks(block)),
        "collisions": list(answer.collisions),
        "early": list(answer.early),
        "steps": [[name, *layout_figures(layout)] for name, layout in later.items()],
        "data": None if steps is None else viewer_data(block_views(block, steps)[1:]),
        "command": block_command(answer),
        "python": block_python(answer),
    }


def _passes(block: Block, rank: int) -> list[tuple[str, str, int, int, int, int]]:
    """Pass, kind, place of its stage among those of the rank, microbatch, slot and length of each pass of a rank."""
    stages = sorted({start.op.stage for start in block.starts[rank]})
    return [(str(op), op.kind, stages.index(op.stage), op.microbatch, slot, block.length(op.kind)) for op, slot in block.starts[rank]]


def _kinds(block: Block) -> dict[str, dict[str, Any]]:
    """How the kinds of the block look on the stages of a rank."""
    shades = max(len({start.op.stage for start in row}) for row in block.starts)
    kinds = {start.op.kind for row in block.starts for start in row}
    return {
        kind: {"phrase": traits_of(kind).phrase, "looks": [[(fill := shade(kind, at, shades)), ink(fill)] for at in range(shades)]}
        for kind in sorted(kinds)
    }


def block_command(answer: BuiltBlock) -> str:
    """The command that makes the same schedule."""
    question = answer.question
    source = shlex.quote(file_name(answer)) if question.text else f"{question.block} --ranks {question.ranks}"
    words = ["zerobubble", "block", source, "--microbatches", str(question.microbatches)]
    words += ["--memory", str(question.memory)] if question.memory is not None else []
    words += ["--reorder-steady"] if question.reorder_steady else []
    return " ".join(words)


def block_python(answer: BuiltBlock) -> str:
    """The program that makes the same schedule."""
    question = answer.question
    source = (
        f"Block.from_text(open({file_name(answer)!r}).read())" if question.text else f"known_block({question.block!r}, {question.ranks})"
    )
    further = f", {question.memory}" if question.memory is not None else ""
    further += ", keep_steady_phase=False" if question.reorder_steady else ""
    lines = [
        "import zerobubble as zb",
        "",
        f"block = zb.blocks.{source}",
        "assert not zb.blocks.collisions(block)",
        f"steps = zb.blocks.four_steps(block, {question.microbatches}{further})",
        "print(steps.reordered.schedule)",
    ]
    return "\n".join(lines) + "\n"


def file_name(answer: BuiltBlock) -> str:
    """The file that the page saves the block to, which the lines read."""
    return f"{answer.block.name}.block.txt"


@dataclass(frozen=True)
class BlockForm:
    """A form of a block: what the button says, the file's ending, its media type, and how it is written."""

    label: str
    ending: str
    media_type: str
    write: Callable[[Block, Steps], str]


BLOCK_FORMS: dict[str, BlockForm] = {
    "svg": BlockForm("SVG", "svg", "image/svg+xml", block_svg),
    "html": BlockForm("page", "html", "text/html", block_html),
    "block": BlockForm("block, text", "block.txt", "text/plain", lambda block, steps: block.to_text()),
    "json": BlockForm("schedule, JSON", "json", "application/json", lambda block, steps: dumps(steps.reordered.schedule)),
    "text": BlockForm("schedule, text", "txt", "text/plain", lambda block, steps: steps.reordered.schedule.to_text()),
    "costs": BlockForm("costs, JSON", "costs.json", "application/json", lambda block, steps: dumps(steps.reordered.costs)),
}
"""Every form of a block by its name. PNG is drawn by the page itself."""


def write_block_form(answer: BuiltBlock, name: str) -> str:
    """The block in the form `name`; raises `FieldError` for an unknown one, and for a block that cannot be repeated."""
    if name not in BLOCK_FORMS:
        raise FieldError("", f"there is no form {name!r:.60}: known are {', '.join(BLOCK_FORMS)}")
    if answer.steps is None:
        raise FieldError("text", answer.problems[0])
    return BLOCK_FORMS[name].write(answer.block, answer.steps)
