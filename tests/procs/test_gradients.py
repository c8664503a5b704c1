"""Every published schedule trains with the numbers of one device, in real processes."""

from __future__ import annotations

from typing import Any

import pytest

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.pure.shapes import TRAINING
from tests.thinned import every

SHAPES = [(1, 4), (2, 2), (2, 5), (2, 8), (3, 7), (4, 2), (4, 4), (4, 8), (4, 16)]
CASES = [(name, p, m) for name in TRAINING for p, m in SHAPES if zb.schedules.SCHEDULES[name].allows(p, m)]


def compare_with_one_device(group: Any, name: str, microbatches: int, steps: int) -> dict[str, float]:
    return worst_errors(group, zb.make(name, group.size(), microbatches), steps)


def worst_errors(group: Any, schedule: zb.Schedule, steps: int, **options: Any) -> dict[str, float]:
    """The largest relative error of loss and gradients of this rank after each of a few steps, gradients kept between them."""
    worst = {"loss": 0.0, "gradient": 0.0}
    microbatches = schedule.num_microbatches
    with zb.Pipeline(build, schedule, microbatches, loss_fn, group=group, **options) as pipe:
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for step in range(steps):
            inputs, targets = batch(microbatches, seed=step)
            loss, expected = pipe.step(inputs, targets), one_device(stages, microbatches, inputs, targets)
            worst["loss"] = max(worst["loss"], abs(loss - expected).item() / expected.item())
            for index, module in pipe.modules.items():
                pairs = zip(module.parameters(), stages[index].parameters(), strict=True)
                for mine, theirs in pairs:
                    assert mine.grad is not None, f"stage {index} has a parameter without gradient"
                    assert theirs.grad is not None
                    worst["gradient"] = max(worst["gradient"], ((mine.grad - theirs.grad).norm() / theirs.grad.norm()).item())
    return worst


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "microbatches"), every(5, CASES))
def test_gradients_equal_one_device(world: Ranks, name: str, ranks: int, microbatches: int) -> None:
    for worst in world.run(compare_with_one_device, name, microbatches, 2, ranks=ranks):
        assert worst["loss"] <= 1e-12
        assert worst["gradient"] <= 1e-12
