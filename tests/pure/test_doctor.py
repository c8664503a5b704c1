"""`zerobubble doctor`: each check reports what it finds, and fails or notes what it should; two real ranks train alike."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tests.nearest import ROOT
from tests.refusals import raises, states
from zerobubble import InputError
from zerobubble.cli import main
from zerobubble.cli.doctor import ENABLES, FAULT, LEAST_FILES, NOTE, OK, TOLERANCE, Finding
from zerobubble.cost_model import GPUS, Efficiency, transformer
from zerobubble.cost_model.gpus import known_gpu
from zerobubble.cost_model.kernels import Kernels
from zerobubble.explorer.estimating import estimate_of
from zerobubble.explorer.question import FieldError, Question
from zerobubble.schedules import make
from zerobubble.version import __version__

PYTHON = sys.executable
LONG_S = "500"
"""For two ranks on a busy machine."""

checks = sys.modules["zerobubble.cli.doctor"]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the ranks of a trial run a program of the test instead."""

    def install(program: str) -> None:
        file = tmp_path / "python"
        file.write_text(f"#!{PYTHON}\nimport json, sys, time\nrank = int(sys.argv[-1])\n{program}\n")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))

    return install


USABLE = {"torch": "2.11.0", "cuda": None, "backends": ["gloo"], "devices": []}
TRAINED = {"difference": 0.0, "transport": "gloo", "seconds": 0.1, "skew": 0.0, "skew_error": 1e-5}


def trial(timeout: float = 120.0) -> dict[str, Finding]:
    return {each.check: each for each in checks.Trial.start().findings(timeout)}


def only(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    return finding


@pytest.mark.long
def test_two_real_ranks_train_and_the_exit_code_is_0() -> None:
    command = [sys.executable, "-m", "zerobubble", "doctor", "--json", "--timeout", LONG_S]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    by_name = {each["check"]: each for each in report["checks"]}
    assert (done.returncode, report["works"], done.stderr) == (0, True, "")
    assert {"versions", "open files", "processes", "shared memory", "ports", "CPUs", "clock", "two ranks", "clock skew"} <= by_name.keys()
    assert __version__ in by_name["versions"]["found"]
    assert by_name["two ranks"]["status"] == by_name["backends"]["status"] == OK
    assert all(bool(each["remedy"]) == (each["status"] != OK) for each in report["checks"])


def test_a_failed_check_has_its_remedy_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, python: Callable[[str], None]) -> None:
    python(f"print(json.dumps({USABLE})); print(json.dumps({TRAINED}))")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (LEAST_FILES - 1, LEAST_FILES - 1))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith(f"{FAULT} ") and "open files" in line]
    assert str(LEAST_FILES - 1) in failed
    assert "ulimit -n" in failed
    assert [line for line in done.stdout.splitlines() if "two ranks" in line and line.startswith(OK)]


NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(("limit", "files", "processes"), [(64, FAULT, FAULT), (1024, NOTE, OK), (10**6, OK, OK), (NO_LIMIT, OK, OK)])
def test_limits(monkeypatch: pytest.MonkeyPatch, limit: int, files: str, processes: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    found = [only(checks.open_files()), only(checks.processes())]
    assert [each.status for each in found] == [files, processes]
    assert [bool(each.remedy) for each in found] == [files != OK, processes != OK]


@pytest.mark.parametrize(("free", "status"), [(64 << 20, NOTE), (8 << 30, OK)])
def test_little_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    """64 MiB are what Docker gives."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free))
    found = only(checks.shared_memory())
    assert (found.status, "--shm-size" in found.remedy) == (status, status == NOTE)


def test_no_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mount(path: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(shutil, "disk_usage", no_mount)
    assert only(checks.shared_memory()).status == NOTE


def test_a_port_of_torchrun_that_is_taken_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(checks, "MASTER_PORT", server.getsockname()[1])
        taken = only(checks.ports())
    assert (taken.status, "--master-port" in taken.remedy) == (NOTE, True)
    assert only(checks.ports()).status == OK


def test_no_port_fails(monkeypatch: pytest.MonkeyPatch, python: Callable[[str], None]) -> None:
    def no_address() -> int:
        raise OSError(99, "Cannot assign requested address")

    python("sys.exit('RuntimeError: cannot connect')")
    monkeypatch.setattr(checks, "free_port", no_address)
    failed = {each.check for each in checks.examine(120.0) if each.status == FAULT}
    assert failed == {"ports", "two ranks"}


@pytest.mark.parametrize(("load", "status"), [(0.0, OK), (1e4, NOTE)])
def test_a_busy_machine_is_noted(monkeypatch: pytest.MonkeyPatch, load: float, status: str) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert only(checks.cpus()).status == status


@pytest.mark.parametrize(("resolution", "status"), [(1e-9, OK), (1e-3, NOTE)])
def test_a_coarse_clock_is_noted(monkeypatch: pytest.MonkeyPatch, resolution: float, status: str) -> None:
    monkeypatch.setattr(time, "get_clock_info", lambda name: SimpleNamespace(implementation="clock", resolution=resolution))
    assert only(checks.clock()).status == status


def test_another_system_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.versions().status == OK
    monkeypatch.setattr(sys, "platform", "darwin")
    assert checks.versions().status == FAULT


@pytest.mark.parametrize(
    ("program", "status", "stated"),
    [
        ("print('NVIDIA H100 80GB HBM3, 81559 MiB, 80994 MiB, 570.86')", OK, ["H100", "81559 MiB", "570.86"]),
        ("sys.exit(9)", NOTE, ["nvidia-smi"]),
    ],
)
def test_gpus_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, status: str, stated: list[str]) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!{PYTHON}\nimport sys\n{program}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = only(checks.gpus())
    assert found.status == status
    assert [word for word in stated if word not in found.found] == []


def test_no_gpu_driver_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert only(checks.gpus()).status == OK


# Extras.


def test_every_extra_has_its_purpose_and_the_needs_of_pyproject() -> None:
    """Those of the extras that it includes, too."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(ENABLES) == set(extras) - {"dev"}
    needs = checks.needs_of_extras()
    assert {need.package for need in needs["trl"]} == {"torch", "numpy", "llvmlite", "transformers", "accelerate", "trl"}
    assert dict(needs["torch"]) == {"torch": "2.6", "numpy": ""}
    assert dict(needs["exact"]) == {"ortools": ""}


def test_a_missing_or_old_package_is_noted_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.4.1+cpu", "numpy": "2.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(checks, "version", version)
    found = {each.check: each for each in checks.extras()}
    assert {name for name, each in found.items() if each.status == NOTE} == set(ENABLES) - set(checks.FRAMEWORKS)
    states(found["optional"].found, *checks.FRAMEWORKS)
    assert "2.4.1" in found["torch"].found
    assert found["plan"].remedy == "pip install 'zerobubble[plan]'"
    assert "llvmlite" in found["plan"].found
    installed |= {"torch": "2.10.0", "llvmlite": "0.44"}
    found = {each.check: each for each in checks.extras()}
    assert [found[each].status for each in ("torch", "plan", "optional")] == [OK, OK, OK]
    installed |= {"transformers": "5.0"}
    found = {each.check: each for each in checks.extras()}
    assert found["transformers"].status == NOTE
    states(found["transformers"].found, "accelerate")


def test_sources_without_an_installation_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checks, "requires", requires)
    assert only(checks.extras()).status == NOTE


def test_no_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    failed = [each for each in checks.examine(1.0) if each.status == FAULT]
    assert [each.remedy for each in failed] == ["pip install 'zerobubble[torch]'"]


# The trial.


def test_a_torch_without_gloo_fails(python: Callable[[str], None]) -> None:
    python(f"print(json.dumps({USABLE | {'backends': ['nccl']}})); sys.exit('RuntimeError: no gloo')")
    found = trial()
    assert found["backends"].status == found["two ranks"].status == FAULT
    assert "RuntimeError: no gloo" in found["two ranks"].found
    assert "clock skew" not in found


def test_other_gradients_fail(python: Callable[[str], None]) -> None:
    wrong = TRAINED | {"difference": 2 * TOLERANCE}
    python(f"print(json.dumps({USABLE})); print(json.dumps({wrong} if rank else {TRAINED}))")
    found = trial()
    assert found["two ranks"].status == FAULT
    assert f"{2 * TOLERANCE:.1e}" in found["two ranks"].found


