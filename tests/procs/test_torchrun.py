"""Real torchrun agents: the job restarts after a killed rank, a killed agent ends its ranks, and nothing is left behind.

A killed rank costs the steps since the last checkpoint, and no loss changes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.survive import batch, build
from tests.procs.programs import LONGEST_S, ROOT, programs_of

pytestmark = pytest.mark.ranks_wait

SOON_S = 60.0
"""By when the ranks of an agent that ends must have ended."""


class Job:
    """An agent with two ranks that run the example in `folder`. The process of each rank is printed on stdout."""

    def __init__(self, folder: Path, *options: str, steps: int = 10**6, pause_s: float = 0.0) -> None:
        self.folder = folder
        self._temporary = folder / "temporary"
        self._temporary.mkdir(parents=True)
        self._log = folder / "log"
        message = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(self._temporary)}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
        program = [str(ROOT / "examples" / "survive.py"), "--checkpoint", "saved", "--steps", str(steps), "--pause", str(pause_s)]
        with self._log.open("w") as out:
            self.agent = subprocess.Popen([*launcher, *program], cwd=folder, env=message, stdout=out, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ranks(self, attempt: int) -> dict[int, int]:
        """The processes of an attempt's ranks."""
        found = re.findall(rf"attempt {attempt}: rank (\d+) is process (\d+)", self.log)
        return {int(rank): int(process) for rank, process in found}

    def losses(self) -> dict[int, float]:
        found = re.findall(r"step (\d+) loss (\S+)\n", self.log)
        assert len(dict(found)) == len(found), "a step was made twice, and reported twice"
        return {int(step): float(loss) for step, loss in found}

    def wait_for(self, words: str) -> None:
        end = time.monotonic() + LONGEST_S
        while words not in self.log:
            assert time.monotonic() < end, f"no output has {words!r}: {self.log}"
            assert self.agent.poll() is None, self.log
            time.sleep(0.02)

    def seconds_to_the_end(self) -> float:
        """How long all ranks still live."""
        began = time.monotonic()
        while any(lives(process) for process in self.ranks(0).values()):
            assert time.monotonic() - began < LONGEST_S, self.log
            time.sleep(0.02)
        return time.monotonic() - began

    def left_behind(self) -> set[str]:
        """What is in its folders but what belongs there: the checkpoint, and the logs and cache that torch leaves."""
        there = {path.name for path in (*self.folder.iterdir(), *self._temporary.iterdir())}
        return {name for name in there if not name.startswith(("torchelastic_", "torchinductor_"))} - {"log", "temporary", "saved"}

    def kill(self) -> None:
        self.agent.kill()
        self.agent.wait()
        for process in self.ranks(0).values():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    """What a test starts."""
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()


