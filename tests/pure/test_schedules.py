"""The table of published schedules: every one is legal at every shape it allows, says what it is, and takes its options.

A new schedule is one file and one line of the table.
"""

from __future__ import annotations

import re

import pytest

from tests.pure.shapes import EVERY, grid, stage_counts
from tests.refusals import Stated, raises, states
from tests.thinned import every_and_all
from zerobubble import Costs, InputError, Kind, Placement, Schedule, ScheduleError, make, picture, schedule_faults, simulate
from zerobubble.schedules import SCHEDULES, Recipe

RECIPES = pytest.mark.parametrize("recipe", SCHEDULES.values(), ids=lambda recipe: recipe.name)


@every_and_all(11)
@pytest.mark.parametrize(("name", "stages_per_rank"), EVERY)
def test_published_schedules_are_legal_at_every_shape(name: str, stages_per_rank: int, nth: int) -> None:
    for ranks, microbatches in grid(name, stages_per_rank)[::nth]:
        schedule = make(name, ranks, microbatches, stages_per_rank)
        assert schedule_faults(schedule) == (), (ranks, microbatches)
        assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, ranks, microbatches)
        assert schedule.placement.stages_per_rank == stages_per_rank
        assert schedule_faults(schedule.forward_only()) == (), (ranks, microbatches)


@RECIPES
def test_every_schedule_is_tried_at_many_shapes(recipe: Recipe) -> None:
    """At 200 and more, or at all there are up to 8 ranks and 32 microbatches."""
    shapes = [(p, m) for p in range(1, 9) for m in range(1, 33)]
    there_are = sum(recipe.allows(p, m, v) for p, m in shapes for v in stage_counts(recipe.name))
    tried = sum(len(grid(recipe.name, v)) for v in stage_counts(recipe.name))
    assert tried >= min(200, there_are) >= 40


@RECIPES
def test_a_shape_is_allowed_exactly_where_it_is_made(recipe: Recipe) -> None:
    for ranks, microbatches, stages in [(p, m, v) for p in range(6) for m in range(13) for v in range(4)]:
        if recipe.allows(ranks, microbatches, stages):
            assert make(recipe.name, ranks, microbatches, stages).num_microbatches == microbatches
        else:
            with pytest.raises(InputError) as caught:
                make(recipe.name, ranks, microbatches, stages)
            assert caught.value.fields["refusal"] == recipe.refusal(ranks, microbatches, stages)
            states(caught.value, recipe.name, "needs", "got")


@RECIPES
def test_a_recipe_shows_what_its_schedules_hold(recipe: Recipe) -> None:
    ranks, microbatches = grid(recipe.name, recipe.stages_per_rank)[-1]
    schedule = make(recipe.name, ranks, microbatches)
    kinds = {op.kind for _, _, op in schedule.ops()}
    assert (recipe.splits, recipe.trains) == (Kind.W in kinds, kinds != {Kind.F})
    assert recipe.torch_csv == (len(schedule.placement.routes) == 1)


@RECIPES
def test_a_docstring_has_every_part(recipe: Recipe) -> None:
    """First line, rule, bullets, what it is good for, source, picture: in this order."""
    assert recipe.summary.endswith(".")
    assert len(recipe.summary) <= 130
    assert any(text.startswith("bubble (") for text in recipe.formulas)
    assert any(text.startswith("peak memory") for text in recipe.formulas)
    assert recipe.good_for.endswith(".")
    assert re.search(r"arXiv \d{4}\.\d{5}|repository", recipe.source)
    parts = (
        recipe.summary,
        "\n\n    - bubble (",
        "\n    - peak memory",
        "\n\n    Good for: ",
        "\n\n    Source: ",
        "\n    >>> print(picture(",
    )
    text = recipe.build.__doc__ or ""
    places = [text.find(part) for part in parts]
    assert min(places) >= 0, parts[places.index(-1)]
    assert places == sorted(places)
    rule = text[: places[1]].removeprefix(recipe.summary).strip()
    assert rule
    stages = (1, 2, 3, 4) if recipe.any_stages else (recipe.stages_per_rank,)
    everywhere = all(recipe.allows(p, m, v) for p in (1, 2, 3) for m in (1, 2, 3) for v in stages)
    assert (recipe.condition == "") == everywhere


HEAD = "zerobubble schedule 1\nmicrobatches 2\n"


def test_the_picture_of_a_schedule() -> None:
    assert picture(make("1f1b", 2, 3)).splitlines() == ["F0 F1 .  .  BW0   F2 BW1   .  BW2", ".  F0 BW0   F1 BW1   F2 BW2   .  ."]
    assert picture(make("zb-v", 1, 1)) == "F0 f0 b0 w0 B0 W0"
    assert picture(make("gpipe", 1, 11)).startswith("F0  F1  F2 ")
    both = Schedule.from_text(f"{HEAD}routes 0 1\nplacement x: 0 1 | 1 0\nrank 0: 0F0 1F1\nrank 1: 0F1 1F0\n")
    assert picture(both).splitlines() == ["F0 f1", "f1 F0"]
    together = Schedule.from_text(f"{HEAD}placement x: 0\nrank 0: 0F0 0F1&0BW0 0BW1\n")
    assert picture(together) == "F0 F1&BW0   BW1"


