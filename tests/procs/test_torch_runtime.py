"""PyTorch's own pipeline runtime plays every schedule we export, in every form, with the gradients of one device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.procs.versions import VERSION, needs_torchs_runtime
from tests.pure.shapes import IN_TORCH_CSV, TRAINING
from tests.pure.test_other_suites import ORDERS
from tests.refusals import raises
from tests.thinned import every, every_of
from zerobubble.errors import InputError, ParseError
from zerobubble.export.torch_comms import MOST_UNSHARDED, to_torch_comms_csv
from zerobubble.export.torch_csv import from_torch_csv, to_torch_csv
from zerobubble.integrations.pytorch import pipelining_schedule
from zerobubble.schedules import SCHEDULES

pytestmark = needs_torchs_runtime

CASES = [(name, p, m) for name in IN_TORCH_CSV if name in TRAINING for p, m in ((2, 3), (2, 4), (4, 8)) if SCHEDULES[name].allows(p, m)]


def play(group: Any, csv: str | None, form: str, shape: zb.Schedule, module: Callable[..., nn.Module] = build) -> float:
    """The largest relative error of a gradient on this rank after one step of PyTorch's runtime."""
    modules = {s: module(s, shape.num_stages) for _, s in shape.placement.stages(group.rank())}
    inputs, targets = batch(shape.num_microbatches)
    step(group, csv, form, shape, modules, inputs, targets)
    expected = [module(s, shape.num_stages) for s in range(shape.num_stages)]
    one_device(expected, shape.num_microbatches, inputs, targets)
    gradients = [(mine.grad, theirs.grad) for s in modules for mine, theirs in paired(modules[s], expected[s])]
    return max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in gradients)