def test_a_rank_that_ends_or_hangs_fails(python: Callable[[str], None]) -> None:
    python(f"print(json.dumps({USABLE}), flush=True)\nif rank: sys.exit(3)\ntime.sleep(3600)")
    found = trial(timeout=3.0)
    assert found["two ranks"].status == FAULT
    assert "rank 0" in found["two ranks"].found
    assert "rank 1: ended with exit code 3" in found["two ranks"].found
    assert "--timeout" in found["two ranks"].remedy


def test_clocks_apart_are_noted(python: Callable[[str], None]) -> None:
    python(f"print(json.dumps({USABLE})); print(json.dumps({TRAINED | {'skew': -5.0}}))")
    found = trial()
    assert (found["clock skew"].status, found["two ranks"].status) == (NOTE, OK)


SPEEDS = {
    "products": {"fp32": 4e13, "bf16": 6e14},
    "attention": [4e14, 3e14],
    "attended": 8192,
    "copied": 2.5e12,
    "sent": 3e11,
    "summed": 2e11,
    "latency": 1e-5,
    "backend": "nccl",
    "name": "a GPU",
    "processors": 132,
    "bytes": 80 << 30,
    "domain": 8,
}
SLOWER = SPEEDS | {"products": {"fp32": 3e13, "bf16": 7e14}, "copied": 2e12, "sent": 1e11}


def speeds_of_ranks(python: Callable[[str], None], second: dict[str, object]) -> None:
    python(
        f"if 'zerobubble.runtime.speeds' in sys.argv: print(json.dumps({second} if rank else {SPEEDS}))\n"
        f"else: print(json.dumps({USABLE})); print(json.dumps({TRAINED}))"
    )


def test_measured_speeds_are_those_of_the_slower_rank_and_make_a_gpu(python: Callable[[str], None], tmp_path: Path) -> None:
    speeds_of_ranks(python, SLOWER)
    file = tmp_path / "gpu.json"
    done = CliRunner().invoke(main, ["doctor", "--json", "--measure", str(file)])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.output)
    assert {"products", "attention", "memory", "messages", "sums"} <= {each["check"] for each in shown["checks"]}
    assert shown["measured"] == json.loads(file.read_text())
    gpu = known_gpu(str(file))
    assert gpu == type(gpu).from_dict(shown["measured"])
    assert (gpu.sustained_of("bf16"), gpu.memory_bandwidth, gpu.link_bandwidth, gpu.network_bandwidth) == (6e14, 2e12, 1e11, 1e11)
    assert gpu.attention_flops(8192) == pytest.approx((4e14, 3e14))
    assert Kernels(gpu, Efficiency()).memory_traffic(2e12) == 1, "all of what was measured"
    assert Kernels(gpu, Efficiency(latency=0)).send(1e11, within_domain=True) == 1
    given: dict[str, Any] = {"model": "llama3-70b", "tp": 8, "pp": 4}
    assert transformer(gpu=str(file), **given).costs == transformer(gpu=gpu, **given).costs
    with pytest.raises(FieldError):
        estimate_of(Question(model="llama3-70b", gpu=str(file)), make("1f1b", 4, 8))
    done = CliRunner().invoke(main, ["plan", "--model", "megatron-22b", "--gpu", str(file), "--gpus", "8", "--batch", "8", "--top", "1"])
    assert done.exit_code == 0, done.output


def test_a_rank_that_shares_a_gpu_has_no_products_of_its_own(python: Callable[[str], None]) -> None:
    sharing = {name: value for name, value in SLOWER.items() if name not in ("products", "attention", "attended", "copied")}
    speeds_of_ranks(python, sharing)
    speeds: list[Any] = []
    found = {each.check: each for each in checks.measure(60.0, speeds)}
    assert all(each.status == OK for each in found.values())
    assert (checks.gpu_of(speeds).sustained_of("bf16"), checks.gpu_of(speeds).link_bandwidth) == (6e14, 1e11)


