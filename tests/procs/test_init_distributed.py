"""`zb.init_distributed` chooses each rank's device, prints which, and names torchrun in a process that no launcher has started.

test_train_on_gpus_page runs it on a second device, and test_pages_by_launcher on CPUs under torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.ranks import free_port
from tests.refusals import raises, states
from zerobubble.runtime import device

pytestmark = cpu_only("it takes away the devices of torch, and adds others")
CONNECT = dist.init_process_group
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """This process as the first of two ranks of a machine; yields the call that would connect them."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with mock.patch.object(dist, "init_process_group") as connect:
        yield connect


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], mock.Mock]:
    """A function that gives torch a number of GPUs, and returns the module of their kind."""

    def give(count: int) -> mock.Mock:
        module = mock.Mock()
        module.get_device_properties.return_value = mock.Mock(total_memory=1)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
        return module

    return give


@pytest.mark.parametrize("missing", [tuple(LAUNCHED), ("LOCAL_RANK",)])
def test_a_process_without_launcher_names_the_line(missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["folder/hello.py"])
    for name in missing:
        monkeypatch.delenv(name)
    with raises(zb.InputError, *missing, "torchrun", "--nproc-per-node", "hello.py"):
        zb.init_distributed()


def test_ranks_take_the_gpu_of_their_number(launched: mock.Mock, gpus: Callable[[int], mock.Mock], monkeypatch: pytest.MonkeyPatch) -> None:
    module = gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert zb.init_distributed() == zb.init_distributed("cuda") == torch.device("cuda", 1)
    assert module.set_device.call_args == mock.call(1)
    assert launched.call_args == mock.call("cpu:gloo,cuda:nccl")


def test_ranks_go_to_the_cpu_if_that_is_given(
    launched: mock.Mock, gpus: Callable[[int], mock.Mock], capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(2)
    assert zb.init_distributed("cpu") == zb.init_distributed(torch.device("cpu")) == torch.device("cpu")
    assert launched.call_args == mock.call("gloo")
    states(capsys.readouterr().err, 2, "CPU")


def test_too_few_gpus_are_named(gpus: Callable[[int], mock.Mock]) -> None:
    """By a warning if the device is not given, else by an error."""
    gpus(1)
    with pytest.warns(UserWarning, match="zerobubble") as warned:
        assert zb.init_distributed() == torch.device("cpu")
    states(str(warned[0].message), "1 GPU", "2 ranks", "CPU")
    with raises(zb.InputError, "1 GPU", "2 ranks", argument="device", device="cuda"):
        zb.init_distributed("cuda")


@pytest.mark.parametrize("driver", [False, True])
def test_a_torch_without_gpus_is_named(driver: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, or by a warning if the machine has a driver."""
    monkeypatch.setattr(device.shutil, "which", lambda name: name if driver else None)
    if driver:
        with pytest.warns(UserWarning, match="zerobubble") as warned:
            zb.init_distributed()
        said = str(warned[0].message)
    else:
        zb.init_distributed()
        said = capsys.readouterr().err
    states(said, torch.__version__, "pip")
    with raises(zb.InputError, torch.__version__, device="cuda"):
        zb.init_distributed("cuda")


def test_other_ranks_of_a_machine_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    zb.init_distributed()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("given", ["cuda:1", "gpu", 1])
def test_a_device_that_is_no_kind_is_refused(given: str) -> None:
    with raises(zb.InputError, argument="device", got=given):
        zb.init_distributed(given)


def test_a_pipeline_without_ranks_names_the_launcher() -> None:
    with raises(zb.InputError, "torchrun"):
        zb.Pipeline(lambda stage, num_stages: torch.nn.Linear(2, 2), "1f1b", 2, torch.nn.functional.mse_loss)


def test_a_second_call_returns_the_device_of_the_first(launched: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of a notebook runs again. Another device, or ranks that torch has connected for another one, are refused."""
    launched.side_effect = CONNECT
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    try:
        first = zb.init_distributed("cpu")
        group = dist.group.WORLD
        assert zb.init_distributed("cpu") == first
        assert dist.group.WORLD is group
        assert launched.call_count == 1
        with mock.patch.object(dist, "get_backend_config", return_value="cpu:mpi"), raises(zb.InputError, device="cpu", got="cpu:mpi"):
            zb.init_distributed("cpu")
    finally:
        dist.destroy_process_group()
    assert zb.init_distributed("cpu") == first
    dist.destroy_process_group()
