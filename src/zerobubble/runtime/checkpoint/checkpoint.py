"""`save` and `load` the whole training state, with all ranks together or on one device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerobubble.arguments import takes
from zerobubble.runtime.checkpoint.background import BackgroundSave
from zerobubble.runtime.checkpoint.checkpointed import checkpointed, with_recovery
from zerobubble.runtime.checkpoint.read import CheckpointLoader
from zerobubble.runtime.checkpoint.write import AnyOptimizer, CheckpointWriter
from zerobubble.runtime.pipeline import Pipeline
from zerobubble.runtime.values.buffers import making_tensors


@takes()
@making_tensors()
def save(
    path: str | os.PathLike[str],
    pipe: Pipeline | nn.Module,
    optimizer: AnyOptimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    extra: Mapping[str, Any] | None = None,
    model_only: bool = False,
    wait: bool = True,
) -> BackgroundSave:
    """Writes a checkpoint of the training state of `pipe` into the folder `path`. Every rank calls it, and all ranks must see the folder.

        zb.save("checkpoint", pipe, optimizer, extra={"next": step + 1})

    Args:
        path: The folder. A checkpoint there is replaced once the new one is complete, so a crash leaves one of them intact. Anything else
            there is refused.
        pipe: The pipeline, or the unsplit model that one device trains.
        optimizer: The optimizer or optimizers of this rank. A step that may still be undone is made final first.
        scaler: The gradient scaler.
        extra: A dict of numbers, text, lists and dicts, such as the position in the data, the same on every rank.
        model_only: True to save parameters, buffers and `extra` alone. Training cannot be resumed from them.
        wait: False to return once everything is copied, and to write while training continues. The copies take as much host memory as
            this rank writes.

    Returns a `BackgroundSave` with `done()` and `wait()`. The next `save`, `load` and `pipe.close` wait for it, too.

    Parameters and buffers have their names in the whole model, if no two stages use a name for different things (as with `zb.split`);
    otherwise `stages.N.` and their names in the stage. The checkpoint also holds the states of optimizers and scaler; the random states of
    torch, Python and numpy; the seed of the stages' random numbers; the states of the pipeline and its hooks; and the schedule or plan, in
    `schedule.json`.

    Raises `InputError` on every rank if something cannot be saved or written, if an optimizer that is not given has stepped parameters that
    still train, and if an optimizer trains other parameters; the pipeline stays open. Raises `PipelineError` on every rank if one of them
    fails.
    """
    return with_recovery(
        pipe, lambda: CheckpointWriter(checkpointed(pipe), optimizer, scaler, extra, model_only=model_only).write(path, wait=wait)
    )


@takes()
@making_tensors()
def load(
    path: str | os.PathLike[str],
    pipe: Pipeline | nn.Module,
    optimizer: AnyOptimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    model_only: bool = False,
) -> dict[str, Any]:
    """Restores what `save` wrote to `path` into `pipe`, `optimizer` and `scaler`, and returns the `extra`. All ranks call it.

        first = zb.load("checkpoint", pipe, optimizer)["next"]

    The pipeline may have another number of ranks or replicas, and another schedule. With the same ranks and stages as before, the states of
    random numbers and hooks are restored, too, and training continues bitwise.

    Args:
        path: The folder of the checkpoint.
        pipe: The pipeline, or the unsplit model on one device.
        optimizer: The optimizer or optimizers of this rank.
        scaler: The gradient scaler.
        model_only: True to load parameters and buffers alone, such as for fine-tuning with another optimizer.

    Tensors are first read into host memory, which takes as much of it as this rank reads. If it raises `InputError`, it does so on every
    rank and leaves everything as before: for a damaged checkpoint; for another model or optimizer; for another number of stages whose
    parameters are not named as in the whole model; and if a hook, optimizer or scaler on any rank raises while it loads its state.
    """
    extra = with_recovery(pipe, lambda: CheckpointLoader(checkpointed(pipe), optimizer, scaler, model_only=model_only).read(path))
    if isinstance(pipe, Pipeline):
        pipe._steps.cut_model.release()  # other ranks' parameters keep their values from before
    return extra
