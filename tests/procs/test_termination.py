"""A rank that gets SIGTERM notifies the others before it ends, and torchrun names the rank at fault.

The user's own signal handlers stay installed.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.programs import torchrun
from tests.procs.ranks import Ranks
from tests.procs.signs import await_signs
from tests.procs.versions import needs_all_that_ended
from tests.refusals import states
from zerobubble.runtime.transport.contact import Waiting

pytestmark = pytest.mark.ranks_wait

M = 8
LONG_S, SOON_S = 100.0, 50.0
"""The timeout of pipelines that must not need it, and the time within which the others must know."""


def await_the_signal(group: Any, still: int, victim: int, doing: str, folder: Path) -> tuple[float, str, int | None]:
    """Rank `still` stays in a forward pass, and the others wait for its messages. Returns time, text and rank of the error on this rank.

    A file signals to the test that the `victim` is `doing` what the case asks for. Rank `still` continues when the test makes one.
    """

    def stay(module: Any, inputs: Any) -> None:
        if not (folder / "still").exists():
            (folder / "still").touch()
            await_signs(folder / "over")

    def signal_when_it_waits(waiting: Waiting) -> None:
        while (now := waiting.now) is None or now[1] != doing:
            time.sleep(0.01)
        (folder / "waits").touch()

    with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, timeout=LONG_S) as pipe:
        pipe.step(*batch(M))
        if pipe.rank == still:
            for stage in pipe.modules.values():
                stage.register_forward_pre_hook(stay)
        elif pipe.rank == victim:
            threading.Thread(target=signal_when_it_waits, args=(pipe._session.transport.waiting,), daemon=True).start()
        try:
            pipe.step(*batch(M))
        except zb.PipelineError as error:
            return time.time(), str(error), error.rank
    raise AssertionError("no rank got an error")


@pytest.mark.parametrize(
    ("victim", "doing", "hosted"),
    [
        (2, "at 'run 2F0' (F of stage 2, microbatch 0)", False),
        pytest.param(3, "waiting for the activation of stage 2, microbatch 0", False, marks=pytest.mark.long),
        pytest.param(0, "waiting for the gradient of stage 1, microbatch 0", True, marks=pytest.mark.long),
    ],
)
def test_a_terminated_rank_is_named_by_the_others(victim: int, doing: str, hosted: bool, tmp_path: Path) -> None:
    """Rank 2 is in Python and looks up when it comes out, the others in waits that hear nothing. Rank 0 may have the store."""
    world, still = Ranks(4, hosted=hosted), 2
    try:
        world.start(await_the_signal, still, victim, doing, tmp_path, ranks=4)
        await_signs(tmp_path / "still", *([] if victim == still else [tmp_path / "waits"]))
        terminated = time.time()
        world.processes[victim].terminate()
        world.processes[victim].join(SOON_S)
        (tmp_path / "over").touch()
        assert world.processes[victim].exitcode == -signal.SIGTERM
        outcomes = [world.outcome(rank) for rank in range(4) if rank != victim]
        assert all(state == "ok" for state, _ in outcomes), outcomes
        for when, text, rank in (result for _, result in outcomes):
            states(text, f"rank {victim}", "SIGTERM", foreign=doing)
            assert rank == victim
            assert when - terminated < SOON_S
    finally:
        world.kill()


def who_handles(group: Any) -> tuple[bool, bool, bool, bool]:
    """Whether SIGTERM is handled by the pipeline while it is open, and not after it, in another thread, or where it was handled."""

    def is_taken() -> bool:
        with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group):
            return signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, mine)

    def mine(number: int, frame: Any) -> None:
        return

    found: list[bool] = [is_taken(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL]
    thread = threading.Thread(target=lambda: found.append(is_taken()))
    thread.start()
    thread.join()
    signal.signal(signal.SIGTERM, mine)
    try:
        found.append(is_taken() or signal.getsignal(signal.SIGTERM) is not mine)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert signal.set_wakeup_fd(-1) == -1
    return found[0], found[1], found[2], found[3]


@pytest.mark.long
def test_the_users_signal_handler_is_kept() -> None:
    """In processes of its own: in shared ones an earlier test may have left a pipeline open, whose handler stays."""
    world = Ranks(2)
    try:
        assert world.run(who_handles, ranks=2) == [(True, True, False, False)] * 2
    finally:
        world.kill()


PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist, zerobubble as zb

def act(module, inputs):
    if dist.get_rank() == 1:
        if sys.argv[1] == "boom":
            raise ValueError("boom")
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(30)

dist.init_process_group("gloo")
pipe = zb.Pipeline(lambda stage, num_stages: torch.nn.Linear(4, 4), "zb-h1", 4, torch.nn.functional.mse_loss)
pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
for stage in pipe.modules.values():
    stage.register_forward_pre_hook(act)
pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
"""


@pytest.mark.parametrize(
    ("act", "exitcode", "message"),
    [
        pytest.param(
            "boom",
            "(1|-15)",
            "rank 1 failed at 'run 1F0' (F of stage 1, microbatch 0): ValueError",
            marks=(needs_all_that_ended, pytest.mark.long),
        ),
        pytest.param(
            "SIGTERM", "-15", "rank 1 received SIGTERM while it was at 'run 1F0' (F of stage 1, microbatch 0)", marks=pytest.mark.long
        ),
        pytest.param("SIGKILL", "-9", "Signal 9 (SIGKILL) received by PID", marks=pytest.mark.long),
    ],
)
def test_torchrun_names_the_culprit(act: str, exitcode: str, message: str, tmp_path: Path) -> None:
    done = torchrun(PROGRAM, tmp_path, 3, act)
    assert done.returncode != 0
    _, cause = done.stderr.split("Root Cause (first observed failure):")
    assert re.search(r"rank +: 1 \(local_rank: 1\)", cause), cause
    assert re.search(rf"exitcode +: {exitcode} ", cause), cause
    assert message in cause, cause
