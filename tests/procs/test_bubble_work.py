"""Work in bubbles runs only while the schedule is idle, does not change training, and is checked against the available time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import Stated, raises
from zerobubble.runtime.measure.trace import Records

MICROBATCHES = 8


def with_dropout(stage: int, num_stages: int) -> nn.Module:
    return nn.Sequential(build(stage, num_stages), nn.Dropout(0.1))


def costs_of(schedule: zb.Schedule) -> zb.Costs:
    """Times in ms, so long that every window suffices, even on a busy machine."""
    return zb.Costs.uniform(schedule.num_stages, times=(1e6, 1e6, 7e5), comm=1e5)


def trained(group: Any, name: str, works: bool) -> tuple[list[float], list[list[tuple[int, int]]]]:
    """All weights of this rank after two steps; per step, where work was called and the free time."""
    schedule = zb.make(name, group.size(), MICROBATCHES)
    called: list[list[tuple[int, int]]] = []

    def work(bubble: zb.hooks.Bubble) -> None:
        assert bubble.seconds > 0
        assert bubble.left() <= bubble.seconds, "it may be over already: windows of real steps are short here"
        called[-1].append((bubble.step, bubble.free))
        nn.functional.dropout(torch.ones(100), 0.5).sum()

    hooks = [zb.hooks.BubbleWork(work, costs_of(schedule))] if works else []
    torch.manual_seed(5)
    with zb.Pipeline(with_dropout, schedule, MICROBATCHES, loss_fn, group=group, hooks=hooks) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            called.append([])
            pipe.step(*batch(MICROBATCHES))
            optimizer.step()
            optimizer.zero_grad()
        pipe.eval_step(*batch(MICROBATCHES))
        return [number for parameter in pipe.parameters() for number in parameter.flatten().tolist()], called


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_work_is_called_in_the_windows_of_the_schedule_and_leaves_no_trace(world: Ranks, name: str) -> None:
    plain = world.run(trained, name, False, ranks=4)
    filled = world.run(trained, name, True, ranks=4)
    schedule = zb.make(name, 4, MICROBATCHES)
    found = zb.explain.windows(schedule, costs_of(schedule))
    for rank, ((before, _), (after, called)) in enumerate(zip(plain, filled, strict=True)):
        assert after == before, "weights equal to the bit, with dropout"
        assert called[0] == [(window.step, window.free) for window in found[rank]]
        assert set(called[1]) <= set(called[0]), "where idle time was seen to be short, nothing is offered"


def failing(group: Any) -> str:
    def work(bubble: zb.hooks.Bubble) -> None:
        raise ValueError("boom")

    schedule = zb.make("1f1b", group.size(), MICROBATCHES)
    hooks = [zb.hooks.BubbleWork(work, costs_of(schedule))] if group.rank() == 1 else []
    pipe = zb.Pipeline(build, schedule, MICROBATCHES, loss_fn, group=group, hooks=hooks)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(MICROBATCHES))
    return str(caught.value)


def test_work_that_fails_ends_the_step_on_every_rank(world: Ranks) -> None:
    for text in world.run(failing, ranks=2):
        assert "rank 1 failed" in text
        assert "ValueError: boom" in text
        assert "in before_step_of_row of BubbleWork" in text


class Attached:
    """The part of a pipeline that the hook uses."""

    rank, device = 0, torch.device("cpu")
    schedule = zb.make("1f1b", 2, 2)


def test_a_window_is_held_to_the_idle_time_that_steps_had() -> None:
    """The row is F F B B of a second each, with a window of 2 s before its third pass and of 1 s before its fourth."""
    offered: list[tuple[int, float]] = []
    hook = zb.hooks.BubbleWork(
        lambda bubble: offered.append((bubble.step, bubble.seconds)), zb.Costs.uniform(2, times=(1000, 1000, 1000)), share=0.5, least=0.1
    )
    hook.on_attach(Attached())  # type: ignore[arg-type]

    def step(third: float, fourth: float) -> list[tuple[int, float]]:
        """The windows offered in a step with these idle seconds before the passes."""
        offered.clear()
        found = zb.hooks.TrainingStep(0, Attached.schedule, {}, began=0.0)
        hook.on_step_begin(found)
        for number in range(4):
            hook.before_step_of_row(number)
        begins = [0.0, 1.0, 2 + third, 3 + third + fourth]
        spans = tuple((op, int(t * 1e9), int((t + 1) * 1e9)) for op, t in zip(Attached.schedule.rows[0], begins, strict=True))
        found.records = lambda: Records(spans)
        hook.on_step_end(found)
        return list(offered)

    assert step(3, 0.5) == [(2, 1.0), (3, 0.5)], "half of what the schedule says"
    assert step(1, 0.1) == [(2, 1.0), (3, 0.25)], "or half of what the last step had"
    assert step(3, 0.5) == [(2, 0.5)], "nothing where that is less than a tenth of a second"
    for _ in range(4):
        step(3, 0.5)
    assert step(3, 0.5) == [(2, 1.0), (3, 0.25)], "the shortest of four steps counts"
    assert (hook.overruns, hook.offered > hook.used) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "stated"),
    [
        ({"work": 3}, ("work", 3)),
        ({"share": 1.5}, ("share", 1.5)),
        ({"least": -1}, ("least", -1)),
        ({"costs": zb.Costs.uniform(3)}, ("stages", "stages")),
        ({"limits": zb.Limits((5, 5))}, ("rank 0", 2000000)),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: dict[str, Any], stated: Stated) -> None:
    given = {"work": print, "costs": zb.Costs.uniform(2), **arguments}
    with raises(zb.InputError, *stated):
        zb.hooks.BubbleWork(**given).on_attach(Attached())  # type: ignore[arg-type]
