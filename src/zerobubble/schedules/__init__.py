"""The published schedules by name, and the registry for others. A new schedule is one file and one line in `SCHEDULES`.

To make one of them, call `zb.make`, which is `make` here. The other names list schedules, register yours, and add passes to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from zerobubble.arguments import WHOLE, instance, optional, takes
from zerobubble.errors import InputError, near
from zerobubble.ir import Schedule
from zerobubble.listing import listing
from zerobubble.schedules.chimera import chimera, even_ranks
from zerobubble.schedules.dualpipe import dualpipe, dualpipe_v, even_and_twice_the_ranks, twice_the_ranks
from zerobubble.schedules.forward_only import forward_only
from zerobubble.schedules.gis import gis, gis_h
from zerobubble.schedules.gpipe import breadth_first, gpipe
from zerobubble.schedules.hanayo import hanayo, whole_waves
from zerobubble.schedules.interleaved import depth_first, interleaved_1f1b, interleaved_lean
from zerobubble.schedules.interleaved_zb import interleaved_zb
from zerobubble.schedules.one_f_one_b import eager_1f1b, one_f_one_b, one_f_one_b_v
from zerobubble.schedules.recipe import Needs, Recipe, no_needs
from zerobubble.schedules.recompute import with_recompute
from zerobubble.schedules.registry import Registry
from zerobubble.schedules.two_thirds import two_thirds
from zerobubble.schedules.vee_blocks import v_half, v_min, v_zb
from zerobubble.schedules.vocabulary import with_vocabulary
from zerobubble.schedules.zb_h import zb_h1, zb_h2
from zerobubble.schedules.zb_v import zb_v
from zerobubble.units import counted

__all__ = ["SCHEDULES", "Recipe", "find", "known_schedules", "make", "register", "registry", "with_recompute", "with_vocabulary"]

__dir__ = listing(__all__)

SCHEDULES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("gpipe", gpipe),
        Recipe("1f1b", one_f_one_b),
        Recipe("eager-1f1b", eager_1f1b),
        Recipe("interleaved-1f1b", interleaved_1f1b, stages_per_rank=2, any_stages=True),
        Recipe("depth-first", depth_first, stages_per_rank=2, any_stages=True),
        Recipe("breadth-first", breadth_first, stages_per_rank=2, any_stages=True),
        Recipe("zb-h1", zb_h1),
        Recipe("zb-h2", zb_h2),
        Recipe("zb-v", zb_v, stages_per_rank=2),
        Recipe("v-min", v_min, stages_per_rank=2),
        Recipe("v-half", v_half, stages_per_rank=2),
        Recipe("v-zb", v_zb, stages_per_rank=2),
        Recipe("1f1b-v", one_f_one_b_v, stages_per_rank=2),
        Recipe("two-thirds", two_thirds),
        Recipe("interleaved-lean", interleaved_lean, stages_per_rank=2, any_stages=True),
        Recipe("interleaved-zb", interleaved_zb, stages_per_rank=2, any_stages=True),
        Recipe("gis", gis, stages_per_rank=2, any_stages=True),
        Recipe("gis-h", gis_h, stages_per_rank=2, any_stages=True),
        Recipe("hanayo", hanayo, stages_per_rank=2, any_stages=True, needs=whole_waves),
        Recipe("chimera", chimera, stages_per_rank=2, needs=even_ranks),
        Recipe("dualpipe", dualpipe, stages_per_rank=2, needs=even_and_twice_the_ranks),
        Recipe("dualpipe-v", dualpipe_v, stages_per_rank=2, needs=twice_the_ranks),
        Recipe("forward-only", forward_only, any_stages=True),
    )
}

"""The recipes of the published schedules, by name."""

registry = Registry(SCHEDULES)
"""All recipes by name: published, registered, and offered by installed packages."""

Builder = TypeVar("Builder", bound=Callable[..., Schedule])


@takes(name=str, num_ranks=WHOLE, num_microbatches=WHOLE, stages_per_rank=optional(WHOLE))
def make(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None, **options: Any) -> Schedule:
    """Build the schedule `name` for `num_ranks` ranks and `num_microbatches` microbatches.

    Raises `InputError` for an unknown name or option (suggesting the nearest known one), for a count below 1, and for a shape that the
    schedule does not support.

    Arguments:
        name: a published, registered or installed schedule, such as "zb-v"; `known_schedules()` lists them.
        num_ranks: processes of the pipeline.
        num_microbatches: slices of each batch.
        stages_per_rank: stages on each rank, for schedules that allow a choice; by default the schedule's usual number.
        options: further options of the schedule, such as `group` of interleaved-1f1b, or `slices` of a sequence in each microbatch.

    >>> import zerobubble as zb
    >>> zb.make("zb-v", 4, 8)
    <Schedule zb-v: 8 stages on 4 ranks (vee), 8 microbatches, 192 passes>
    >>> zb.make("interleaved-1f1b", 4, 8, stages_per_rank=3).num_stages
    12
    """
    recipe = find(name)
    refusal = recipe.refusal(num_ranks, num_microbatches, stages_per_rank)
    if refusal:
        raise InputError("{refusal}", refusal=refusal, remedy=_near_shape(recipe, num_ranks, num_microbatches, stages_per_rank))
    recipe.check_options(options, SCHEDULES.values())
    schedule = recipe.build(num_ranks, num_microbatches, stages_per_rank or recipe.stages_per_rank, **options)
    if not isinstance(schedule, Schedule) or (schedule.num_ranks, schedule.whole_microbatches) != (num_ranks, num_microbatches):
        wanted = f"a Schedule of {num_ranks} ranks and {num_microbatches} microbatches"
        message = "the function of schedule {name!r} must return {wanted}, got {made!r:.80}"
        raise InputError(message, name=name, wanted=wanted, made=schedule)
    return schedule


def _near_shape(recipe: Recipe, num_ranks: int, num_microbatches: int, stages_per_rank: int | None) -> str:
    """Return numbers that a schedule supports, near the refused ones."""
    near = recipe.near_shape(num_ranks, num_microbatches, stages_per_rank) if min(num_ranks, num_microbatches) > 0 else None
    if near is None:
        return ""
    ranks, microbatches, stages = near
    of_rank = f", {counted(stages, 'stage')} per rank" if stages != (stages_per_rank or recipe.stages_per_rank) else ""
    return f"for example, {counted(ranks, 'rank')}, {counted(microbatches, 'microbatch')}{of_rank}"


@takes(name=str)
def find(name: str) -> Recipe:
    """Return the recipe called `name`; raises `InputError` with the nearest known name if there is none."""
    recipe = registry.find(name)
    if recipe is None:
        names = known_schedules()
        hint = f"io.load_plan({name!r}) reads the file of a plan; " if name.endswith(".json") else near(name, names)
        raise InputError("there is no schedule {name!r}: {hint}known are {known}", name=name, hint=hint, known=", ".join(names))
    return recipe


_NAME = instance(str)._replace(remedy=lambda value: "write the name first, as in @schedules.register('early-w')" if callable(value) else "")


@takes(name=_NAME, stages_per_rank=WHOLE, any_stages=bool)
def register(name: str, stages_per_rank: int = 1, any_stages: bool = False, needs: Needs = no_needs) -> Callable[[Builder], Builder]:
    """Decorate a function to register it in this process as the schedule `name`.

    The function is the `build` of a `Recipe`, and `stages_per_rank`, `any_stages` and `needs` are those of the recipe: the default number
    of stages per rank, whether others work, and a function that says why a shape is not supported; by default, every shape is.

    Raises `InputError` if another function already has the name. To offer a schedule to every process, a package declares an entry
    point in the group `zerobubble.schedules`.
    """

    def remember(build: Builder) -> Builder:
        registry.register(Recipe(name, build, stages_per_rank, any_stages, needs))
        return build

    return remember


@takes()
def known_schedules() -> dict[str, Recipe]:
    """Return every recipe by name: published, then registered, then from installed packages that can be loaded."""
    return registry.everything()[0]
