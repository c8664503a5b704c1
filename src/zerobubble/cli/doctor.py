"""`zerobubble doctor`: what this machine has and lacks for training in a pipeline, and a training step of two ranks."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import click

from zerobubble.cli.inputs.options import NumberRange, json_option
from zerobubble.cost_model.gpus import ATTENTION_OVERHEAD, ATTENTION_TOKENS, GPU
from zerobubble.errors import InputError
from zerobubble.installing import install
from zerobubble.units import counted, show_bytes
from zerobubble.version import __version__
from zerobubble.whole_files import require_writable, write_text

FAILED = 1
OK, NOTE, FAULT = "ok", "note", "failed"
TOLERANCE = 1e-12
"""Relative difference of float64 gradients that only the order of additions explains."""
LEAST_FILES, FEW_FILES = 256, 4096
LEAST_PROCESSES = 256
LITTLE_SHARED = 1 << 30
LEAST_FREE = 0.9
"""Share of a GPU's memory below which other programs use it."""
MASTER_PORT = 29500
"""The port at which ranks of torchrun meet by default."""
MOST_SKEW_S = 1e-3
ENABLES = {
    "torch": "training",
    "plan": "the planner's search",
    "exact": "the exact planner",
    "png": "pictures as PNG",
    "explore": "zerobubble explore",
    "transformers": "Trainer of Transformers",
    "trl": "SFTTrainer of TRL",
    "lightning": "PipelineStrategy of Lightning",
    "torchtitan": "torchtitan runs",
    "deepspeed": "DeepSpeed's pipeline engine",
    "megatron": "schedules in Megatron-Core",
}
"""The purpose of each extra of the package."""

_SAME_NAME = ("transformers", "trl", "lightning", "torchtitan", "deepspeed")
FRAMEWORKS = {"exact": "ortools", "megatron": "megatron-core"} | {name: name for name in _SAME_NAME}
"""The package that an extra is for. Without it, the other packages of the extra are not needed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check: "ok", "note" for a lack that matters to some runs only, or "failed"; the last two have a `remedy`."""

    check: str
    status: str
    found: str
    remedy: str = ""