def expected_losses(steps: int) -> list[float]:
    """Those of one device that nobody kills."""
    model = nn.Sequential(*(build(stage, 2) for stage in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.long
def test_a_killed_rank_starts_the_job_again_from_its_last_checkpoint(jobs: list[Job], tmp_path: Path) -> None:
    job = Job(tmp_path / "job", "--max-restarts=1", steps=8, pause_s=1.0)  # so that it is not over before a rank is killed
    jobs.append(job)
    job.wait_for("step 2 loss")
    os.kill(job.ranks(0)[1], signal.SIGKILL)
    assert job.agent.wait(LONGEST_S) == 0, job.log
    assert sorted(job.ranks(1)) == [0, 1], job.log
    losses = job.losses()
    assert list(losses) == list(range(8))
    for loss, expected in zip(losses.values(), expected_losses(8), strict=True):
        assert abs(loss / expected - 1) < 1e-12
    assert not job.left_behind()


@pytest.mark.long
def test_two_jobs_of_a_machine_train_apart_and_each_ends_with_its_agent(jobs: list[Job], tmp_path: Path) -> None:
    for name in ("one", "other"):
        jobs.append(Job(tmp_path / name, "--max-restarts=3"))  # torch may choose a port for its store that somebody else takes first
    for job in jobs:
        job.wait_for("step 2 loss")
        losses = job.losses()
        for step, expected in enumerate(expected_losses(3)):
            assert abs(losses[step] / expected - 1) < 1e-12
    killed, terminated = jobs
    killed.agent.kill()
    assert killed.seconds_to_the_end() < SOON_S
    steps = len(terminated.losses())
    terminated.wait_for(f"step {steps + 2} loss")
    terminated.agent.terminate()
    assert terminated.seconds_to_the_end() < SOON_S
    assert terminated.agent.wait(LONGEST_S) != 0
    # A job that ends while it writes or replaces a checkpoint leaves temporary files, which its next checkpoint removes.
    temporary = ("saved.writing-", "saved.written-", "saved.before-")
    assert not [name for job in jobs for name in job.left_behind() if not name.startswith(temporary)]


FAILING = """
import torch
from torch import distributed as dist, nn
import zerobubble as zb

dist.init_process_group("gloo")


def build(stage, num_stages):
    torch.manual_seed(stage)
    return nn.Linear(4, 4)


def boom(*_):
    raise ValueError("boom")


pipe = zb.Pipeline(build, "zb-h1", 4, nn.functional.mse_loss)
if pipe.rank == 1:
    pipe.modules[1].register_forward_hook(boom)
pipe.step(torch.ones(8, 4), torch.ones(8, 4))
"""


def screen_of(program: Path, **environment: str) -> list[str]:
    """The lines on the screen of a job of two ranks that fails, without rules."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(program.parent), **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 1
    return [line.strip() for line in done.stderr.splitlines() if line.strip("= ")]


@pytest.mark.long
@pytest.mark.parametrize("traceback", ["", "full"])
def test_the_screen_ends_with_the_rank_that_failed(tmp_path: Path, traceback: str) -> None:
    """The pass, the fault and the line. The other rank says in one line that it stopped."""
    program = tmp_path / "train.py"
    program.write_text(FAILING)
    lines = screen_of(program, ZEROBUBBLE_TRACEBACK=traceback)
    place = f"{program}:{1 + FAILING[: FAILING.index('raise')].count(chr(10))}"
    assert re.fullmatch(rf"rank 1 failed at 'run 1F0' .*ValueError: boom \({re.escape(place)}\)", lines[-1])
    first, failed = ([line for line in lines if line.startswith(f"[rank{rank}]")] for rank in (0, 1))
    internal = [line for line in first + failed if f"zerobubble{os.sep}runtime" in line]
    if traceback == "full":
        assert len(internal) > 5
    else:
        assert not internal
        (stopped,) = first
        assert f"(rank 0 stopped at {program}:" in stopped
        assert any(str(program) in line for line in failed)


@pytest.mark.long
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(7)", "sys.exit(7)"])
def test_the_root_cause_is_the_rank_that_is_gone_and_not_one_that_it_stopped(tmp_path: Path, end: str) -> None:
    """A dead process writes no error file, and torchrun dates it when it looks, after the other ranks have written theirs."""
    program = tmp_path / "train.py"
    program.write_text("import os, signal, sys\n" + FAILING.replace('raise ValueError("boom")', end))
    cause = screen_of(program)
    cause = cause[cause.index("Root Cause (first observed failure):") :]
    assert any(re.fullmatch(r"rank +: 1 \(local_rank: 1\)", line) for line in cause), cause


@pytest.mark.long
def test_a_rank_that_leaves_early_is_the_root_cause_with_what_it_left_out(tmp_path: Path) -> None:
    """It has no error of its own, and torchrun ends it with SIGTERM before the other rank's error file is read."""
    program = tmp_path / "train.py"
    leaves = "if pipe.rank == 1:\n    pipe.close()\n    time.sleep(1000)\n"
    program.write_text("import time\n" + FAILING[: FAILING.index("if pipe.rank")] + leaves + FAILING[FAILING.index("pipe.step") :])
    assert "rank 1 kept the others waiting: it was closing the pipeline" in screen_of(program)[-1]


@pytest.mark.long
def test_the_page_on_failures_restarts_after_a_killed_rank(tmp_path: Path) -> None:
    """Its losses continue where the checkpoint ended, and no step is missing."""
    (tmp_path / "restart.py").write_text(programs_of("docs/failures.md")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "restart.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"attempt (\d), step (\d): loss", done.stdout)
    assert steps == [("0", "0"), ("0", "1"), ("0", "2"), ("1", "3"), ("1", "4"), ("1", "5")]
