"""Differences of GPUs from CPUs, as far as a CPU can show them; `benchmarks/gpu/check.py` runs the process tests on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.device import DEVICE, cpu_only
from tests.procs.models import Block, batch, build, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.procs.test_offload_runs import everything
from tests.refusals import Stated, raises, states
from zerobubble.runtime import device
from zerobubble.runtime.device import DeviceInterface, Feature, interface, stand_in
from zerobubble.runtime.split import deferred
from zerobubble.runtime.split.layers import weight_work
from zerobubble.runtime.split.splitter import run_backward
from zerobubble.runtime.stage import rank_stages
from zerobubble.runtime.stage.levels import RecomputeLevels
from zerobubble.runtime.stage.stage import make_stage
from zerobubble.runtime.transport import choice
from zerobubble.runtime.values.gradients import IN_GRAD
from zerobubble.runtime.values.random_state import devices_with_generators
from zerobubble.testing import CheckedDevice


@pytest.mark.parametrize(
    ("kind", "use", "feature"),
    [
        ("mps", lambda device: device.new_stream(), "streams"),
        ("mps", lambda device: device.random_state(), "random generator"),
        ("mps", lambda device: device.free_bytes(), "count of free memory"),
        ("xpu", lambda device: device.capture(list, None), "graphs"),
        ("cpu", lambda device: device.current_stream(), "streams"),
    ],
)
def test_a_feature_that_a_device_lacks_is_refused_by_name(kind: str, use: Callable[[DeviceInterface], object], feature: str) -> None:
    with raises(zb.InputError, device=str(torch.device(kind)), feature=feature, version=torch.__version__):
        use(interface(torch.device(kind)))


class Lacking(CheckedDevice):
    """An accelerator that lacks a feature; one without pinned memory raises what torch's own backends raise."""

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.feature = feature
        self.has_graphs = feature is not Feature.GRAPHS

    def new_stream(self, *, allocates_again: bool = True) -> Any:
        if self.feature is Feature.STREAMS:
            raise self.lacks(self.feature)
        return super().new_stream(allocates_again=allocates_again)

    def new_event(self, *, timed: bool = False) -> Any:
        if self.feature is Feature.TIMES and timed:
            raise TypeError("Event() takes no keyword arguments")
        return super().new_event(timed=timed)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.feature is Feature.PINNED:
            raise RuntimeError("Cannot access accelerator device when none is available.")
        return super().host_memory(shape, dtype)


def refused(group: Any, context: Callable[[], AbstractContextManager[object]], first: int = 1, **options: Any) -> str:
    """How a pipeline is refused whose ranks from `first` on are made in a context of their own."""
    name = "1f1b"
    if options.get("offload") == "all":
        name = zb.make("1f1b", group.size(), 4)
        options["offload"] = everything(name)
    with context() if group.rank() >= first else nullcontext(), pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, name, 4, loss_fn, group=group, timeout=1000.0, **options)
    return str(caught.value)


def lacking(feature: Feature) -> AbstractContextManager[object]:
    return stand_in(Lacking(feature))


@cpu_only("the CPU takes the part of an accelerator")
@pytest.mark.parametrize(
    ("feature", "options", "user"),
    [
        (Feature.STREAMS, {}, "pipeline"),
        (Feature.TIMES, {}, "pipeline"),
        (Feature.PINNED, {}, "staged"),
        (Feature.PINNED, {"transport": "gloo", "offload": "all"}, "offload"),
        (Feature.GRAPHS, {"split": "graph", "cuda_graphs": True}, "cuda_graphs"),
    ],
)
@pytest.mark.parametrize("first", [0, 1], ids=["all", "one"])
def test_a_feature_that_the_device_of_a_rank_lacks_is_refused_on_all(
    world: Ranks, feature: Feature, options: dict[str, Any], user: str, first: int
) -> None:
    """When the pipeline is made, and not when the feature is used, which only one rank may do."""
    found = world.run(partial(refused, **options), partial(lacking, feature), first, ranks=2)
    assert len(set(found)) == 1
    lacks = "rank 1" if first == 1 and feature is not Feature.GRAPHS else "ranks"  # CPUs have no graphs at all
    states(found[0], lacks, user, torch.__version__, foreign=feature)


def on_two_devices(stage: int, num_stages: int) -> nn.Module:
    module = build(stage, num_stages)
    module.register_buffer("far", torch.zeros(1, device="meta"))
    return module


