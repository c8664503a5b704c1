"""Stops all ranks at the same batch once any of them has received SIGTERM, or has set `trainer.should_stop`.

Lightning's signal handler broadcasts the flag of rank 0. The handler of one rank then waits for ranks that wait for it in the pipeline.
"""

from __future__ import annotations

from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException


def stop_together(trainer: pl.Trainer) -> None:
    """Replaces Lightning's handler, which communicates, and its comparison before each batch, which sees rank 0 alone."""
    connector = trainer._signal_connector
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not received:
            launcher.kill(number)
        received.append(number)

    def compare() -> None:
        flag = torch.tensor([len(received)], device=trainer.strategy.root_device)
        with trainer.strategy.exchanging("looking for SIGTERM before a batch"):
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if flag.item():
            connector.received_sigterm = True
            raise SIGTERMException

    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
        loop.__dict__["on_advance_end"] = partial(_after_sharing_stop, trainer, type(loop).on_advance_end, loop)
    connector._sigterm_notifier_fn = note
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = compare


def share_stop(trainer: pl.Trainer) -> None:
    """Sets `trainer.should_stop` on all ranks if it is set on any."""
    trainer.should_stop = trainer.strategy.reduce_boolean_decision(bool(trainer.should_stop), all=False)


def _after_sharing_stop(trainer: pl.Trainer, end: Any, loop: Any, *args: Any) -> None:
    share_stop(trainer)
    end(loop, *args)