@click.command("doctor")
@click.option(
    "--timeout", type=NumberRange(min=0, min_open=True), default=60.0, metavar="SECONDS", help="The longest to wait for the two ranks."
)
@click.option("--gpu", "asks_gpu", is_flag=True, help="Also report what keeps ranks from exchanging messages between GPUs over NCCL.")
@click.option(
    "--measure",
    "file",
    metavar="FILE",
    help="Also measure the speeds of two ranks here, and write them to FILE, which plan --gpu FILE and zb.cost_model read.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, timeout: float, asks_gpu: bool, file: str | None, as_json: bool) -> None:
    """Check this machine: versions, limits, clocks, devices, and a training step of two ranks. Begin bug reports with the output.

    \b
    Examples:
      zerobubble doctor
      zerobubble doctor --measure gpu.json
      zerobubble doctor --gpu
      zerobubble doctor --json

    Two processes train one step of a small pipeline on CPUs, over gloo, and compare their gradients with those of one process. A line
    marked "note" describes something that only some runs need. The exit code is 1 if a line is marked "failed". Each of these lines ends
    with the remedy. It takes a few seconds on an idle machine.

    --measure takes some 20 seconds more. It measures matrix products, attention, copies in memory, messages and sums between the two ranks,
    each on its own GPU or thread of a CPU, and writes them as the figures of a GPU. Links between hosts are not measured: set
    network_bandwidth in the file.
    """
    if file is not None:
        _require_json(file)
    findings = []
    speeds: list[Mapping[str, Any]] = []
    for finding in examine(timeout, asks_gpu=asks_gpu, speeds=None if file is None else speeds):
        findings.append(finding)
        if not as_json:
            click.echo(line_of(finding))
    failed = [finding.check for finding in findings if finding.status == FAULT]
    measured = gpu_of(speeds).to_dict() if speeds else None
    if file is not None and measured is not None:
        write_text(file, json.dumps(measured, indent=1) + "\n")
    if as_json:
        gpu = {} if measured is None else {"measured": measured}
        click.echo(json.dumps({"works": not failed, "checks": [asdict(finding) for finding in findings], **gpu}, indent=2))
    else:
        click.echo(f"{counted(len(failed), 'check')} failed: {', '.join(failed)}" if failed else "This machine can train in a pipeline.")
    ctx.exit(FAILED if failed else 0)


def _require_json(file: str) -> None:
    if not file.endswith(".json"):
        raise InputError(
            "{argument} takes a file that ends with .json, got {got!r}", argument="--measure", got=file, remedy=f"name it {file}.json"
        )
    require_writable(file)


def line_of(finding: Finding) -> str:
    """Returns a finding as one line."""
    return f"{finding.status:<7} {finding.check:<14} {finding.found}{f': {finding.remedy}' if finding.remedy else ''}"


def examine(timeout: float, *, asks_gpu: bool = False, speeds: list[Mapping[str, Any]] | None = None) -> Iterator[Finding]:
    """Yields the findings of all checks: this machine, the trial of two ranks, and their speeds if `speeds` is a list to add them to.

    The trial and the measurement may each take `timeout` seconds.
    """
    yield versions()
    trial = Trial.start(*(["--gpu"] if asks_gpu else [])) if find_spec("torch") else None
    for check in CHECKS:
        yield from check()
    yield from extras()
    if trial is None:
        yield Finding("two ranks", FAULT, "torch is not installed", install("torch"))
    else:
        yield from trial.findings(timeout)
        if speeds is not None:
            yield from measure(timeout, speeds)


def versions() -> Finding:
    """Reports zerobubble, Python and the system."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    installed = f"zerobubble {__version__}, Python {platform.python_version()}, {system}"
    if sys.platform != "linux":
        return Finding("versions", FAULT, installed, "ranks need Linux; commands such as plan and compare work everywhere")
    return Finding("versions", OK, installed)


def open_files() -> Iterator[Finding]:
    """Reports the limit of open files: a rank needs some for each other rank that it exchanges messages with."""
    limit = _limit(resource.RLIMIT_NOFILE)
    status = FAULT if limit < LEAST_FILES else NOTE if limit < FEW_FILES else OK
    yield Finding("open files", status, _amount(limit), "" if status == OK else f"ulimit -n {FEW_FILES * 16}, before many ranks start")


def processes() -> Iterator[Finding]:
    """Reports the limit of processes and threads of this user."""
    limit = _limit(resource.RLIMIT_NPROC)
    fails = limit < LEAST_PROCESSES
    yield Finding("processes", FAULT if fails else OK, _amount(limit), "ulimit -u 4096: each rank has threads" if fails else "")


def _limit(which: int) -> float:
    """Returns the soft limit of this process, inf without one."""
    soft, _ = resource.getrlimit(which)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _amount(limit: float) -> str:
    return "unlimited" if limit == float("inf") else f"at most {limit:,.0f}"


def shared_memory() -> Iterator[Finding]:
    """Reports the size of /dev/shm, where NCCL and the workers of a DataLoader exchange data."""
    try:
        free, total = (lambda about: (about.free, about.total))(shutil.disk_usage("/dev/shm"))
    except OSError as error:
        yield Finding("shared memory", NOTE, f"/dev/shm cannot be used ({error.strerror})", "mount a tmpfs there")
        return
    sizes = f"/dev/shm has {_gib(free)} free of {_gib(total)}"
    few = free < LITTLE_SHARED
    yield Finding("shared memory", NOTE if few else OK, sizes, "NCCL and DataLoader need more: docker run --shm-size=8g" if few else "")


def ports() -> Iterator[Finding]:
    """Reports whether ranks can listen on this machine, and whether torchrun's default port is free."""
    try:
        free_port()
    except OSError as error:
        yield Finding("ports", FAULT, f"127.0.0.1 has no free port ({error.strerror})", "bring up the loopback interface, where ranks meet")
        return
    with socket.socket() as attempt:
        taken = attempt.connect_ex(("127.0.0.1", MASTER_PORT)) == 0
    remedy = "start runs with torchrun --master-port, or --standalone" if taken else ""
    yield Finding("ports", NOTE if taken else OK, f"{MASTER_PORT} is {'taken' if taken else 'free'}", remedy)


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nothing uses. Raises `OSError` if there is none."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def cpus() -> Iterator[Finding]:
    """Reports the CPUs of this process and how busy they are."""
    usable, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    busy = load > usable
    remedy = "measured times will be too long: stop other work first" if busy else ""
    yield Finding("CPUs", NOTE if busy else OK, f"{usable} of {os.cpu_count()}, load {load:.1f}", remedy)


def clock() -> Iterator[Finding]:
    """Reports the resolution of the clock of timelines."""
    about = time.get_clock_info("perf_counter")
    coarse = about.resolution > 1e-6
    resolution = f"{about.implementation}, resolution {about.resolution * 1e9:.0f} ns"
    yield Finding("clock", NOTE if coarse else OK, resolution, "passes below it appear to take no time" if coarse else "")


def gpus() -> Iterator[Finding]:
    """Reports the GPUs that the NVIDIA driver knows, whatever PyTorch is installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding("GPU driver", OK, "no NVIDIA driver")
        return
    query = [tool, "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("GPU driver", NOTE, f"nvidia-smi fails ({type(error).__name__})", "restart or reinstall the driver")
        return
    for index, line in enumerate(output.splitlines()):
        name, total, free, driver = (cell.strip() for cell in line.split(","))
        yield Finding("GPU driver", OK, f"GPU {index}: {name}, {free} free of {total}, driver {driver}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (open_files, processes, shared_memory, ports, cpus, clock, gpus)


class Need(NamedTuple):
    """A requirement of an extra, such as `torch>=2.6`: the package, and the least version or ""."""

    package: str
    least: str

    def lacking(self) -> str:
        """Returns what is wrong with the installed package; "" if it serves."""
        try:
            installed = version(self.package)
        except PackageNotFoundError:
            return f"no {self.package}"
        return f"{self.package} {installed}, not {self.least}" if _numbers(installed) < _numbers(self.least) else ""


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text.partition("+")[0])]


def needs_of_extras() -> dict[str, list[Need]]:
    """Returns the requirements of each extra of the installed zerobubble, and of the extras that it includes."""
    direct: dict[str, list[str]] = {}
    for text in requires("zerobubble") or ():
        match = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?([^;]*);.*extra == ['\"]([\w-]+)['\"]", text)
        if match is not None:
            name, included, versions, extra = match.groups()
            least = re.search(r">=([\d.]+)", versions)
            package = [f"{name}>={least[1] if least else ''}"]
            direct.setdefault(extra, []).extend((included or "").split(",") if name == "zerobubble" else package)
    return {extra: list(dict.fromkeys(_needs(extra, direct))) for extra in ENABLES}


def _needs(extra: str, direct: Mapping[str, list[str]]) -> Iterator[Need]:
    for requirement in direct.get(extra, ()):
        package, has_version, least = requirement.partition(">=")
        if has_version:
            yield Need(package, least)
        else:
            yield from _needs(requirement, direct)


def extras() -> Iterator[Finding]:
    """Reports the installed and the missing packages of each extra."""
    try:
        needs = needs_of_extras()
    except PackageNotFoundError:
        yield Finding("extras", NOTE, "zerobubble runs from its sources", "pip install . in the repository")
        return
    absent = []
    for extra, wanted in needs.items():
        if any(need.package == FRAMEWORKS.get(extra) and need.lacking().startswith("no ") for need in wanted):
            absent.append(extra)
            continue
        lacking = [fault for need in wanted if (fault := need.lacking())]
        if lacking:
            yield Finding(extra, NOTE, f"{', '.join(lacking)}, for {ENABLES[extra]}", install(extra))
        else:
            yield Finding(extra, OK, ", ".join(f"{need.package} {version(need.package)}" for need in wanted))
    if absent:
        yield Finding("optional", OK, f"extras that are not installed: {', '.join(absent)}")


class Trial(NamedTuple):
    """The two ranks that train a step, running since `start`."""

    ranks: tuple[subprocess.Popen[str], ...]

    @classmethod
    def start(cls, *options: str, module: str = "trial") -> Trial:
        """Starts the ranks, which run a `module` of zerobubble.runtime with these options. They meet at a free port if there is one."""
        try:
            port = free_port()
        except OSError:
            port = MASTER_PORT
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", f"zerobubble.runtime.{module}", *options, str(port)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return cls(tuple(subprocess.Popen([*command, str(rank)], text=True, env=environment, **pipes) for rank in (0, 1)))

    def ends(self, timeout: float) -> list[RankReports]:
        """Returns what the ranks reported, once both have ended, after `timeout` seconds at the latest."""
        deadline = time.monotonic() + timeout
        return [_end_of(rank, deadline) for rank in self.ranks]

    def findings(self, timeout: float) -> Iterator[Finding]:
        """Yields what the ranks of a trial found."""
        ends = self.ends(timeout)
        usable, trained = ends[0].reports[:1], [end.reports[1] for end in ends if len(end.reports) == 2]
        for report in usable:
            yield from backends(report)
            if "nccl" in report:
                yield from between_gpus(report)
        if len(trained) < len(ends):
            faults = "; ".join(f"rank {rank}: {end.fault}" for rank, end in enumerate(ends) if end.fault)
            yield Finding("two ranks", FAULT, faults, "see the checks above; on a busy machine, give a longer --timeout")
            return
        yield from two_ranks(*trained)


class RankReports(NamedTuple):
    """The reports of a rank of the trial; `fault` is the reason why others are missing."""

    reports: list[dict[str, Any]]
    fault: str


def _end_of(rank: subprocess.Popen[str], deadline: float) -> RankReports:
    """Waits for a rank of the trial until the `deadline` of `time.monotonic`, then kills it."""
    fault = ""
    try:
        output, errors = rank.communicate(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        rank.kill()
        output, errors = rank.communicate()
        fault = "not ready in time"
    if not fault and rank.returncode:
        fault = errors.strip().rpartition("\n")[2] or f"ended with exit code {rank.returncode}"
    return RankReports([json.loads(line) for line in output.splitlines() if line.startswith("{")], fault)


def backends(usable: Mapping[str, Any]) -> Iterator[Finding]:
    """Reports what PyTorch can use: backends for messages, and devices."""
    names = usable["backends"]
    if "gloo" in names:
        yield Finding("backends", OK, ", ".join(names))
    else:
        yield Finding("backends", FAULT, ", ".join(names) or "none", "zerobubble needs gloo: install a build of torch with USE_DISTRIBUTED")
    for device in usable["devices"]:
        yield Finding("devices", OK, f"{device['type']}:{device['index']} {device['name']}, {_gib(device['bytes'])}")
    if not usable["devices"]:
        built = f"torch {usable['torch']} is built for {'CUDA ' + usable['cuda'] if usable['cuda'] else 'CPUs'}"
        driver = shutil.which("nvidia-smi") is not None
        remedy = "install a build of torch for this driver" if driver else ""
        yield Finding("devices", NOTE if driver else OK, f"no GPU, stages run on CPUs; {built}", remedy)


def between_gpus(usable: Mapping[str, Any]) -> Iterator[Finding]:
    """Reports what keeps ranks from exchanging messages between GPUs over NCCL: its version, sharing, free memory and peer access."""
    devices, free, staged = usable["devices"], usable["free"], "until then, messages go through host memory"
    if not devices:
        driver = "the driver is there" if shutil.which("nvidia-smi") else "there is no NVIDIA driver"
        remedy = "install a driver, and a build of torch that it supports"
        yield Finding("GPU", FAULT, f"torch {usable['torch']} can use no GPU, and {driver}", remedy)
        return
    if usable["nccl"] is None:
        yield Finding("NCCL", NOTE, f"torch {usable['torch']} has no NCCL", f"install a build with it; {staged}")
    else:
        yield Finding("NCCL", OK, usable["nccl"])
    is_alone = len(devices) == 1
    yield Finding(
        "GPUs", NOTE if is_alone else OK, counted(len(devices), "GPU"), f"NCCL needs one for each rank; {staged}" if is_alone else ""
    )
    for device, left in zip(devices, free, strict=True):
        busy = left < device["bytes"] * LEAST_FREE
        fact = f"GPU {device['index']} has {_gib(left)} free of {_gib(device['bytes'])}"
        yield Finding("GPU memory", NOTE if busy else OK, fact, "end other programs on it" if busy else "")
    for first, second in usable["apart"]:
        fact = f"GPUs {first} and {second} cannot access each other's memory"
        yield Finding("peer access", NOTE, fact, "NCCL copies through host memory between them: see nvidia-smi topo -m")


def two_ranks(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Finding]:
    """Reports the step of two ranks, and how far apart their clocks are."""
    difference, seconds = (max(first[figure], second[figure]) for figure in ("difference", "seconds"))
    step = f"gradients differ from one device by {difference:.1e}, over {first['transport']}, in {seconds:.2f} s"
    if difference <= TOLERANCE:
        yield Finding("two ranks", OK, step)
    else:
        yield Finding("two ranks", FAULT, step, f"at most {TOLERANCE:g} is rounding: please report it, with this output")
    skew = abs(first["skew"])
    apart = skew > MOST_SKEW_S + first["skew_error"]
    remedy = "timelines of ranks do not fit together: run all of them in one time namespace" if apart else ""
    yield Finding("clock skew", NOTE if apart else OK, f"{skew * 1e6:.0f} µs, measured to {first['skew_error'] * 1e6:.0f} µs", remedy)


def measure(timeout: float, speeds: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yields the speeds of two ranks, and adds what each of them measured to `speeds`."""
    ends = Trial.start(module="speeds").ends(timeout)
    if faults := "; ".join(f"rank {rank}: {end.fault}" for rank, end in enumerate(ends) if end.fault):
        yield Finding("speeds", FAULT, faults, "on a busy machine, give a longer --timeout")
        return
    speeds += [end.reports[0] for end in ends]
    slowest = _slowest(speeds)
    products = ", ".join(f"{_speed(flops)} in {name}" for name, flops in slowest["products"].items())
    yield Finding("products", OK, products)
    forward, backward = slowest["attention"]
    yield Finding("attention", OK, f"{_speed(forward)} in F, {_speed(backward)} in B, over {slowest['attended']:,} tokens in bf16")
    yield Finding("memory", OK, f"{show_bytes(round(slowest['copied']))}/s read and written")
    between = f"over {slowest['backend']}, latency {slowest['latency'] * 1e6:.0f} µs"
    yield Finding("messages", OK, f"{show_bytes(round(slowest['sent']))}/s {between}")
    yield Finding("sums", OK, f"{show_bytes(round(slowest['summed']))}/s")


def _slowest(speeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the slower rank's value of each figure. A rank that shares a GPU measures messages only."""
    computing = [speed for speed in speeds if "products" in speed]
    products = {name: min(speed["products"][name] for speed in computing) for name in computing[0]["products"]}
    attention = [min(pair) for pair in zip(*(speed["attention"] for speed in computing), strict=True)]
    least = {name: min(speed[name] for speed in speeds) for name in ("sent", "summed", "bytes")}
    copied, latency = min(speed["copied"] for speed in computing), max(speed["latency"] for speed in speeds)
    return {**computing[0], **least, "products": products, "attention": attention, "copied": copied, "latency": latency}


def gpu_of(speeds: Sequence[Mapping[str, Any]]) -> GPU:
    """Returns the measured speeds of ranks as the figures of a GPU. Half precision is bf16; links between hosts are those between ranks."""
    slowest = _slowest(speeds)
    flops = (("bf16", slowest["products"]["bf16"]),)
    link, tokens = min(slowest["sent"], slowest["summed"]), slowest["attended"]
    long = [
        reached * (1 + overhead / tokens) / (1 + overhead / ATTENTION_TOKENS)
        for reached, overhead in zip(slowest["attention"], ATTENTION_OVERHEAD, strict=True)
    ]
    return GPU(
        slowest["name"],
        flops,
        slowest["processors"],
        slowest["bytes"],
        slowest["copied"],
        link,
        slowest["domain"],
        link,
        sustained=flops,
        attention=(long[0], long[1]),
        effective=True,
    )


def _speed(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