def on_meta(stage: int, num_stages: int) -> nn.Module:
    return build(stage, num_stages).to("meta")


def refused_parts(group: Any, made: Callable[[int, int], nn.Module]) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(made if group.rank() else build, "1f1b", 4, loss_fn, group=group, timeout=1000.0)
    return str(caught.value)


@pytest.mark.parametrize(("made", "stated"), [(on_two_devices, ["far", "stage 1", "cpu"]), (on_meta, [])])
@cpu_only("it names the CPU")
def test_modules_of_a_rank_are_on_one_device_that_holds_values(world: Ranks, made: Any, stated: list[str]) -> None:
    found = world.run(refused_parts, made, ranks=2)
    assert len(set(found)) == 1
    states(found[0], "rank 1", "meta", *stated)


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """A rank whose stages are on a GPU, as far as it knows."""
    with stand_in(CheckedDevice()), mock.patch.object(rank_stages, "_device", return_value=torch.device("cuda:0")):
        yield


@contextmanager
def with_an_old_driver() -> Iterator[None]:
    """A rank whose torch is built for a GPU that its driver is too old for. It takes the CPU instead, as programs do."""
    error = RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver.")
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cuda")),
        mock.patch.object(torch.accelerator, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "init", side_effect=error),
    ):
        yield


@contextmanager
def one_each(group: Any) -> Iterator[None]:
    with with_an_old_driver() if group.rank() else on_a_gpu():
        yield


def refused_mixture(group: Any) -> str:
    with one_each(group), pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, timeout=1000.0)
    return str(caught.value)


@cpu_only("one rank is on the CPU")
def test_ranks_on_two_kinds_of_device_are_refused_with_the_reason(world: Ranks) -> None:
    found = world.run(refused_mixture, ranks=2)
    assert len(set(found)) == 1
    states(found[0], "rank 0", "cuda", "rank 1", "cpu", "11040", torch.__version__)
    assert "Please" not in found[0], "one sentence"


@cpu_only("the ranks train on CPUs")
def test_ranks_that_cannot_use_the_same_accelerator_agree_on_the_cpu(world: Ranks) -> None:
    """What follows the kind of device in a message is not compared."""
    assert all(world.run(on_cpus, ranks=2))


def on_cpus(group: Any) -> bool:
    with with_an_old_driver() if group.rank() else nullcontext(), zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        return bool(pipe.step(*batch(4)).isfinite())


def refused_placement(group: Any) -> str:
    """Rank 1 has no tensors, and cannot use the accelerator of rank 0."""

    def parts(stage: int, num_stages: int) -> nn.Module:
        return Apart() if group.rank() else build(stage, num_stages)

    gone = mock.patch.object(rank_stages, "of_kind", side_effect=RuntimeError("No CUDA GPUs are available"))
    with gone, pytest.raises(zb.InputError) as caught:
        zb.Pipeline(parts, "1f1b", 4, loss_fn, group=group, timeout=1000.0)
    return str(caught.value)


def test_a_rank_without_tensors_that_cannot_go_where_the_others_are_is_refused_on_all(world: Ranks) -> None:
    found = world.run(refused_placement, ranks=2)
    assert len(set(found)) == 1
    states(found[0], "rank 1", DEVICE.type, foreign="No CUDA GPUs are available")


def without_nccl(group: Any, transport: str) -> str:
    missing = mock.patch.object(device.dist, "is_nccl_available", return_value=False)
    with missing, on_a_gpu(), pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, transport=transport, timeout=1000.0)
    return str(caught.value)


def test_a_build_without_nccl_is_refused_by_name_and_else_stages_messages(world: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in world.run(without_nccl, "nccl", ranks=2):
        states(text, "ranks", "nccl", torch.__version__)
    gpu = torch.device("cuda")
    monkeypatch.setattr(device.dist, "is_nccl_available", lambda: True)
    assert choice.fastest_for(gpu) == "nccl"
    monkeypatch.setattr(device.dist, "is_nccl_available", lambda: False)
    assert choice.fastest_for(gpu) == "staged"


def sharing_a_gpu(group: Any) -> str:
    there = mock.patch.object(device.dist, "is_nccl_available", return_value=True)
    one = mock.patch.object(CheckedDevice, "uuid", return_value="GPU-1")
    with there, one, on_a_gpu(), pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, transport="nccl", timeout=1000.0)
    return str(caught.value)


