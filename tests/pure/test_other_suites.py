"""Test cases of other projects: PyTorch's orders and Megatron's layouts and groups are read, are legal and can be lowered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.thinned import every_of
from zerobubble.export.megatron import from_megatron_layout, to_megatron_layout
from zerobubble.export.torch_comms import to_torch_comms_csv
from zerobubble.export.torch_csv import from_torch_csv, to_torch_csv
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.lowering import lower
from zerobubble.schedules import make
from zerobubble.verify import checked
from zerobubble.verify_program import program_faults


def reordered(placement: Placement, microbatches: int, *, splits: bool) -> Schedule:
    """All forwards stage by stage, then all backwards with the last microbatch first; with `splits`, the weight gradients at the end."""
    rows = []
    for rank in range(placement.num_ranks):
        own = [stage for _, stage in placement.stages(rank)]
        backward = [(stage, m) for stage in reversed(own) for m in reversed(range(microbatches))]
        row = [Op(Kind.F, stage, m) for stage in own for m in range(microbatches)]
        row += [Op(Kind.B if splits else Kind.BW, *place) for place in backward]
        rows.append(tuple(row + [Op(Kind.W, *place) for place in sorted(backward) if splits]))
    return Schedule("reordered", placement, microbatches, tuple(rows))


FIVE_ON_TWO = Placement.custom((0, 1, 0, 1, 0))
ORDERS = [reordered(placement, 4, splits=splits) for placement in (FIVE_ON_TWO, Placement.vee(2)) for splits in (False, True)]


@pytest.mark.parametrize("schedule", ORDERS, ids=["five", "five, split", "V", "V, split"])
def test_orders_of_pytorch_with_uneven_stages_and_reordered_backwards(schedule: Schedule) -> None:
    """PyTorch: schedules of its tests with 5 stages on 2 ranks, a V, and backwards in another order than forwards."""
    checked(schedule)
    assert program_faults(lower(schedule)) == ()
    read = from_torch_csv(to_torch_csv(schedule))
    assert (read.rows, read.placement.routes) == (schedule.rows, schedule.placement.routes)
    torch = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs PyTorch")
    version = pytest.importorskip("torch").__version__
    if version.startswith("2.6"):
        pytest.skip("PyTorch 2.6 has another validator")
    csv = to_torch_comms_csv(schedule, version)
    actions = {rank: [torch._Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(csv.splitlines())}
    homes = torch._validate_schedule(actions, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
    torch._simulate_comms_compute(
        {rank: [action for action in row if "REDUCE_GRAD" not in str(action)] for rank, row in actions.items()},
        homes.__getitem__,
        schedule.num_stages,
    )


CLASSES = {
    "ScheduleInterleaved1F1B": lambda rank, ranks: (rank, rank + ranks),
    "ScheduleLoopedBFS": lambda rank, ranks: (rank, rank + ranks),
    "ScheduleInterleavedZeroBubble": lambda rank, ranks: (rank, rank + ranks),
    "ScheduleZBVZeroBubble": lambda rank, ranks: (rank, 2 * ranks - 1 - rank),
    "ScheduleDualPipeV": lambda rank, ranks: (rank, 2 * ranks - 1 - rank),
}
"""The schedules of PyTorch's registry with several stages per rank, and the stages of a rank."""


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_orders_that_pytorch_makes_are_read_and_legal(name: str, ranks: int, microbatches: int) -> None:
    """PyTorch: the CSV files of its tests are what these classes make."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs PyTorch")
    if not hasattr(torch, name):
        pytest.skip(f"this PyTorch has no {name}")

    def stage(index: int) -> Any:
        ranks_of_it = {"group_size": ranks, "group_rank": 0, "group": None}
        return SimpleNamespace(stage_index=index, num_stages=2 * ranks, submod=None, has_backward=False, **ranks_of_it)

    made = getattr(torch, name)([stage(index) for index in CLASSES[name](0, ranks)], microbatches, loss_fn=len)
    rows = (",".join("" if cell is None else str(cell) for cell in made.pipeline_order[rank]) for rank in range(ranks))
    schedule = from_torch_csv("\n".join(rows) + "\n")
    checked(schedule)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (ranks, 2 * ranks, microbatches)
    assert program_faults(lower(schedule)) == ()


GROUPS = [(2, 2), (2, 4), (4, 4), (4, 5), (8, 9), (8, 11)]
"""Ranks and the size of groups of microbatches, of Megatron's tests of interleaved schedules."""


@pytest.mark.parametrize(("shape", "microbatches", "loops"), every_of(5, GROUPS, (8, 32), (2, 4, 8)))
def test_interleaved_orders_of_megatrons_groups(shape: tuple[int, int], microbatches: int, loops: int) -> None:
    """Megatron: in each group of microbatches a rank runs its first stage for all of them, then its second, and backward mirrors that."""
    ranks, group = shape
    schedule = make("interleaved-1f1b", ranks, microbatches, loops, group=group)
    groups = [range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)]
    for rank, row in enumerate(schedule.rows):
        own = range(rank, ranks * loops, ranks)
        forward = [(stage, m) for part in groups for stage in own for m in part]
        backward = [(stage, m) for part in groups for stage in reversed(own) for m in part]
        assert [(op.stage, op.microbatch) for op in row if op.kind is Kind.F] == forward
        assert [(op.stage, op.microbatch) for op in row if op.kind is Kind.BW] == backward
        if group <= microbatches:
            warmup = min(2 * (ranks - rank - 1) + (loops - 1) * group, len(forward))
            assert [op.kind for op in row].index(Kind.BW) == min(warmup + 1, len(forward))
    assert program_faults(lower(schedule)) == ()


LAYOUTS = [
    ("E||t|L", 2, ("E", "", "t", "L")),
    ("E|t*3|(t|)*4tm|L", 4, ("E", "ttt", "t", "t", "t", "t", "tm", "L")),
    ("E|t*3|(t|)*4m|L", 8, ("E", "ttt", "t", "t", "t", "t", "m", "L")),
    ("Et|(tt|)*2t|mL", 5, ("Et", "tt", "tt", "t", "mL")),
]
"""Layouts with an empty stage, and with a layer that predicts further tokens: with other layers, alone, and with the loss."""


@pytest.mark.parametrize(("text", "ranks", "stages"), LAYOUTS)
def test_layouts_of_megatron(text: str, ranks: int, stages: tuple[str, ...]) -> None:
    """Megatron: layouts of its tests, with an empty stage and with layers that predict further tokens."""
    placement, found = from_megatron_layout(text, ranks)
    assert found == stages
    assert placement.num_stages == len(stages)
    assert from_megatron_layout(to_megatron_layout(found), ranks) == (placement, found)
