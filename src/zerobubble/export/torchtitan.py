"""What torchtitan is given to play a schedule: PyTorch's CSV, and the settings that make it lay its stages as the CSV has them.

torchtitan always plays a CSV with PyTorch's `_PipelineScheduleRuntime`, whatever schedule it is told. But it lays stages by the schedule's
name: one stage a rank for those of one stage, round and round for looped ones, and there and back for `ZBVZeroBubble`, with two stages on
each rank. So the name must be one that lays them as here. How many stages there are it works out from the number of layers in each, as
far as a whole number gives so many, or takes from the list of their modules, which it follows where it has one. Read in torchtitan of
August 2026 (`distributed/pipeline_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerobubble.arguments import WHOLE, optional, takes
from zerobubble.errors import InputError
from zerobubble.export.megatron import even_stages
from zerobubble.export.torch_cells import require_expressible
from zerobubble.ir import Placement, Schedule

_SPELLED = {"E": ("tok_embeddings",), "L": ("norm", "lm_head")}
"""The modules of torchtitan's language models that are no layers, by their letters in a layout."""
_ENDS = 2
"""As how many layers torchtitan counts these modules, an embedding and a head, unless it is told otherwise."""


@takes(schedule=Schedule, csv_path=str, layers=optional(WHOLE))
def torchtitan_settings(schedule: Schedule, csv_path: str, layers: int | None = None) -> dict[str, str | int | list[list[str]]]:
    """The settings of torchtitan's `[parallelism]` for a model of so many transformer `layers`, with the CSV of `schedule` at `csv_path`.

    With `layers`, they say which modules each stage holds, layers shared out evenly, the spare ones not to the ends, and for several stages
    on a rank how many layers torchtitan itself would give to each, where that makes so many stages; without it torchtitan shares layers out
    itself, which it can for one stage a rank and for two. Raises `InputError` for a schedule whose stages torchtitan cannot lay, for more
    stages than there is something for, and where it has to be told the layers.

    >>> import zerobubble as zb
    >>> from zerobubble.export.torchtitan import torchtitan_settings
    >>> torchtitan_settings(zb.make("zb-v", 2, 4), "zbv.csv")["pipeline_parallel_schedule"]
    'ZBVZeroBubble'
    """
    require_expressible(schedule)
    placement = schedule.placement
    settings: dict[str, str | int | list[list[str]]] = {
        "pipeline_parallel_degree": schedule.num_ranks,
        "pipeline_parallel_schedule": _schedule_laying(placement),
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
            f"torchtitan lays 1 or 2 stages on a rank by itself, and {schedule.name!r} has {placement.stages_per_rank}: "
            "tell the number of transformer layers of the model, so that the settings name those of each stage"
        )
    return settings


def as_flags(settings: dict[str, str | int | list[list[str]]]) -> str:
    """The settings as arguments of torchtitan's command line, a line each; lists of modules as a line for its configuration in Python."""
    lines = [f"--parallelism.{name} {value}" for name, value in settings.items() if not isinstance(value, list)]
    lines += [f"parallelism.{name} = {value!r}" for name, value in settings.items() if isinstance(value, list)]
    return "\n".join(lines) + "\n"


def _schedule_laying(placement: Placement) -> str:
    """The name of a schedule for which torchtitan lays stages as in `placement`."""
    ranks = placement.num_ranks
    laid = {"1F1B": Placement.linear(ranks), "ZBVZeroBubble": Placement.vee(ranks)}
    if placement.stages_per_rank > 1:
        laid["Interleaved1F1B"] = Placement.looped(ranks, placement.stages_per_rank)
    for name, each in laid.items():
        if each.routes == placement.routes:
            return name
    raise InputError(
        f"torchtitan lays stages one on each rank, round and round, or there and back once, and not as the placement {placement.name!r}: "
        "choose a linear, looped or vee placement, or run it with zerobubble.Pipeline"
    )


def _layers_per_stage(num_stages: int, layers: int) -> int | None:
    """The number by which torchtitan makes so many stages of `layers`, None where no whole number does."""
    counted = layers + _ENDS
    return next((number for number in range(1, counted + 1) if -(-counted // number) == num_stages), None)


def _modules(stages: Sequence[str]) -> list[list[str]]:
    """The names of the modules in each stage, which is spelled as in a layout of Megatron."""
    numbers = iter(range(sum(stage.count("t") for stage in stages)))
    return [list(_names(stage, numbers)) for stage in stages]


def _require_full(parts: Sequence[Sequence[str]], layers: int) -> None:
    """Raise for stages without any module, which torchtitan cannot run."""
    empty = sum(not part for part in parts)
    if empty:
        raise InputError(
            f"{layers} transformer layers leave {empty} of {len(parts)} stages empty: plan for a model of {layers} layers "
            f"(zerobubble plan --num-layers {layers}), or give the layers of a larger one"
        )


def _names(stage: str, numbers: Iterator[int]) -> Iterator[str]:
    for letter in stage:
        yield from _SPELLED.get(letter) or (f"layers.{next(numbers)}",)
