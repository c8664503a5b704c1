"""`zerobubble block`: a building block, the bound on its memory, and the four steps to its schedule."""

from __future__ import annotations

import json
from dataclasses import dataclass

import click
from rich.table import Table

from zerobubble.arguments import wrong
from zerobubble.blocks import KNOWN, Block, Layout, Steps, four_steps, known_block, lifespans, memory_law, steady_peaks
from zerobubble.cli.inputs.files import is_file, read_text, require_size
from zerobubble.cli.inputs.options import Counts, PictureFiles, file_for, json_option, misfit, option, option_group, picture_options
from zerobubble.cli.outputs.terminal import stdout_console
from zerobubble.costs import NS_PER_MS
from zerobubble.errors import InputError, near
from zerobubble.export.blocks import block_svg
from zerobubble.export.document import dumps
from zerobubble.export.png import write_picture
from zerobubble.view.block_page import block_html
from zerobubble.whole_files import write_text

NOTE = (
    "lifespans: slots from the start of F to the end of W, for each stage of the rank. law, steady and the names of steps: peak stage "
    "activations of the rank, as bounded by the memory law, in the steady phase, and in each step. Makespan, span and bubble are in "
    "slots. Span: the longest time from a rank's first start to its last end."
)


@dataclass(frozen=True, kw_only=True)
class BlockOptions(Counts):
    """The size of the schedule to make, and the limits of its steps."""

    memory: int | None = option(
        "--memory", type=click.IntRange(1), metavar="K", help="Stage activations that a rank may hold; the peak of the block if not given."
    )
    reorder_steady: bool = option("--reorder-steady", is_flag=True, help="Reorder the steady phase as well as warm-up and cool-down.")


@click.command("block")
@click.argument("name")
@option_group(BlockOptions, "options")
@picture_options
@click.option("-o", "--output", callback=file_for(".txt", ".json"), metavar="FILE", help="Write the finished schedule to this file.")
@json_option
def block(name: str, options: BlockOptions, pictures: PictureFiles, output: str | None, as_json: bool) -> None:
    """Make a schedule by repeating the building block NAME, the passes of one microbatch.

    \b
    Examples:
      zerobubble block v-half --ranks 4 --microbatches 8 --svg steps.svg
      zerobubble block mine.txt --microbatches 12 -o mine-schedule.txt

    NAME is a published block, or a file with a block of your own; - is stdin. Prints the block, the lifespan and memory of each rank, and
    the figures of the block repeated, squeezed and reordered, in slots. The number of microbatches is three per rank if not given.
    """
    shown = _find(name, options.ranks)
    count = 3 * shown.placement.num_ranks if options.microbatches is None else options.microbatches
    if count < 1:
        raise wrong("--microbatches", count, "at least 1")
    require_size(name, 3 * shown.placement.num_stages * count)
    steps = four_steps(shown, count, options.memory, keep_steady_phase=not options.reorder_steady)
    for file, text in ((pictures.svg, block_svg), (pictures.html, block_html)):
        if file is not None:
            write_picture(file, text(shown, steps))
    if output is not None:
        schedule = steps.reordered.schedule
        write_text(output, dumps(schedule) if output.lower().endswith(".json") else schedule.to_text())
    if as_json:
        click.echo(json.dumps(_as_dict(shown, steps), indent=2))
    else:
        _print(shown, steps)


def _find(name: str, ranks: int | None) -> Block:
    if name in KNOWN:
        if ranks is None:
            raise InputError("{call} needs {needed}", call=name, needed="--ranks P", remedy="")
        require_size(name, ranks * ranks)
        return known_block(name, ranks)
    if not is_file(name):
        raise InputError(
            "there is no block {got!r}: {nearest}known are {known}; or give a file",
            got=name,
            nearest=near(name, KNOWN),
            known=", ".join(KNOWN),
        )
    try:
        block = Block.from_text(read_text(name))
    except InputError as error:
        raise InputError("cannot read a block from {name}: {reason}", name=name, reason=str(error)) from error
    if ranks not in (None, block.placement.num_ranks):
        raise misfit("--ranks", ranks, f"{name}, which has {block.placement.num_ranks}")
    return block


def _step_to_dict(layout: Layout) -> dict[str, int]:
    timeline = layout.timeline
    return {
        "makespan": timeline.makespan // NS_PER_MS,
        "span": timeline.span // NS_PER_MS,
        "bubble": layout.bubble,
        "peak": max(layout.peaks),
    }


def _later_steps(steps: Steps) -> dict[str, Layout]:
    return {"repeated": steps.repeated, "squeezed": steps.squeezed, "reordered": steps.reordered}


def _as_dict(block: Block, steps: Steps) -> dict[str, object]:
    return {
        "block": block.to_text(),
        "interval": block.interval,
        "ranks": [
            {"rank": rank, "lifespans": {f"{life.stage}.{life.microbatch}": life.slots for life in lives}, "law": law, "steady": steady}
            for rank, (lives, law, steady) in enumerate(zip(lifespans(block), memory_law(block), steady_peaks(block), strict=True))
        ],
        "steps": {name: _step_to_dict(layout) for name, layout in _later_steps(steps).items()},
        "schedule": steps.reordered.schedule.to_dict(),
    }


def _print(block: Block, steps: Steps) -> None:
    console = stdout_console()
    console.print(block.to_text(), highlight=False, markup=False, soft_wrap=True)
    console.print(_memory_table(block, steps), "", _step_table(steps), sep="\n")
    console.print(f"\n{NOTE}", style="dim", highlight=False)


def _memory_table(block: Block, steps: Steps) -> Table:
    """A table of the stage activations on each rank: by the memory law, in the steady phase, and in each step."""
    table = Table("rank", "lifespans", box=None, header_style="bold", pad_edge=False)
    for title in ("law", "steady", *_later_steps(steps)):
        table.add_column(title, justify="right")
    for rank, (lives, law, steady) in enumerate(zip(lifespans(block), memory_law(block), steady_peaks(block), strict=True)):
        held = (law, steady, *(layout.peaks[rank] for layout in _later_steps(steps).values()))
        table.add_row(str(rank), ", ".join(f"{life.stage}: {life.slots}" for life in lives), *map(str, held))
    return table


def _step_table(steps: Steps) -> Table:
    table = Table("step", box=None, header_style="bold", pad_edge=False)
    for title in ("makespan", "span", "bubble", "peak memory"):
        table.add_column(title, justify="right")
    for name, layout in _later_steps(steps).items():
        table.add_row(name, *map(str, _step_to_dict(layout).values()))
    return table
