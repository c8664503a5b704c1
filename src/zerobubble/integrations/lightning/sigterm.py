"""Stops all ranks before the same batch once any of them has received SIGTERM.

Lightning's signal handler broadcasts the flag of rank 0. The handler of one rank then waits for ranks that wait for it in the pipeline.
"""

from __future__ import annotations

from types import FrameType

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
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if flag.item():
            connector.received_sigterm = True
            raise SIGTERMException

    connector._sigterm_notifier_fn = note
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = compare
