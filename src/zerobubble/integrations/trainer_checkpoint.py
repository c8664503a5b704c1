"""Loads the optimizer of a checkpoint that Trainer has written on one device, for the parameters of a rank's stages."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from zerobubble.errors import InputError

_OF_DEEPSPEED = "global_step*"
"""The folder in which DeepSpeed saves the optimizer and a scheduler of its own."""


def load_optimizer_of_one_device(checkpoint: str, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> None:
    """Loads the states of this rank's parameters. `groups` are those of an optimizer of the whole model, which numbers the states.

    A checkpoint without optimizer and scheduler loads nothing, as in Trainer.

    Raises:
        InputError: If the optimizer is in another format, or has other parameter groups.
    """
    file = os.path.join(checkpoint, OPTIMIZER_NAME)
    remedy = "to start with a new optimizer and schedule, load the model from this folder and leave out resume_from_checkpoint"
    if not os.path.isfile(file):
        if glob.glob(os.path.join(glob.escape(checkpoint), _OF_DEEPSPEED)) or os.path.isfile(os.path.join(checkpoint, SCHEDULER_NAME)):
            message = "{path} has states of training, and no optimizer that a pipeline can load"
            raise InputError(message, path=checkpoint, remedy=f"save it with Trainer on one device or with PipelineTrainer; {remedy}")
        return
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != [len(group) for group in groups] or not _are_parts(optimizer, groups):
        message = "the optimizer in {path} has groups of {got} parameters, and that of the trainer has {expected}"
        expected = [len(group) for group in groups]
        raise InputError(
            message, path=file, got=sizes, expected=expected, remedy=f"make the optimizer as in the run that saved it; {remedy}"
        )
    states: dict[int, Any] = {}
    own_groups = []
    for group, whole, of_rank in zip(saved["param_groups"], groups, optimizer.param_groups, strict=True):
        numbers = dict(zip(whole, group["params"], strict=True))
        own_numbers = [numbers[parameter] for parameter in of_rank["params"]]
        own_groups.append({name: value for name, value in group.items() if name != "param_names"} | {"params": own_numbers})
        states |= {number: saved["state"][number] for number in own_numbers if number in saved["state"]}
    states = pytree.tree_map_only(Tensor, Tensor.clone, states)  # the file, which is mapped into memory, may be replaced
    optimizer.load_state_dict({"state": states, "param_groups": own_groups})


def _are_parts(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> bool:
    """Returns whether each group of the optimizer is a part of that of the whole model."""
    if len(optimizer.param_groups) != len(groups):
        return False
    return all(set(group["params"]) <= set(whole) for group, whole in zip(optimizer.param_groups, groups, strict=True))
