"""Settings with which torchtitan runs a schedule from PyTorch's CSV.

torchtitan runs every CSV with PyTorch's `_PipelineScheduleRuntime`, but it places stages by the configured schedule name: one stage per
rank for single-stage schedules, in a loop for looped ones, and in a V for `ZBVZeroBubble`, with two stages per rank. The settings therefore
name a schedule with the same placement as the CSV. torchtitan derives the number of stages from the layers per stage, if some whole number
gives that many, or from the list of modules per stage if there is one. As of torchtitan in August 2026
(`distributed/pipeline_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerobubble.arguments import WHOLE, optional, takes
from zerobubble.errors import InputError
from zerobubble.export.megatron import even_stages
from zerobubble.export.torch_cells import require_expressible
from zerobubble.ir import Placement, Schedule

_SPELLED = {"E": ("tok_embeddings",), "L": ("norm", "lm_head")}
"""The modules of torchtitan's language models other than layers, by their letters in a layout."""
_ENDS = 2
"""The number of layers for which torchtitan counts these modules, an embedding and a head, by default."""


@takes(schedule=Schedule, csv_path=str, layers=optional(WHOLE))
def torchtitan_settings(schedule: Schedule, csv_path: str, layers: int | None = None) -> dict[str, str | int | list[list[str]]]:
    """Return the settings of torchtitan's `[parallelism]` section for the CSV of `schedule` at `csv_path`.

    With the number of transformer `layers`, the settings list the modules of each stage, with layers divided evenly and spare ones not at
    the ends. For several stages per rank they also have torchtitan's own number of layers per stage, if it gives as many stages. Without
    `layers`, torchtitan divides the layers itself, which it can do for one or two stages per rank. Raises `InputError` for a placement that
    torchtitan does not have, for more stages than modules, and if `layers` is required.

    >>> import zerobubble as zb
    >>> from zerobubble.export.torchtitan import torchtitan_settings
    >>> torchtitan_settings(zb.make("zb-v", 2, 4), "zbv.csv")["pipeline_parallel_schedule"]
    'ZBVZeroBubble'
    """
    require_expressible(schedule)
    placement = schedule.placement
    settings: dict[str, str | int | list[list[str]]] = {
        "pipeline_parallel_degree": schedule.num_ranks,
        "pipeline_parallel_schedule": _schedule_name(placement),
        "pipeline_parallel_schedule_csv": csv_path,
        "num_pp_microbatches": schedule.num_microbatches,
    }
    if layers is not None:
        per_stage = _layers_per_stage(placement.num_stages, layers)
        if placement.stages_per_rank > 1 and per_stage is not None:
            settings["pipeline_parallel_layers_per_stage"] = per_stage
        settings["module_fqns_per_model_part"] = parts = _modules(even_stages(placement.num_stages, layers))
        _require_full(parts, layers)
    elif placement.stages_per_rank > 2:
        raise InputError(
            "torchtitan can place 1 or 2 stages per rank by itself, but {schedule!r} has {placement_stages_per_rank}",
            schedule=schedule.name,
            placement_stages_per_rank=placement.stages_per_rank,
            remedy="give the number of transformer layers of the model, so that the settings list those of each stage",
        )
    return settings


def as_flags(settings: dict[str, str | int | list[list[str]]]) -> str:
    """Return the settings as torchtitan arguments, one per line, and lists of modules as lines of its Python configuration."""
    lines = [f"--parallelism.{name} {value}" for name, value in settings.items() if not isinstance(value, list)]
    lines += [f"parallelism.{name} = {value!r}" for name, value in settings.items() if isinstance(value, list)]
    return "\n".join(lines) + "\n"


def _schedule_name(placement: Placement) -> str:
    """Return the name of a schedule for which torchtitan places stages as in `placement`."""
    ranks = placement.num_ranks
    placed = {"1F1B": Placement.linear(ranks), "ZBVZeroBubble": Placement.vee(ranks)}
    if placement.stages_per_rank > 1:
        placed["Interleaved1F1B"] = Placement.looped(ranks, placement.stages_per_rank)
    for name, named in placed.items():
        if named.routes == placement.routes:
            return name
    message = "torchtitan places stages linearly, in a loop or in a V, but not as the placement {placement!r}"
    raise InputError(
        message, placement=placement.name, remedy="choose a linear, looped or vee placement, or run it with zerobubble.Pipeline"
    )


def _layers_per_stage(num_stages: int, layers: int) -> int | None:
    """Return the layers per stage with which torchtitan makes `num_stages` stages; None if no whole number does."""
    counted = layers + _ENDS
    return next((number for number in range(1, counted + 1) if -(-counted // number) == num_stages), None)


def _modules(stages: Sequence[str]) -> list[list[str]]:
    """Return the names of the modules in each stage, given in the letters of Megatron's layout."""
    numbers = iter(range(sum(stage.count("t") for stage in stages)))
    return [list(_names(stage, numbers)) for stage in stages]


def _require_full(parts: Sequence[Sequence[str]], layers: int) -> None:
    """Raise `InputError` for stages without modules, which torchtitan cannot run."""
    empty = sum(not part for part in parts)
    if empty:
        raise InputError(
            "{layers} transformer layers leave {empty} of {num_parts} stages empty",
            layers=layers,
            empty=empty,
            num_parts=len(parts),
            remedy=f"plan for a model of {layers} layers (zerobubble plan --num-layers {layers}), or give the layers of a larger model",
        )


def _names(stage: str, numbers: Iterator[int]) -> Iterator[str]:
    for letter in stage:
        yield from _SPELLED.get(letter) or (f"layers.{next(numbers)}",)
