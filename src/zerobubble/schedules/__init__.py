"""The published schedules, by name. Adding one is a file and a line in `SCHEDULES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Schedule
from zerobubble.schedules.gpipe import gpipe
from zerobubble.schedules.interleaved import interleaved_1f1b
from zerobubble.schedules.one_f_one_b import eager_1f1b, one_f_one_b
from zerobubble.schedules.zb_h import zb_h1, zb_h2
from zerobubble.schedules.zb_v import zb_v


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one schedule: `build(ranks, microbatches, stages_per_rank)`.

    `stages_per_rank` is the usual number, `any_stages` whether others work too. `splits` tells whether it uses B and W passes.
    """

    name: str
    build: Callable[[int, int, int], Schedule]
    stages_per_rank: int = 1
    any_stages: bool = False

    @property
    def summary(self) -> str:
        """The first line of the schedule's docstring."""
        return (self.build.__doc__ or "").strip().splitlines()[0]

    @property
    def splits(self) -> bool:
        """Whether it has separate B and W passes."""
        return any(op.kind is Kind.W for _, _, op in self.build(2, 2, self.stages_per_rank).ops())

    @property
    def torch_csv(self) -> bool:
        """Whether PyTorch's schedule CSV can express it: one route, one pass per step."""
        return len(self.build(2, 2, self.stages_per_rank).placement.routes) == 1


SCHEDULES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("gpipe", gpipe),
        Recipe("1f1b", one_f_one_b),
        Recipe("eager-1f1b", eager_1f1b),
        Recipe("interleaved-1f1b", interleaved_1f1b, stages_per_rank=2, any_stages=True),
        Recipe("zb-h1", zb_h1),
        Recipe("zb-h2", zb_h2),
        Recipe("zb-v", zb_v, stages_per_rank=2),
    )
}


def make(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The published schedule `name` for `ranks` ranks and `microbatches` microbatches.

    Raises `InputError` for an unknown name (with the nearest known one), a count below 1, or a number of stages per rank that
    the schedule does not allow.
    """
    recipe = SCHEDULES.get(name)
    if recipe is None:
        near = get_close_matches(name, SCHEDULES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"there is no schedule {name!r}: {hint}known are {', '.join(SCHEDULES)}")
    stages = recipe.stages_per_rank if stages_per_rank is None else stages_per_rank
    for what, count in (("ranks", ranks), ("microbatches", microbatches), ("stages per rank", stages)):
        if count < 1:
            raise InputError(f"{name} needs at least one of {what}, got {count}")
    if stages != recipe.stages_per_rank and not recipe.any_stages:
        raise InputError(f"{name} holds {recipe.stages_per_rank} stages per rank by construction, got {stages}")
    return recipe.build(ranks, microbatches, stages)
