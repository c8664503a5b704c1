"""Two torchrun agents, as on two machines: a rank is killed, its agent ends its other ranks, and the rest continue training.

Covers rank 0, if the store is a process of its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.procs.programs import LONGEST_S, ROOT
from tests.procs.test_torchrun import expected_losses

pytestmark = pytest.mark.ranks_wait

STEPS = 10
"""With a pause after each, so that the job is not over before the test comes to kill a rank."""
EXAMPLE = str(ROOT / "examples" / "go_on.py")


class Job:
    """Two agents with two ranks each that run the example, and the store, a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._log.touch()
        self._start("--open-store=0")
        self.wait_for("the store is open")
        (port,) = re.findall(r"open at port (\d+)", self.log)
        agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=job", "--rdzv-backend=c10d"]
        agent += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=is_host=0"]
        for _ in range(2):
            self._start(f"--store=localhost:{port}", f"--steps={STEPS}", "--pause=0.8", launcher=agent)

    def _start(self, *arguments: str, launcher: list[str] | None = None) -> None:
        command = [sys.executable, *(launcher or []), EXAMPLE, *arguments]
        found = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log.open("a") as out:
            self.processes.append(subprocess.Popen(command, cwd=self._folder, env=found, stdout=out, stderr=subprocess.STDOUT))

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks."""
        return {int(rank): int(process) for rank, process in re.findall(r"rank (\d+) of agent \d+ is process (\d+)", self.log)}

    def losses(self, rank: int) -> list[float]:
        return [float(loss) for loss in re.findall(rf"rank {rank} step \d+ loss (\S+)\n", self.log)]

    def wait_for(self, words: str, count: int = 1) -> None:
        end = time.monotonic() + 2 * LONGEST_S
        while self.log.count(words) < count:
            assert time.monotonic() < end, f"{words!r} was not printed {count} times: {self.log}"
            assert any(process.poll() is None for process in self.processes[1:] or self.processes), self.log
            time.sleep(0.05)

    def wait_for_the_end_of_an_agent(self) -> None:
        """One that ends with its rank may take longer to do so than the others to train on."""
        end = time.monotonic() + LONGEST_S
        while all(process.poll() is None for process in self.processes[1:]):
            assert time.monotonic() < end, f"no agent ends: {self.log}"
            time.sleep(0.05)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    started = Job(tmp_path)
    yield started
    started.kill()


@pytest.mark.long
def test_the_ranks_of_another_agent_train_on_when_an_agent_ends_with_rank_0(job: Job) -> None:
    """Rank 0, in whose process or agent the store usually is, may go, too."""
    job.wait_for("step 2 loss", 4)
    os.kill(job.ranks()[0], signal.SIGKILL)
    job.wait_for("is through", 2)
    for rank in (2, 3):
        losses = job.losses(rank)
        assert len(losses) == STEPS, job.log
        assert max(abs(loss / theirs - 1) for loss, theirs in zip(losses, expected_losses(STEPS), strict=True)) < 1e-11
    job.wait_for_the_end_of_an_agent()
    assert sorted(process.poll() is None for process in job.processes) == [False, True, True], job.log