def test_ranks_that_share_a_gpu_under_nccl_are_refused_on_all(world: Ranks) -> None:
    found = world.run(sharing_a_gpu, ranks=2)
    assert len(set(found)) == 1
    states(found[0], "ranks 0, 1", "GPU-1", "nccl", "staged")


class Checkpointed(nn.Module):
    """A block within a checkpoint, and where `asks`, a forward that asks for gradients itself there."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.block = Block(8)
        self.asks = asks

    def run(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        if not self.asks:
            return y
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + slope

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.run, x, use_reentrant=False)
        return y


def in_a_thread_of_the_engine(edges: list[Any], gradients: Any) -> None:
    """Goes back in another thread, as torch does for a GPU."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            run_backward(edges, gradients)
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("is_kept", [False, True], ids=["before torch 2.13", "since"])
@cpu_only("a thread of the test takes the part of the engine's")
def test_checkpoints_are_recomputed_in_threads_of_the_engine(monkeypatch: pytest.MonkeyPatch, asks: bool, is_kept: bool) -> None:
    if not is_kept:
        monkeypatch.setattr(weight_work, "TORCH_KEEPS_REFERENCES", False)
        monkeypatch.setattr(weight_work, "_set_current", lambda work: setattr(weight_work._thread, "work", work))
        monkeypatch.setattr(weight_work, "_runs_in_this_thread", lambda gradients: False)
        monkeypatch.setattr(deferred, "run_backward", in_a_thread_of_the_engine)
    torch.manual_seed(0)
    module = Checkpointed(asks).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    module(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    stage = make_stage("deferred", module, 0)
    mine = x.detach().clone().requires_grad_()
    with stage.stepping():
        (y,) = stage.forward(0, (mine,))
        stage.backward(0, (2 * y.detach(),))
        waited = [name for name, parameter in module.named_parameters() if parameter.grad is None]
        stage.weight(0)
    assert ("block.up.weight" in waited) == (not asks)
    assert not weight_work._in_engine
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.skipif(not weight_work.CAN_SEE_HOOKS, reason="before 2.8 torch does not say who saves tensors: every pass is followed")
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["no checkpoint", "checkpoint", "reentrant checkpoint"])
def test_only_checkpoints_are_followed_into_the_engine(monkeypatch: pytest.MonkeyPatch, reentrant: bool | None) -> None:
    monkeypatch.setattr(weight_work, "TORCH_KEEPS_REFERENCES", False)
    monkeypatch.setattr(weight_work, "_set_current", lambda work: setattr(weight_work._thread, "work", work))
    followed = []
    monkeypatch.setattr(weight_work, "_runs_in_this_thread", lambda gradients: followed.append(gradients) is None)
    linear = nn.Linear(3, 3)
    module = nn.Sequential(linear, nn.Tanh())
    if reentrant is not None:
        module.forward = lambda x: checkpoint(linear, x, use_reentrant=reentrant)  # type: ignore[method-assign]
    stage = make_stage("deferred", module, 0)
    with stage.stepping():
        (y,) = stage.forward(0, (torch.ones(2, 3, requires_grad=True),))
        stage.backward(0, (torch.ones_like(y),))
        stage.weight(0)
    assert bool(followed) == (reentrant is not None)


def elsewhere(group: Any, folder: str) -> tuple[float, float]:
    """A pipeline made and played while torch makes tensors elsewhere than on the stages' device: the error of a loss, and a norm."""
    modules = [build(stage, 2 * group.size()) for stage in range(2 * group.size())]
    oracle = [build(stage, 2 * group.size()) for stage in range(2 * group.size())]
    data = [batch(8, seed=step) for step in range(2)]
    expected = one_device(oracle, 8, *data[0])
    rank, last = group.rank(), 2 * group.size() - 1
    torch.set_default_device("meta")
    try:
        with zb.Pipeline([modules[rank], modules[last - rank]], "zb-v", 8, loss_fn, group=group) as pipe:
            optimizer = zb.PostValidation(torch.optim.SGD(pipe.parameters(), lr=1e-3, momentum=0.9), pipe, 1.0)
            loss = pipe.step(*data[0])
            optimizer.step()
            optimizer.zero_grad()
            pipe.step(*data[1])
            norm = optimizer.step()
            pipe.profile(*data[0])
            pipe.timeline()
            zb.save(Path(folder) / "saved", pipe, optimizer)
            zb.load(Path(folder) / "saved", pipe, optimizer)
        return abs(loss.item() - expected.item()), float(norm or 0.0)
    finally:
        torch.set_default_device(None)


