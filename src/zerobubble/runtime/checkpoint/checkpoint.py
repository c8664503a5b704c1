"""`save` and `load`: everything that training needs to go on, written and read by all ranks together, or by one device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerobubble.runtime.checkpoint.background import Saving
from zerobubble.runtime.checkpoint.read import Reading
from zerobubble.runtime.checkpoint.trained import surviving, trained_by
from zerobubble.runtime.checkpoint.write import AnyOptimizer, Writing
from zerobubble.runtime.pipeline import Pipeline


def save(
    path: str | os.PathLike[str],
    pipe: Pipeline | nn.Module,
    optimizer: AnyOptimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    extra: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> Saving:
    """Write a checkpoint of what `pipe` trains into the folder `path`; every rank calls it, and all see the folder.

        zb.save("checkpoint", pipe, optimizer, extra={"next": step + 1})

    Instead of a pipeline it takes the unsplit model that one device trains.

    It has parameters and buffers under their names in the whole model where no two stages have other things under one name (as those of
    `zb.split`), else under `stages.N.` and their names in the stage; what `optimizer`, or each of a list, keeps of a parameter, once a step
    that may still be taken back is final; the `scaler`; the random states of torch, Python and numpy; the seed by which stages draw; the
    pipeline's own state and its hooks'; its schedule or plan, in the file `schedule.json`; and `extra`, a dict of numbers, text, lists and
    dicts of yours, such as the place in the data, the same on every rank.

    Where `wait` is False it returns when all of this is copied, and writes while training goes on. The `Saving` that it gives has `done()`
    and `wait()`; the next `save`, `load` and `pipe.close` wait, too. The copies take the memory of what this rank writes, on the CPU.

    A checkpoint at `path` is replaced when the new one is complete, so a crash leaves the one or the other whole; anything else there is
    refused. Raises `InputError` on every rank for what cannot be saved or written, and if an optimizer that is not given has stepped
    parameters that still train; the pipeline stays open. Raises `PipelineError` on every rank when one of them fails.
    """
    return surviving(pipe, lambda: Writing(trained_by(pipe), optimizer, scaler, extra).write(path, wait=wait))


def load(
    path: str | os.PathLike[str],
    pipe: Pipeline | nn.Module,
    optimizer: AnyOptimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, Any]:
    """Go on where `save` wrote to `path`: give `pipe`, `optimizer` and `scaler` what they had, and return the `extra`; all ranks call it.

        first = zb.load("checkpoint", pipe, optimizer)["next"]

    The pipeline may have another number of ranks, of replicas and another schedule; or there is none, and `pipe` is the unsplit model on
    one device. With the ranks and stages that there were then, random states and those of hooks are set, too, and training goes on to the
    bit. Everything is as before if it raises `InputError`, on every rank: for a damaged checkpoint, for one of another model or optimizer,
    for stages that cannot be told apart by their names with another number of stages, and for a hook, optimizer or scaler that raises on
    any rank while it takes over its state. Tensors are read into host memory first, which takes the memory of what this rank reads.
    """
    return surviving(pipe, lambda: Reading(trained_by(pipe), optimizer, scaler).read(path))
