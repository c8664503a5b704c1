"""Several hosts, each a network namespace with its own processes, host name and /dev/shm, with bad links between them.

They train with one device's numbers, share memory where it is really shared, and end in bounded time with one clear error when the cable
is cut, and go on when it is mended.

Links have latency, jitter and loss.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zerobubble as zb
from tests.procs.hosts.hosts import Hosts, Quality, store_on, why_not
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.refusals import states
from zerobubble.runtime.transport.rank_process import this_process

pytestmark = [pytest.mark.ranks_wait, pytest.mark.skipif(bool(why_not()), reason=why_not())]

M = 4
TIMEOUT_S = 10.0
LONGEST_S = 120.0
"""How long any wait of a test may take."""
REPORTED_S = 40.0
"""How far beyond the timeout a rank may learn that hosts are cut off: it waits for answers, and for the store."""
NOT_IDEAL = Quality(delay_ms=1, jitter_ms=1, loss=0.002)


class World(NamedTuple):
    """Hosts, and ranks on them."""

    hosts: Hosts
    ranks: Ranks


@contextmanager
def world_of(names: list[str], quality: Quality, *, ranks_each: int) -> Iterator[World]:
    with Hosts(names, quality) as hosts:
        places = [pid for pid in hosts.pids for _ in range(ranks_each)]
        ranks = Ranks(len(places), store=store_on(0), hosts=places)
        try:
            ranks.run(reach_the_store, ranks=len(places))  # a cut before torch has connected all ranks would be torch's to report
            yield World(hosts, ranks)
        finally:
            ranks.kill()


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    """Two hosts of one name with two ranks each."""
    with world_of(["node", "node"], NOT_IDEAL, ranks_each=2) as world:
        yield world


class Trained(NamedTuple):
    """The results of a few steps on a rank."""

    losses: list[float]
    transport: str
    why: str
    names: tuple[str, str]
    shared: list[str]
    place: str


def train(group: Any, steps: int, schedule: str = "zb-h1", over_hosts: str = "pp") -> Trained:
    """Train a pipeline over all ranks, or where `over_hosts` is "dp", one on each host."""
    size = dist.get_world_size(group)
    mesh = DeviceMesh("cpu", torch.arange(size).reshape(2, -1), mesh_dim_names=("dp", "pp")) if over_hosts == "dp" else None
    replica = 0 if mesh is None else mesh.get_local_rank("dp")
    placed: Any = {"group": group} if mesh is None else {"mesh": mesh}
    with zb.Pipeline(build, schedule, M, loss_fn, timeout=20, **placed) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for step in range(steps):
            losses.append(pipe.step(*batch(M, 10 * step + replica)).item())
            optimizer.step()
            optimizer.zero_grad()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        found = pipe.transport
        return Trained(losses, found.name, found.why, (platform.node(), boot), os.listdir("/dev/shm"), this_process().place)


def on_one_device(stages: int, steps: int, replicas: int = 1) -> list[float]:
    modules = [build(stage, stages) for stage in range(stages)]
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    losses = []
    for step in range(steps):
        shares = [one_device(modules, M, *batch(M, 10 * step + replica)) for replica in range(replicas)]
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= replicas
        losses.append(sum(share.item() for share in shares) / replicas)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.long)])
def test_a_pipeline_over_hosts_has_the_numbers_of_one_device(two: World, schedule: str) -> None:
    """Every host name says that the ranks are on one machine; they still detect and report that they share no memory."""
    found = two.ranks.run(train, 3, schedule, ranks=4)
    for message in found:
        assert message.losses == pytest.approx(on_one_device(8 if schedule == "zb-v" else 4, 3), abs=1e-9)
        assert message.transport == "gloo"
        states(message.why, "rank 1", "rank 2")
        assert not message.shared, "a pipeline leaves nothing in /dev/shm"
    assert len({message.names for message in found}) == 1, "the hosts are to have one name"
    assert len({message.place for message in found}) == 2, "the processes of a rank can be watched from its host alone"


@pytest.mark.long
def test_pipelines_within_hosts_share_memory_and_replicas_sum_over_the_cable(two: World) -> None:
    for result in two.ranks.run(train, 3, "zb-h1", "dp", ranks=4):
        assert result.losses == pytest.approx(on_one_device(2, 3, replicas=2), abs=1e-9)
        assert result.transport == "shared-memory"


@pytest.mark.long
def test_containers_of_one_pod_share_memory_which_needs_no_folder(two: World) -> None:
    """Two containers with a /dev/shm and processes of their own, but one network: descriptors can be passed, so memory is shared."""
    ranks = Ranks(2, store=store_on(0).replace("29500", "29501"), hosts=[two.hosts.container(0), two.hosts.container(0)])
    try:
        for result in ranks.run(train, 2, ranks=2):
            assert result.losses == pytest.approx(on_one_device(2, 2), abs=1e-9)
            assert result.transport == "shared-memory"
    finally:
        ranks.kill()


class End(NamedTuple):
    """How training ended on a rank: which error was raised after how many steps, and when."""

    steps: int
    kind: str
    text: str
    rank: int | None
    when: float


def train_until_an_error(group: Any, ready: str) -> End:
    """Step until something is raised; after a few steps this rank says so with a file of this name."""
    steps = 0
    try:
        with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, timeout=TIMEOUT_S) as pipe:
            while True:
                pipe.step(*batch(M))
                steps += 1
                if steps == 3:
                    Path(f"{ready}{dist.get_rank()}").touch()
    except Exception as error:
        return End(steps, type(error).__name__, str(error), getattr(error, "rank", None), time.monotonic())


def ends_after(world: World, folder: Path, act: Any) -> tuple[list[End], float]:
    """The ends of all ranks, and the longest that one took to hear, when all train and then `act()` is done."""
    size = len(world.ranks.processes)
    world.ranks.start(train_until_an_error, str(folder / "ready"), ranks=size)
    until = time.monotonic() + LONGEST_S
    while len(ready := list(folder.glob("ready*"))) < size:
        if any(pipe.poll() for pipe in world.ranks.pipes):
            raise AssertionError(f"a rank ends before all train: {[world.ranks.outcome(rank) for rank in range(size)]}")
        assert time.monotonic() < until, f"only {sorted(ready)} train after {LONGEST_S:g} s"
        time.sleep(0.02)
    began = time.monotonic()
    act()
    ends = [world.ranks.outcome(rank) for rank in range(size)]
    heard = [end for state, end in ends if state == "ok"]
    return heard, max(end.when for end in heard) - began


def reach_the_store(group: Any) -> None:
    """Wait until the store answers five times in a row at once.

    After a cut, TCP retries at growing intervals. The store serves all ranks in one thread, which a single answer to a rank that was cut
    off can still hold up.
    """
    in_a_row = 0
    while in_a_row < 5:
        began = time.monotonic()
        dist.distributed_c10d._get_default_store().check(["nothing"])
        in_a_row = in_a_row + 1 if time.monotonic() - began < 0.5 else 0
        time.sleep(0.2)


def judge_cut(ends: list[End], seconds: float, near: set[int], far: set[int]) -> None:
    """Ranks `near` the store name those that are cut off, in the same words; ranks `far` from it name the rank with the store."""
    assert all(end.kind == "PipelineError" for end in ends), ends
    assert {end.rank for end in (ends[rank] for rank in near)} <= far
    assert {end.rank for end in (ends[rank] for rank in far)} == {0}
    assert len({ends[rank].text for rank in near}) == len({ends[rank].text for rank in far}) == 1, ends
    assert all("or the network is cut" in end.text for end in ends)
    assert seconds < TIMEOUT_S + REPORTED_S


@pytest.mark.long
def test_a_cut_cable_is_one_clear_error_in_bounded_time_and_training_goes_on_when_it_is_mended(two: World, tmp_path: Path) -> None:
    ends, seconds = ends_after(two, tmp_path, lambda: two.hosts.cut(1))
    judge_cut(ends, seconds, {0, 1}, {2, 3})
    two.hosts.mend(1)
    two.ranks.run(reach_the_store, ranks=4)
    for result in two.ranks.run(train, 2, ranks=4):
        assert result.losses == pytest.approx(on_one_device(4, 2), abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("cut_off", [1, pytest.param(0, marks=pytest.mark.long)])
def test_an_interface_that_goes_down_leaves_no_process_behind(cut_off: int, tmp_path: Path) -> None:
    """The rank on the other host is named, and every process ends by itself though nobody answers it."""
    with world_of(["a", "b"], Quality(), ranks_each=1) as world:
        ends, seconds = ends_after(world, tmp_path, lambda: world.hosts.take_down(cut_off))
        judge_cut(ends, seconds, {0}, {1})
        for pipe in world.ranks.pipes:
            pipe.close()
        for process in world.ranks.processes:
            assert wait([process.sentinel], LONGEST_S), "a rank does not end"


@pytest.mark.long
def test_a_bad_network_changes_no_number() -> None:
    with world_of(["a", "b", "c", "d"], Quality(delay_ms=5, jitter_ms=10, loss=0.03), ranks_each=1) as world:
        for result in world.ranks.run(train, 3, ranks=4, seconds=120):
            assert result.losses == pytest.approx(on_one_device(4, 3), abs=1e-9)


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    """Four hosts with a rank each."""
    with world_of(["a", "b", "c", "d"], NOT_IDEAL, ranks_each=1) as world:
        yield world


@pytest.mark.long
def test_the_host_that_is_cut_off_is_named_by_all_others(four: World, tmp_path: Path) -> None:
    ends, seconds = ends_after(four, tmp_path, lambda: four.hosts.cut(2))
    four.hosts.mend(2)
    four.ranks.run(reach_the_store, ranks=4)
    judge_cut(ends, seconds, {0, 1, 3}, {2})
    assert {ends[rank].rank for rank in (0, 1, 3)} == {2}


@pytest.mark.long
def test_a_rank_cut_off_during_construction_is_named(four: World) -> None:
    four.hosts.cut(3)
    ends = [end for _, end in four.ranks.outcomes(train_until_an_error, "/nowhere/", ranks=4)]
    four.hosts.mend(3)
    four.ranks.run(reach_the_store, ranks=4)
    assert [(end.steps, end.kind) for end in ends] == [(0, "PipelineError")] * 4, ends
    assert [end.rank for end in ends] == [3, 3, 3, 0], ends


@pytest.mark.long
def test_a_rank_that_is_killed_alone_on_its_host_is_named_by_the_others(four: World, tmp_path: Path) -> None:
    """Only the closed connections show that its process ended. This is the last test, since it ends a rank."""
    ends, seconds = ends_after(four, tmp_path, four.ranks.processes[1].kill)
    assert {(end.kind, end.rank) for end in ends} == {("PipelineError", 1)}, ends
    assert seconds < REPORTED_S
