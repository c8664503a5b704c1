"""A forked child of a rank may end in any way: it neither hangs nor disturbs the rank's pipeline."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.models import batch, build, loss_fn
from tests.procs.programs import torchrun
from tests.procs.ranks import Ranks
from tests.refusals import raises

pytestmark = pytest.mark.ranks_wait

M = 8
LONGEST_S = 100.0


def end(pipes: list[zb.Pipeline]) -> None:
    return


def close(pipes: list[zb.Pipeline]) -> None:
    pipes[0].close()


def drop(pipes: list[zb.Pipeline]) -> None:
    pipes.clear()
    gc.collect()


def step(pipes: list[zb.Pipeline]) -> None:
    with raises(zb.PipelineError, "forked", "pipeline"):
        pipes[0].step(*batch(M))


def die(pipes: list[zb.Pipeline]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_terminated(pipes: list[zb.Pipeline]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LONGEST_S)


def how_it_ended(act: Callable[[list[zb.Pipeline]], None], pipes: list[zb.Pipeline]) -> int | None:
    """The exit status of a child that does `act`; None where it hangs."""
    child = os.fork()
    if child == 0:
        try:
            act(pipes)
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


ACTS = {end: 0, close: 0, drop: 0, step: 0, die: -signal.SIGKILL, be_terminated: -signal.SIGTERM}
"""What children do, and how they then end."""


def train_while_children_end(group: Any, transport: str) -> tuple[list[int | None], list[float], int]:
    """How each child of this rank ended, the loss of a step after each, and the connections that a child holds."""
    with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, timeout=LONGEST_S, transport=transport) as pipe:
        losses = [pipe.step(*batch(M)).item()]
        ended = []
        for act in ACTS:
            ended.append(how_it_ended(act, [pipe]))
            losses.append(pipe.step(*batch(M)).item())
        before = num_sockets()
        held = how_it_ended(lambda pipes: os._exit(num_sockets()), [pipe])
        return ended, losses, before - (held or 0)


def num_sockets() -> int:
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder itself, and what another thread has closed since
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(target.startswith("socket:") for target in targets)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@cpu_only("a forked child cannot use CUDA")
def test_a_pipeline_goes_on_however_its_forked_children_end(world: Ranks, transport: str) -> None:
    for ended, losses, closed in world.run(train_while_children_end, transport, ranks=2):
        assert ended == list(ACTS.values())
        assert len(set(losses)) == 1
        assert closed >= 2  # to the other rank, of topics and of tensors


PROGRAM = """
import multiprocessing, os, sys, threading
import torch, torch.distributed as dist, zerobubble as zb
from torch.utils.data import DataLoader

def put(queue):
    queue.put("done")

dist.init_process_group("gloo")
pipe = zb.Pipeline(lambda stage, num_stages: torch.nn.Linear(4, 4), "zb-h1", 4, torch.nn.functional.mse_loss)
zb.save("saved", pipe)
context = multiprocessing.get_context("fork")
for batch in DataLoader(torch.ones(16, 4), batch_size=8, num_workers=2, multiprocessing_context=context):
    loss = pipe.step(batch, torch.zeros(8, 4))
queue = context.Queue()
child = context.Process(target=put, args=(queue,))
child.start()
assert queue.get(timeout=100) == "done"
child.join(100)
assert child.exitcode == 0, child.exitcode
if os.fork() == 0:
    sys.exit(7)  # through every handler of the end that this process has inherited
alarm = threading.Timer(100, os._exit, [9])
alarm.start()
_, status = os.wait()
alarm.cancel()
assert os.waitstatus_to_exitcode(status) == 7, status
pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
print("done", flush=True)
"""


SAVED = """
import os, sys, threading
import torch, torch.distributed as dist, zerobubble as zb

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
with zb.Pipeline(lambda stage, num_stages: torch.nn.Linear(4, 4), "1f1b", 2, torch.nn.functional.mse_loss) as pipe:
    zb.save("saved", pipe)  # imports modules that hold the default process group until the interpreter frees them
    if os.fork() == 0:
        sys.exit(7)
    alarm = threading.Timer(100, os._exit, [9])
    alarm.start()
    _, status = os.wait()
    alarm.cancel()
    pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
print("the child ended with", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.long
def test_a_child_of_a_program_that_has_saved_ends_by_itself(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SAVED], cwd=tmp_path, capture_output=True, text=True, timeout=LONGEST_S * 2, check=False)
    assert done.stdout.split() == ["the", "child", "ended", "with", "7"], done.stderr


@pytest.mark.long
def test_children_of_every_kind_end_by_themselves(tmp_path: Path) -> None:
    done = torchrun(PROGRAM, tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