def test_speeds_that_cannot_be_measured_fail(python: Callable[[str], None], tmp_path: Path) -> None:
    python(f"if 'zerobubble.runtime.speeds' in sys.argv: sys.exit('no memory')\nprint(json.dumps({USABLE})); print(json.dumps({TRAINED}))")
    done = CliRunner().invoke(main, ["doctor", "--measure", str(tmp_path / "gpu.json")])
    assert done.exit_code == 1
    assert "no memory" in done.output
    assert not (tmp_path / "gpu.json").exists()
    done = CliRunner().invoke(main, ["doctor", "--measure", "gpu.txt"])
    assert done.exit_code == 2
    assert "gpu.txt.json" in done.output


@pytest.mark.parametrize(
    ("change", "stated"),
    [
        ({"format": "other"}, ()),
        ({"speed": 1}, ("speed",)),
        ({"link_bandwidth": -1}, ("link_bandwidth", -1)),
        ({"flops": [1]}, ()),
        ({"processors": "many"}, ("processors",)),
    ],
)
def test_files_that_are_no_gpu_are_refused(change: dict[str, Any], stated: tuple[Any, ...], tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(GPUS["H100"].to_dict()))
    assert known_gpu(str(file)) == GPUS["H100"]
    file.write_text(json.dumps(GPUS["H100"].to_dict() | change))
    with raises(InputError, str(file), *stated):
        known_gpu(str(file))
    file.write_text("{")
    with raises(InputError, str(file)):
        known_gpu(str(file))
    with raises(InputError, "missing.json"):
        known_gpu("missing.json")


@pytest.mark.long
def test_two_real_ranks_measure_what_the_checks_read(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    done = CliRunner().invoke(main, ["doctor", "--measure", str(file), "--timeout", LONG_S])
    assert done.exit_code == 0, done.output
    gpu = known_gpu(str(file))
    assert gpu.effective
    assert min(gpu.memory_bandwidth, gpu.link_bandwidth, gpu.sustained_of("bf16")) > 1e6


def test_devices_of_torch(python: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = {"type": "cuda", "index": 0, "name": "NVIDIA H100", "bytes": 80 << 30}
    python(f"print(json.dumps({USABLE | {'devices': [gpu], 'cuda': '13.0'}})); print(json.dumps({TRAINED}))")
    assert "cuda:0 NVIDIA H100, 80.0 GiB" in trial()["devices"].found
    python(f"print(json.dumps({USABLE})); print(json.dumps({TRAINED}))")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert trial()["devices"].status == OK
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert trial()["devices"].status == NOTE, "there is a driver, and a torch for CPUs"


def test_what_a_rank_prints_is_what_the_checks_read() -> None:
    """The trial of a real rank has the keys of the reports of this file."""
    from zerobubble.runtime import trial as real

    assert real.can_use().keys() == USABLE.keys()
    assert "gloo" in real.can_use()["backends"]


GPU = {"type": "cuda", "name": "a GPU", "bytes": 80 << 30}


def between(
    devices: int, nccl: str | None = "2.28.9", free: int = 79 << 30, apart: tuple[tuple[int, int], ...] = ()
) -> dict[str, list[Finding]]:
    """The findings about GPUs, by check."""
    usable = USABLE | {
        "devices": [GPU | {"index": index} for index in range(devices)],
        "nccl": nccl,
        "free": [free] * devices,
        "apart": apart,
    }
    found: dict[str, list[Finding]] = {}
    for each in checks.between_gpus(usable):
        found.setdefault(each.check, []).append(each)
    return found


def test_what_gpus_lack_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert {each.status for found in between(8).values() for each in found} == {OK}
    assert [each.status for each in between(0)["GPU"]] == [FAULT]
    assert [each.status for each in between(2, nccl=None)["NCCL"]] == [NOTE]
    assert [each.status for each in between(1)["GPUs"]] == [NOTE]
    assert [each.status for each in between(2, free=8 << 30)["GPU memory"]] == [NOTE, NOTE]
    (apart,) = between(4, apart=((1, 3),))["peer access"]
    assert (apart.status, "1 and 3" in apart.found) == (NOTE, True)


@pytest.mark.long
def test_a_machine_without_gpus_fails_when_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(main, ["doctor", "--gpu", "--json", "--timeout", LONG_S])
    failed = [each["check"] for each in json.loads(result.stdout)["checks"] if each["status"] == FAULT]
    assert (result.exit_code, failed) == (1, ["GPU"])