def test_a_schedule_that_cannot_run_has_no_picture() -> None:
    with raises(ScheduleError, "0BW1", "position 1", "0F1"):
        picture(Schedule.from_text(f"{HEAD}placement x: 0\nrank 0: 0F0 0BW1 0F1 0BW0\n"))


@RECIPES
def test_a_picture_shows_every_unit_of_time(recipe: Recipe) -> None:
    """Dots are idle units and the rest is work, up to the makespan."""
    schedule = recipe.sample
    timeline = simulate(schedule, Costs.uniform(schedule.num_stages))
    for figures, line in zip(timeline.ranks, picture(schedule).splitlines(), strict=True):
        assert line.count(".") * 1_000_000 == timeline.makespan - figures.work
        assert len(re.findall(r"[A-Za-z]+\d", line)) == len(schedule.rows[figures.rank])


def mine(ranks: int, microbatches: int, stages_per_rank: int = 1, late: float = 0.5, *, tag: str = "") -> Schedule:
    """Mine,
    all of it.

    A rule.

    - bubble (makespan): none
      to speak of
    - peak memory: some

    Good for: tests
    of docstrings.

    Source: here.
    """
    return make("gpipe", ranks, microbatches)


def test_a_recipe_reads_its_docstring() -> None:
    recipe = Recipe("mine", mine)
    found = (recipe.summary, recipe.rule, recipe.good_for, recipe.source)
    assert found == ("Mine, all of it.", "A rule.", "tests of docstrings.", "here.")
    assert recipe.formulas == ("bubble (makespan): none to speak of", "peak memory: some")
    bare = Recipe("bare", lambda ranks, microbatches, stages_per_rank: make("gpipe", ranks, microbatches))
    assert (bare.summary, bare.rule, bare.formulas, bare.good_for, bare.source, bare.options) == ("", "", (), "", "", {})


def test_options_are_checked_by_name_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "mine", Recipe("mine", mine))
    assert SCHEDULES["mine"].options == {"late": 0.5, "tag": ""}
    assert make("mine", 2, 3, late=1, tag="x").name == "gpipe"
    wrong = {
        ("mine", "lte", "late", "tag"): {"lte": 1},
        ("mine", "late", "soon"): {"late": "soon"},
        ("mine", "tag", 3): {"tag": 3},
    }
    for stated, options in wrong.items():
        with raises(InputError, *stated):
            make("mine", 2, 3, **options)


def test_an_option_of_any_type_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a type cannot be asked, the function is the judge."""

    def build(ranks: int, microbatches: int, stages_per_rank: int = 1, a: tuple[int, ...] = (), b: Unknown = 1, c=2) -> Schedule:  # type: ignore[no-untyped-def] # noqa: F821
        assert (a, b, c) == ("x", "y", "z")
        return make("gpipe", ranks, microbatches)

    monkeypatch.setitem(SCHEDULES, "mine", Recipe("mine", build))
    assert make("mine", 2, 3, a="x", b="y", c="z").name == "gpipe"


def test_a_recipe_without_a_small_shape_says_so() -> None:
    never = Recipe("never", mine, needs=lambda ranks, microbatches, stages_per_rank: "needs luck")
    with raises(InputError, 32, "ranks"):
        assert never.splits
    large = Recipe("large", mine, needs=lambda ranks, microbatches, stages_per_rank: "needs 5 ranks" if ranks < 5 else "")
    assert large.sample.num_ranks == 5


def test_a_group_is_an_option_of_interleaved() -> None:
    rank = make("interleaved-1f1b", 2, 4, group=4).rows[1]
    assert [str(op) for op in rank[:6]] == ["1F0", "1F1", "1F2", "1F3", "3F0", "3BW0"]
    assert SCHEDULES["interleaved-1f1b"].options == {"group": None, "slices": 1}


@pytest.mark.parametrize(
    ("arguments", "options", "stated"),
    [
        (("zbv", 2, 4), {}, ("zbv", "zb-v", "1f1b")),
        (("xyz", 2, 4), {}, ("xyz", "1f1b")),
        (("1f1b", 0, 4), {}, ("1f1b", "1 rank", 0)),
        (("1f1b", 2, 0), {}, ("1f1b", "1 microbatch", 0)),
        (("interleaved-1f1b", 2, 4, 0), {}, ("interleaved-1f1b", 1, 0)),
        (("zb-v", 2, 4, 3), {}, ("zb-v", 2, 3)),
        (("1f1b", 2, 4), {"group": 2}, ("1f1b", "group")),
        (("interleaved-1f1b", 2, 4), {"grup": 2}, ("interleaved-1f1b", "grup", "group")),
        (("interleaved-1f1b", 2, 4), {"group": "2"}, ("interleaved-1f1b", "option", "group", "2")),
        (("interleaved-1f1b", 4, 8), {"group": 2}, ("interleaved-1f1b", 4, 3, 2)),
    ],
)
def test_wrong_requests_are_refused(arguments: tuple[object, ...], options: dict[str, object], stated: Stated) -> None:
    with raises(InputError, *stated):
        make(*arguments, **options)


def test_what_a_function_gives_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
        return Schedule("other", Placement.linear(1), 1, ((),))

    monkeypatch.setitem(SCHEDULES, "other", Recipe("other", other))
    with raises(InputError, "other", "Schedule", 2, 3):
        make("other", 2, 3)
    with raises(InputError, "two", "stages_per_rank"):
        Recipe("two", lambda ranks, microbatches: make("gpipe", ranks, microbatches))