def step(group: Any, csv: str | None, form: str, shape: zb.Schedule, modules: dict[int, nn.Module], inputs: Any, targets: Any) -> None:
    """One step of PyTorch's runtime with the stages of this rank, in the order of `csv`, or of `shape` in a schedule object of ours."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    last = shape.num_stages - 1
    stages = [PipelineStage(module, s, shape.num_stages, torch.device("cpu"), group=group) for s, module in modules.items()]
    if csv is None:
        runtime = pipelining_schedule(shape, stages, loss_fn)
    else:
        runtime = _PipelineScheduleRuntime(stages, shape.num_microbatches, loss_fn)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "schedule.csv")
            file.write_text(csv)
            runtime._load_csv(str(file), form)
    runtime.step(*([inputs] if 0 in modules else []), target=targets if last in modules else None)


def paired(module: nn.Module, oracle: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(module.parameters(), oracle.parameters(), strict=True))


@pytest.mark.feature("losses of one device")
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "microbatches"), every(3, CASES))
def test_gradients_are_those_of_one_device(world: Ranks, name: str, ranks: int, microbatches: int) -> None:
    schedule = zb.make(name, ranks, microbatches)
    texts = {"compute_only": to_torch_csv(schedule), "compute_comms": to_torch_comms_csv(schedule, torch.__version__), "object": None}
    for form, csv in texts.items():
        assert max(world.run(play, csv, form, schedule, ranks=ranks)) <= 1e-12, form


@pytest.mark.parametrize("schedule", every(4, ORDERS))
def test_uneven_stages_and_reordered_backwards_train(world: Ranks, schedule: zb.Schedule) -> None:
    assert max(world.run(play, None, "object", schedule, ranks=2)) <= 1e-12


def given_stages(group: Any, stages: list[int], num_stages: int) -> None:
    from torch.distributed.pipelining import PipelineStage

    made = [PipelineStage(build(s, num_stages), s, num_stages, torch.device("cpu"), group=group) for s in stages]
    pipelining_schedule(zb.make("zb-v", 2, 4), made, loss_fn)


@pytest.mark.refuses("stages of another rank")
def test_stages_of_another_rank_are_refused(world: Ranks) -> None:
    for stages, num_stages, faults in (([0, 1], 4, 1), ([0, 3], 8, 1), ([0, 1], 8, 2)):
        (state, error), _ = world.outcomes(given_stages, stages, num_stages, ranks=2)
        assert state == "error"
        assert error.splitlines()[-1].count(";") == faults - 1


def play_sharded(group: Any, csv: str, shape: zb.Schedule) -> float:
    """The same on two pipelines of two ranks, with the weights of every stage sharded over both and a batch for each."""
    from torch.distributed.fsdp import fully_shard

    from tests.procs.meshes import init_device_mesh

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pipe", "data"))
    pipe, data = mesh["pipe"].get_group(), mesh["data"]
    modules = {s: fully_shard(build(s, shape.num_stages), mesh=data) for _, s in shape.placement.stages(pipe.rank())}
    step(pipe, csv, "compute_comms", shape, modules, *batch(shape.num_microbatches, seed=data.get_local_rank()))
    expected = [build(s, shape.num_stages) for s in range(shape.num_stages)]
    for seed in (0, 1):
        one_device(expected, shape.num_microbatches, *batch(shape.num_microbatches, seed=seed))
    gradients = [(mine.grad.full_tensor(), theirs.grad / 2) for s in modules for mine, theirs in paired(modules[s], expected[s])]
    return max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in gradients)


@pytest.mark.parametrize(("name", "unsharded"), every_of(3, ["1f1b", "interleaved-zb", "zb-v", "dualpipe-v"], [1, MOST_UNSHARDED]))
def test_sharded_weights_are_gathered_where_they_are_used(world: Ranks, name: str, unsharded: int) -> None:
    schedule = zb.make(name, 2, 4)
    assert max(world.run(play_sharded, to_torch_comms_csv(schedule, torch.__version__, unsharded), schedule, ranks=4)) <= 1e-12


# What PyTorch cannot run, or runs wrongly without a word: our reader or writer refuses it where it can be seen in the CSV.


def with_a_linear_at_the_end(stage: int, num_stages: int) -> nn.Module:
    """A stage whose output is a view to autograd: that of a Linear with a bias on a 3-D input."""
    return nn.Sequential(build(stage, num_stages), *([nn.Linear(6, 6).double()] if stage < num_stages - 1 else []))


def test_a_stage_that_gives_a_view_can_be_split_from_version_2_15_on(world: Ranks) -> None:
    split = zb.make("interleaved-zb", 1, 2, 3)
    ((state, results),) = world.outcomes(play, to_torch_csv(split), "compute_only", split, with_a_linear_at_the_end, ranks=1)
    if VERSION < (2, 15):
        assert state == "error"
        assert "Failed to run stage backward input" in results
        assert "Can't detach views in-place. Use detach() instead." in results
    else:
        assert (state, results <= 1e-12) == ("ok", True)
    fused = zb.make("interleaved-1f1b", 1, 2, 3)
    assert world.run(play, to_torch_csv(fused), "compute_only", fused, with_a_linear_at_the_end, ranks=1)[0] <= 1e-12


def test_swapped_sends_give_wrong_gradients_in_pytorch_and_are_refused_here(world: Ranks) -> None:
    schedule = zb.make("gpipe", 2, 2)
    good = to_torch_comms_csv(schedule, torch.__version__)
    bad = good.replace("0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0")
    assert max(world.run(play, good, "compute_comms", schedule, ranks=2)) <= 1e-12
    assert max(world.run(play, bad, "compute_comms", schedule, ranks=2)) > 0.1
    with raises(ParseError, "line 2", "cell 1", "0SEND_F1", "1RECV_F0"):
        from_torch_csv(bad)


def test_forwards_out_of_order_on_the_last_stage_give_wrong_gradients_in_pytorch_and_are_not_written(world: Ranks) -> None:
    csv = "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n"
    schedule = from_torch_csv(csv)
    assert zb.schedule_faults(schedule) == ()
    assert max(world.run(play, csv, "compute_only", schedule, ranks=2)) > 0.1
    for write in (to_torch_csv, partial(to_torch_comms_csv, torch=torch.__version__)):
        with raises(InputError, "unnamed", "1 0"):
            write(schedule)
