"""Ranks that go on after losses keep their numbers in errors, warnings, timelines and forecasts."""

from __future__ import annotations

import logging
from typing import NamedTuple

import pytest
import torch.distributed as dist

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_survival import M, kill, share
from tests.refusals import states

pytestmark = pytest.mark.ranks_wait


class Numbers(NamedTuple):
    """What a survivor of ranks 2 and 1 shows after each loss, the rank of the last error, and all that was logged."""

    timelines: list[tuple[int, ...]]
    figures: list[list[int]]
    forecasts: list[list[int]]
    rank: int
    representation: str
    error: str
    error_rank: int | None
    logged: list[str]


def numbers_after_two_losses(group: dist.ProcessGroup, transport: str) -> Numbers:
    """Ranks 2 and 1 are killed, one after another, and then rank 3 raises."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, mesh=mesh, survive=True, transport=transport, timeout=60.0)
    batch_of_replica = share(mesh.get_local_rank("dp"), 2, 0)
    logged, timelines, figures, forecasts = [], [], [], []
    logging.getLogger("zerobubble").addFilter(lambda record: bool(logged.append(record.getMessage())) or True)
    for lost in (None, 2, 1):
        if dist.get_rank() == lost:
            kill()
        pipe.step(*batch_of_replica)
        run = pipe.timeline()
        timelines.append(run.numbers)
        figures.append([figures_of_rank.rank for figures_of_rank in run.ranks])
        forecasts.append([forecast.rank for forecast in pipe.memory_forecast(pipe.profile(*batch_of_replica, steps=1))])
    if dist.get_rank() == 3:
        batch_of_replica = (None, None)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch_of_replica)
    return Numbers(timelines, figures, forecasts, pipe.rank, repr(pipe), str(caught.value), caught.value.rank, logged)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_ranks_keep_their_numbers_after_losses(transport: str) -> None:
    world = Ranks(4)
    try:
        outcomes = world.outcomes(numbers_after_two_losses, transport, ranks=4)
    finally:
        world.kill()
    assert [state for state, _ in outcomes] == ["ok", "gone", "gone", "ok"], outcomes
    for rank, seen in ((0, outcomes[0][1]), (3, outcomes[3][1])):
        assert seen.timelines == [(), (0, 1, 3), (0, 3)]
        assert seen.figures == seen.forecasts == [[0, 1], [0, 1, 3], [0, 3]]
        assert (seen.rank, seen.error_rank) == (rank % 2, 3)
        assert "without ranks 1 and 2" in seen.representation
        states(seen.error, "rank 3")
    states(" ".join(outcomes[0][1].logged), "rank 2", "rank 1")
