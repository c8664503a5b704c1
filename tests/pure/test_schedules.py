"""The table of published schedules: every one is legal at every shape, and one more is one more line."""

from __future__ import annotations

import pytest

from tests.pure.shapes import EVERY, SHAPES
from zerobubble import SCHEDULES, Costs, InputError, Kind, Schedule, make, schedule_faults, simulate
from zerobubble.schedules import Recipe


@pytest.mark.parametrize(("name", "stages_per_rank"), EVERY)
def test_published_schedules_are_legal_at_every_shape(name: str, stages_per_rank: int) -> None:
    for ranks, microbatches in SHAPES:
        schedule = make(name, ranks, microbatches, stages_per_rank)
        assert schedule_faults(schedule) == (), (ranks, microbatches)
        assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, ranks, microbatches)
        assert schedule.placement.stages_per_rank == stages_per_rank
        assert schedule_faults(schedule.forward_only()) == (), (ranks, microbatches)


@pytest.mark.parametrize("recipe", SCHEDULES.values(), ids=lambda recipe: recipe.name)
def test_a_recipe_tells_what_its_schedules_hold(recipe: Recipe) -> None:
    kinds = {op.kind for _, _, op in make(recipe.name, 3, 5).ops()}
    assert kinds == ({Kind.F, Kind.B, Kind.W} if recipe.splits else {Kind.F, Kind.BW})
    assert recipe.summary.endswith(".")
    assert recipe.torch_csv == (len(make(recipe.name, 3, 5).placement.routes) == 1)


def test_a_schedule_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards_last(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
        """Mine."""
        return make("gpipe", ranks, microbatches)

    monkeypatch.setitem(SCHEDULES, "mine", Recipe("mine", backwards_last))
    assert simulate(make("mine", 2, 3), Costs.uniform(2)).makespan == 12_000_000
    assert (SCHEDULES["mine"].summary, SCHEDULES["mine"].splits) == ("Mine.", False)
    with pytest.raises(InputError, match="mine"):
        make("no such", 2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zbv", 2, 4), "there is no schedule 'zbv': did you mean 'zb-v'? known are gpipe, 1f1b, "),
        (("xyz", 2, 4), "there is no schedule 'xyz': known are gpipe, 1f1b, "),
        (("1f1b", 0, 4), "1f1b needs at least one of ranks, got 0"),
        (("1f1b", 2, 0), "1f1b needs at least one of microbatches, got 0"),
        (("interleaved-1f1b", 2, 4, 0), "interleaved-1f1b needs at least one of stages per rank, got 0"),
        (("zb-v", 2, 4, 3), "zb-v holds 2 stages per rank by construction, got 3"),
    ],
)
def test_wrong_requests_are_told(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make(*arguments)
    assert str(caught.value).startswith(message)
