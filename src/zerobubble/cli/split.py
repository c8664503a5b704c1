"""`zerobubble split`: the cut of a Transformers model into stages from its configuration, and the costs of its layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from zerobubble.cli.inputs.layers import DTYPE, CountedDtype
from zerobubble.cli.inputs.options import (
    Bytes,
    Existing,
    Shape,
    json_option,
    microbatches_or_bytes,
    option,
    option_group,
    output_file,
    refuse_together,
    shape_options,
)
from zerobubble.cli.inputs.schedule_and_costs import INPUT_HELP, find_schedule
from zerobubble.cli.outputs.terminal import progress
from zerobubble.cost_model.machine import MACHINE
from zerobubble.errors import InputError
from zerobubble.installing import install
from zerobubble.partition import LayerCut, layers_to_dict, parameter_bytes
from zerobubble.units import ms
from zerobubble.whole_files import write_text

if TYPE_CHECKING:
    from zerobubble.models.cutting.by_hand import ByHand
    from zerobubble.models.model_split import ModelSplit


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The size of a microbatch, the user's cuts, and the memory of each rank."""

    batch: int = option("--batch", type=click.IntRange(1), default=1, metavar="N", help="Samples in a microbatch.")
    sequence: int | None = option(
        "--sequence", type=click.IntRange(1), metavar="N", help="Tokens per sample; by default the few of the model's own example."
    )
    cuts: str | None = option(
        "--cuts", help="First parts of the later stages, or numbers of layers, separated by commas; or a Megatron layout."
    )
    inside_blocks: bool = option("--inside-blocks", is_flag=True, help="Also cut between the parts of a block, such as attention and MLP.")
    memory: float | Bytes | None = option(
        "--memory",
        callback=microbatches_or_bytes,
        metavar="X",
        help="Memory of each rank, such as 40GB, for parameters, gradients, Adam moments and activations.",
    )

    @property
    def memory_bytes(self) -> int | None:
        """`--memory` in bytes, None if not given. Raises `InputError` for a number without a unit."""
        if isinstance(self.memory, float):
            raise InputError("{argument} {got:g} has no unit", argument="--memory", got=self.memory, remedy="give bytes, such as 40GB")
        return None if self.memory is None else self.memory.count


@click.command("split")
@click.argument("config", type=Existing("a model's config.json, or its folder"))
@click.option("--stages", type=click.IntRange(min=1), metavar="S", help="Number of stages, one on each rank.")
@click.option("--schedule", metavar="NAME", help=f"Cut for this schedule: {INPUT_HELP}.")
@shape_options
@option_group(ModelOptions, "options")
@click.option(
    "-o",
    "--output",
    callback=output_file,
    metavar="FILE",
    help="Write the costs of the layers to this file, for zerobubble plan --layers.",
)
@json_option
def split_command(
    config: str, stages: int | None, schedule: str | None, shape: Shape, options: ModelOptions, output: str | None, as_json: bool
) -> None:
    """Show where zb.split cuts a model into stages.

    \b
    Examples:
      zerobubble split llama/config.json --stages 8
      zerobubble split llama/config.json --schedule zb-v --ranks 8 --microbatches 24 --sequence 4096 --memory 80GB
      zerobubble split llama/config.json --stages 4 --cuts "Et*7|t*9|t*9|t*7L"
      zerobubble split llama/config.json --sequence 4096 -o layers.json

    CONFIG is a configuration of Transformers: a file such as config.json, or a folder with a config.json. No weights are read or made.

    The cut minimizes the time of the slowest rank for the schedule, within --memory. A plan for the model's layers has its own cut. Bars
    show the time of each rank, followed by the lower bound over all cuts, and the bound of the heaviest part. Times are estimated from
    operations; Pipeline.profile_layers measures them.
    """
    refuse_together("stages", "schedule", "ranks", "microbatches", "stages_per_rank", "options")
    refuse_together("cuts", "memory", "inside_blocks")
    if stages is None and schedule is None and output is None and not as_json:
        raise InputError("nothing to do", remedy="give --stages S or --schedule NAME for a cut, or -o FILE for the costs of layers")
    named = None if schedule is None else find_schedule(schedule, shape)
    with _showing_steps(shown=not as_json) as show:
        show("loading PyTorch and Transformers")
        split = _split(config, options, show)
        if named is not None:
            split = split.for_schedule(named.schedule, () if named.problem is None else named.problem.first_layers)
        count = named.schedule.num_stages if named is not None else stages
        show("estimating the costs of layers")
        dtype = _counted_dtype(config)
        layers = layers_to_dict(split.layers()) | {MACHINE: split.machine.to_dict(), DTYPE: dtype._asdict()}
        show("cutting the model, and comparing it with the uncut one")
        if as_json:
            text = json.dumps(layers | ({} if count is None else _as_dict(split, count)), indent=1)
        else:
            text = "\n".join([*([] if count is None else [split.describe(count)]), str(dtype)])
    if output is not None:
        write_text(output, json.dumps(layers, indent=1) + "\n")
    click.echo(text)


@contextmanager
def _showing_steps(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what the command does now, on stderr, if that is a terminal."""
    if not shown:
        yield lambda _: None
        return
    with progress() as bar:
        task = bar.add_task("", total=None)
        yield lambda step: bar.update(task, description=step)


def _split(config: str, options: ModelOptions, show: Callable[[str], None]) -> ModelSplit:
    try:
        from zerobubble.models.from_config import split_config

        show("creating the model without weights")
        return split_config(config, _cuts(options.cuts), options.memory_bytes, options.batch, options.sequence, options.inside_blocks)
    except ModuleNotFoundError as error:
        is_of_extra = str(error.name).partition(".")[0] in _OF_EXTRA
        remedy = install("transformers") if is_of_extra else f"install the package that has the module {error.name}"
        raise InputError("zerobubble split needs {name}, which is not installed", name=error.name, remedy=remedy) from error


def _counted_dtype(config: str) -> CountedDtype:
    from zerobubble.models.from_config import dtype_of

    return CountedDtype(*dtype_of(config))


_OF_EXTRA = ("torch", "numpy", "transformers", "accelerate", "llvmlite")
"""Modules that the extra `transformers` installs."""


def _as_dict(split: ModelSplit, count: int) -> dict[str, Any]:
    cut = split.layer_cut(count)
    return {"stages": [stage._asdict() for stage in split.stages(count)], "tied": split.tied(count), **_figures(cut)}


def _figures(cut: LayerCut) -> dict[str, Any]:
    kept = parameter_bytes(cut.layers, cut.cuts, cut.placement)
    ranks = [
        {"ms": ms(time), "parameters_bytes": bytes_, "held_after_f": held}
        for time, bytes_, held in zip(cut.rank_times, kept, cut.rank_held, strict=True)
    ]
    return {"ranks": ranks, "excess": cut.excess, "least_excess": cut.least_excess, "reason": cut.reason, "heaviest": cut.heaviest_text}


def _cuts(text: str | None) -> ByHand | None:
    """Parses `--cuts`: a layout if it has bars, else numbers or names."""
    if text is None or "|" in text:
        return text
    parts = [part.strip() for part in text.split(",")]
    return [int(part) for part in parts] if all(part.isdigit() for part in parts) else parts
