"""What each rank runs: a training as a user writes it, whose calls, errors and losses go into the rank's diary."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zerobubble as zb
from tests.procs.models import InBackward, batch, build, loss_fn
from tests.procs.patience import bear_with_others
from tests.procs.random_signals import case as cases
from tests.procs.random_signals.case import Case
from tests.procs.random_signals.diary import Diary
from zerobubble.hooks import StepHook

MEETING_S = 10.0
"""How long torch waits for a message of the process group itself; when the ranks meet, up to five times that."""
MAX_NORM = 0.5
CHILD_S = 300.0


def live(case: Case, rank: int, folder: Path, address: str | int, bell: Connection) -> None:
    """The whole life of a rank process.

    `address` is that of the store, a port alone where a launcher holds it. The victim rings the `bell` when it begins the call in which it
    is to be struck.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore it
    os.setsid()  # so that its remaining children can be found by their session
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error{rank}")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")
    torch.set_num_threads(1)
    bear_with_others()
    script = Script(case, rank, Diary(folder / f"diary{rank}"), address, bell)
    code = script.run()
    del script
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


class Script:
    """One rank's training: `case.calls`, one after the other, until one raises."""

    def __init__(self, case: Case, rank: int, diary: Diary, address: str | int, bell: Connection) -> None:
        self.case = case
        self.rank = rank
        self.diary = diary
        self.pipe: zb.Pipeline
        self.optimizer: Any
        self._address = address
        self._bell = bell
        self._step = 0
        self._mesh: DeviceMesh | None = None
        self._come_to = dict.fromkeys(cases.PLACES, 0)

    def run(self) -> int:
        """Make every call; returns the exit status."""
        try:
            for number, name in enumerate(self.case.calls):
                self.diary.call = number
                self._fork_before(number)
                self.diary.write("begin")
                if self.rank == self.case.victim and number == self.case.call:
                    self._bell.send_bytes(b"now")
                getattr(self, f"do_{name}")()
                self.diary.write("end")
        except BaseException as error:
            self.diary.write("reported", [type(error).__name__, str(error), getattr(error, "rank", None)])
            traceback.print_exc()
            if not (self.case.all_go_on and isinstance(error, zb.ZeroBubbleError)):
                return 1
        else:
            return 0
        return self._go_on()

    def _go_on(self) -> int:
        """All ranks live and have heard of the error: train on with a new pipeline."""
        try:
            self.do_make()
            self.do_step()
            self.do_close()
        except BaseException as error:
            self.diary.write("reported again", [type(error).__name__, str(error), getattr(error, "rank", None)])
            traceback.print_exc()
            return 1
        return 0

    def come_to(self, place: str) -> None:
        """Code of the user's own, in which the deed may be done."""
        case = self.case
        is_there = self.rank == case.victim and place == case.place and self._come_to[place] == case.count
        self._come_to[place] += 1
        if is_there:
            self.diary.write("deed")
            if case.deed == cases.RAISE:
                raise ValueError("boom")
            if case.deed == cases.LEAVE:
                sys.exit(3)
            os._exit(7)

    def do_start(self) -> None:
        time.sleep(self.case.late[self.rank])

    def do_meet(self) -> None:
        timeout = timedelta(seconds=MEETING_S)
        if not isinstance(self._address, int):
            dist.init_process_group("gloo", init_method=self._address, rank=self.rank, world_size=self.case.ranks, timeout=timeout)
            self._mesh = _mesh(self.case)
            return
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._address), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.case.ranks)}
        dist.init_process_group("gloo", timeout=timeout)
        self._mesh = _mesh(self.case)

    def do_make(self) -> None:
        case = self.case
        self._step = 0
        self.pipe = zb.Pipeline(
            self._build,
            case.schedule,
            case.num_microbatches,
            self._loss,
            timeout=case.timeout,
            transport=case.transport,
            on_loss=lambda microbatch, loss: self.come_to("on_loss"),
            hooks=() if case.survives else [_Hook(self)],
            mesh=self._mesh,
            survive=case.survives,
        )
        plain = torch.optim.SGD(self.pipe.parameters(), lr=0.1)
        self.optimizer = zb.PostValidation(plain, self.pipe, max_norm=MAX_NORM) if case.validates else plain

    def _build(self, stage: int, num_stages: int) -> nn.Module:
        self.come_to("build")
        return nn.Sequential(_Own(self), build(stage, num_stages))

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.come_to("loss")
        return loss_fn(output, target)

    def do_step(self) -> None:
        loss = self.pipe.step(*batch(self.case.num_microbatches, self._step)).item()
        self.diary.write("loss", [self.pipe.schedule.num_stages, self._step, loss])
        self._step += 1
        if self.case.validates:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def do_clip(self) -> None:
        self.pipe.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def do_own(self) -> None:
        self.come_to("own")
        time.sleep(0.05)

    def do_eval_step(self) -> None:
        loss, _ = self.pipe.eval_step(*batch(self.case.num_microbatches, self._step))
        assert loss is not None
        self.diary.write("loss", [self.pipe.schedule.num_stages, self._step, loss.item()])

    def do_timeline(self) -> None:
        self.pipe.timeline()

    def do_profile(self) -> None:
        self.pipe.profile(*batch(self.case.num_microbatches), steps=1)

    def do_close(self) -> None:
        self.pipe.close()

    def do_end(self) -> None:
        dist.destroy_process_group()

    def _fork_before(self, number: int) -> None:
        child = self.case.child
        if child is None or child.rank != self.rank or child.before != number:
            return
        born = os.fork()
        if born:
            self.diary.write("child", born)
            return
        if child.does == "holds":
            time.sleep(CHILD_S)
        elif child.does == "closes" and hasattr(self, "pipe"):
            self.pipe.close()
        atexit._run_exitfuncs()
        self.diary.write("child ended")
        os._exit(0)


def _mesh(case: Case) -> DeviceMesh | None:
    """The ranks as replicas of a pipeline; all of them are given the same data, so the numbers are those of one."""
    if case.replicas == 1:
        return None
    return DeviceMesh("cpu", torch.arange(case.ranks).reshape(case.replicas, -1), mesh_dim_names=("dp", "pp"))


class _Hook(StepHook):
    """A hook of the user's own."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def on_step_begin(self, step: zb.hooks.TrainingStep) -> None:
        self._script.come_to("hook")


class _Own(nn.Module):
    """A layer of the user's own that passes everything on."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def forward(self, x: Tensor) -> Tensor:
        self._script.come_to("forward")
        y: Tensor = InBackward.apply(x, self._pass_back) if x.requires_grad else x
        return y

    def _pass_back(self, dy: Tensor) -> Tensor:
        self._script.come_to("backward")
        return dy