@pytest.mark.long
def test_the_default_device_may_be_another_one(world: Ranks, tmp_path: Path) -> None:
    for error, norm in world.run(elsewhere, str(tmp_path), ranks=2):
        assert error < 1e-12
        assert norm >= 0.0


class Apart(nn.Module):
    """Has nothing to train."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def without_tensors(group: Any) -> tuple[str, float]:
    """Where a rank whose stages have no tensors computes, and the loss."""

    def parts(stage: int, num_stages: int) -> nn.Module:
        torch.manual_seed(stage)
        return Apart() if stage == 1 else nn.Linear(4, 4).to(DEVICE)

    x = torch.ones(8, 4, device=DEVICE)
    with zb.Pipeline(parts, "1f1b", 4, nn.functional.mse_loss, group=group) as pipe:
        return str(pipe.device.type), pipe.step(x, x).item()


def test_stages_without_tensors_go_where_the_others_are(world: Ranks) -> None:
    results = world.run(without_tensors, ranks=3)
    assert {kind for kind, _ in results} == {DEVICE.type}
    assert len({loss for _, loss in results}) == 1


@pytest.mark.parametrize(("module", "kind", "has_tensors"), [(nn.Linear(2, 2, device="meta"), "meta", True), (nn.Tanh(), "cpu", False)])
def test_stages_are_on_the_device_of_their_tensors_or_on_the_cpu(module: nn.Module, kind: str, has_tensors: bool) -> None:
    stages = rank_stages.Stages({0: module}, "whole", IN_GRAD, RecomputeLevels(None))
    assert (stages.device, stages.has_tensors) == (torch.device(kind), has_tensors)


@cpu_only("its modules are on the CPU")
def test_no_generator_of_an_unused_gpu_is_touched() -> None:
    """`fork_rng()` without devices makes a context on every GPU of the machine."""
    sources = Path(zb.__file__).parent.rglob("*.py")
    assert not [path for path in sources if re.search(r"fork_rng\(\)(?!`)", path.read_text().replace("`torch.random.fork_rng`", ""))]
    assert devices_with_generators(nn.Linear(2, 2), {"x": [torch.zeros(1)]}) == []


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "mps", "xpu", "hpu"])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="for builds of torch for CPUs")
def test_a_device_that_torch_is_not_built_for_is_refused_on_every_rank(world: Ranks, name: str) -> None:
    assert device.device_fault("cpu") == device.device_fault(torch.device("meta")) == ""
    found = world.run(partial(refused, device=name), nullcontext, ranks=2)
    assert len(set(found)) == 1
    states(found[0], name, torch.__version__, "device='cpu'", *(["pip"] if name.startswith("cuda") else []))
    assert "AssertionError" not in found[0]


@pytest.mark.parametrize(
    ("name", "stated"), [("cuda", ()), ("cuda:1", ()), (torch.device("cuda", 7), ("'cuda:7'", "'cuda:0'", "'cuda:1'", "LOCAL_RANK"))]
)
def test_an_index_beyond_the_devices_of_this_machine_is_refused(name: Any, stated: Stated) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=True), mock.patch.object(torch.cuda, "device_count", return_value=2):
        found = device.device_fault(name)
    assert bool(found) is bool(stated)
    if stated:
        states(found, *stated)


def test_a_device_that_torch_is_built_for_and_cannot_use_says_why() -> None:
    cannot = RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update")
    kind = mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cuda"))
    none = mock.patch.object(torch.accelerator, "is_available", return_value=False)
    gone = mock.patch.object(torch.cuda, "is_available", return_value=False)
    with kind, none, gone, mock.patch.object(torch.cuda, "init", side_effect=cannot):
        states(device.device_fault("cuda"), "11040", "doctor", "device='cpu'")


@pytest.mark.parametrize(("given", "meant"), [("gpu", "'cuda'"), (1, "'cuda:1'")])
def test_what_is_no_device_names_the_one_that_was_meant(world: Ranks, given: Any, meant: str) -> None:
    for found in world.run(partial(refused, device=given), nullcontext, ranks=2):
        states(found, "device", given, meant)
