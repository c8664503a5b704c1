"""PyTorch's own reader and validator accept every schedule we export."""

import pytest

from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.schedules import SCHEDULES, make

SHAPES = [(1, 1), (2, 3), (4, 8), (8, 5)]


def test_pytorch_accepts_our_csv() -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs PyTorch")
    for name in SCHEDULES:
        for ranks, microbatches in SHAPES:
            schedule = make(name, ranks, microbatches)
            lines = to_torch_csv(schedule).splitlines()
            actions = {rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(lines)}
            homes = torch_schedules._validate_schedule(actions, ranks, schedule.num_stages, microbatches)
            assert tuple(homes[stage] for stage in range(schedule.num_stages)) == schedule.placement.routes[0], name
