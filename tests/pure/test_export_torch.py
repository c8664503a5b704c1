"""PyTorch's own reader, validator and dry run accept every schedule we export, and we read what PyTorch writes."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from tests.pure.shapes import IN_TORCH_CSV, TRAINING
from zerobubble.export.torch_comms import to_torch_comms_csv
from zerobubble.export.torch_csv import from_torch_csv, to_torch_csv
from zerobubble.ir import Schedule
from zerobubble.schedules import SCHEDULES, make

torch = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs PyTorch")
VERSION = version("torch")
pytestmark = pytest.mark.skipif(VERSION.startswith("2.6"), reason="PyTorch 2.6 has another validator and no overlapped steps")

SHAPES = [(1, 2), (2, 1), (2, 4), (3, 5), (4, 8), (8, 5)]
NAMES = [name for name in IN_TORCH_CSV if name in TRAINING]
CASES = [(name, p, m) for name in NAMES for p, m in SHAPES if SCHEDULES[name].allows(p, m)]
FORMS = {
    "compute_only": to_torch_csv,
    "comms": lambda schedule: to_torch_comms_csv(schedule, VERSION),
    "one unsharded": lambda schedule: to_torch_comms_csv(schedule, VERSION, 1),
    "three unsharded": lambda schedule: to_torch_comms_csv(schedule, VERSION, 3),
}

Rows = dict[int, list[Any]]


def rows(csv: str) -> Rows:
    """The rows as PyTorch reads them, and not less of any cell."""
    read = {rank: [torch._Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(csv.splitlines())}
    assert written(read) == csv
    return read


def written(actions: Rows) -> str:
    return "".join(",".join(map(str, actions[rank])) + "\n" for rank in sorted(actions))


def validated(actions: Rows, schedule: Schedule) -> Any:
    """The rank of a stage, as PyTorch finds it in a CSV that it accepts."""
    homes = torch._validate_schedule(actions, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
    assert tuple(homes[stage] for stage in range(schedule.num_stages)) == schedule.placement.routes[0]
    return homes.__getitem__


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_pytorch_accepts_our_csv(name: str, form: str) -> None:
    for ranks, microbatches in [(p, m) for case, p, m in CASES if case == name]:
        schedule = make(name, ranks, microbatches)
        validated(rows(FORMS[form](schedule)), schedule)


@pytest.mark.parametrize("name", [name for name in NAMES if not SCHEDULES[name].sample.overlaps])
def test_pytorchs_dry_run_finds_no_stop_even_where_each_receive_waits_for_its_send(name: str) -> None:
    for ranks, microbatches in [(p, m) for case, p, m in CASES if case == name]:
        schedule = make(name, ranks, microbatches)
        actions = rows(to_torch_comms_csv(schedule, VERSION))
        passes = {rank: [action for action in row if "REDUCE_GRAD" not in str(action)] for rank, row in actions.items()}
        torch._simulate_comms_compute(passes, validated(actions, schedule), schedule.num_stages)


@pytest.mark.parametrize("name", NAMES)
def test_we_read_what_pytorch_makes_of_our_passes(name: str) -> None:
    """The same messages, gathers and reductions as ours, in PyTorch's own order."""
    for ranks, microbatches in [(p, m) for case, p, m in CASES if case == name]:
        schedule = make(name, ranks, microbatches)
        actions = rows(to_torch_csv(schedule))
        home = validated(actions, schedule)
        full = {r: torch._add_reduce_grad(torch._add_unshard_reshard(row, 3), microbatches) for r, row in actions.items()}
        lowered = torch._add_send_recv(full, home, schedule.num_stages)
        theirs = written(torch._add_wait_send(lowered) if hasattr(torch, "_add_wait_send") else lowered)
        assert from_torch_csv(theirs, name).steps == schedule.steps
        ours = to_torch_comms_csv(schedule, VERSION, 3)
        for line, other in zip(ours.splitlines(), theirs.splitlines(), strict=True):
            assert sorted(line.split(",")) == sorted(other.split(","))


def test_pytorch_runs_no_schedule_without_backward() -> None:
    schedule = make(next(name for name in IN_TORCH_CSV if name not in TRAINING), 2, 3)
    with pytest.raises(AssertionError, match="Invalid backward microbatches for stage 0: expected 3 total backwards"):
        validated(rows(to_torch_csv(schedule)), schedule)


def test_pytorchs_dry_run_knows_no_overlapped_step() -> None:
    schedule = make("dualpipe-v", 2, 4)
    actions = rows(to_torch_comms_csv(schedule, VERSION))
    with pytest.raises(KeyError, match="-1"):
        torch._simulate_comms_compute(actions, validated(actions, schedule), schedule.num_stages)
