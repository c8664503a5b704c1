"""Reads a checkpoint: compares it with what is trained, and then lets that take it over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint import contents
from zerobubble.runtime.checkpoint.folder import find
from zerobubble.runtime.checkpoint.joined import marks_of
from zerobubble.runtime.checkpoint.names import Names
from zerobubble.runtime.checkpoint.optimizer_state import take_over
from zerobubble.runtime.checkpoint.random_states import set_plain_states, set_tensor_states
from zerobubble.runtime.checkpoint.together import agreed
from zerobubble.runtime.checkpoint.trained import Trained
from zerobubble.runtime.checkpoint.write import AnyOptimizer, settled
from zerobubble.runtime.values.weight_caches import changing_weights


class Saved(NamedTuple):
    """A checkpoint: where it is, what it says of itself, and the size and type of each tensor in it."""

    folder: Path
    reader: CheckpointReader
    rest: dict[str, Any]
    tensors: Mapping[str, Any]

    def read(self, room: dict[str, Tensor]) -> None:
        """Read tensors into `room`; every rank reads its own."""
        _read(room, self.reader)


class CheckpointReader(FileSystemReader):
    """Reads the list of what lies where once, however many reads need it."""

    _list: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list."""
        if self._list is None:
            self._list = super().read_metadata(*args, **kwargs)
        return self._list


class Reading:
    """One call of `load` on this rank."""

    def __init__(self, trained: Trained, optimizer: AnyOptimizer | None, scaler: torch.amp.GradScaler | None) -> None:
        self._trained = trained
        self._given = optimizer
        self._scaler = scaler

    def read(self, path: Path) -> dict[str, Any]:
        """Take over the checkpoint at `path` and give its extra; all ranks call it."""
        trained = self._trained
        with trained.activity("while loading a checkpoint"):
            trained.saves.finish()
            optimizer, saved = agreed(trained, lambda: (settled(self._given), open_checkpoint(path)))
            trained.settle()
            names = trained.names()
            held = trained.gather(contents.model_keys(trained.modules, names), "comparing with the checkpoint")
            room = agreed(trained, lambda: self._room(saved, names, optimizer, {key for keys in held for key in keys}))
            agreed(trained, lambda: self._take_over_hooks(saved))
            with changing_weights():
                saved.read(room)
            self._take_over(saved, names, optimizer, room)
            trained.gather(None, "taking over the checkpoint")
        extra: dict[str, Any] = saved.rest["extra"]
        return extra

    def _room(self, saved: Saved, names: Names, optimizer: Optimizer | None, held: set[str]) -> dict[str, Tensor]:
        """Where the checkpoint is read to: the model's own tensors, and new ones; raises `InputError` with all that does not fit."""
        names.refuse_other(saved.rest)
        modules = self._trained.modules
        found = contents.model_tensors(modules, names)
        faults = contents.model_faults(found, held, saved.tensors)
        if (optimizer is None) != (not saved.rest["optimizer"]):
            has, given = ("no", "one") if optimizer is not None else ("an", "none")
            faults.append(f"the checkpoint has {has} optimizer, and load was given {given}")
        if (self._scaler is None) != (saved.rest["scaler"] is None):
            has, given = ("no", "one") if self._scaler else ("a", "none")
            faults.append(f"the checkpoint has {has} scaler, and load was given {given}")
        named = dict(contents.parameters_by_name(modules, names))
        if optimizer is not None and not faults:
            faults += contents.optimizer_faults(optimizer, named, saved.rest["optimizer"])
        if faults:
            raise InputError("; ".join(faults))
        if optimizer is not None:
            found |= contents.room_for_optimizer(optimizer, named, saved.tensors, marks_of(modules.values()))
        if self._goes_on_exactly(saved):
            found |= contents.room_like(f"rank.{self._trained.rank}.random", saved.tensors)
        return found

    def _goes_on_exactly(self, saved: Saved) -> bool:
        """Whether the ranks divide the model as they did, so that each goes on with its own random numbers and the states of its hooks."""
        trained = self._trained
        return bool(saved.rest["num_ranks"] == trained.num_ranks and saved.rest["layout"] == trained.layout())

    def _take_over_hooks(self, saved: Saved) -> None:
        """Give hooks their states, while nothing else has changed: one that cannot use its state raises `InputError`."""
        if not self._goes_on_exactly(saved):
            return
        key = f"rank.{self._trained.rank}"
        room = contents.room_like(key, {key: saved.tensors[key]})
        saved.read(room)
        own = contents.as_value(room[key])
        for name, hook in contents.named_hooks(self._trained.hooks).items():
            if name in own["hooks"]:
                hook.load_state_dict(own["hooks"][name])
        set_plain_states(own["random"])

    def _take_over(self, saved: Saved, names: Names, optimizer: Optimizer | None, room: Mapping[str, Tensor]) -> None:
        """Give everything but the model, which has been read in place, what was read."""
        trained = self._trained
        if optimizer is not None:
            named = dict(contents.parameters_by_name(trained.modules, names))
            marks = marks_of(trained.modules.values())
            take_over(optimizer, contents.optimizer_states(named, room, saved.rest["optimizer"], marks))
        if self._scaler is not None:
            self._scaler.load_state_dict(saved.rest["scaler"])
        prefix = f"rank.{trained.rank}.random."
        random = {key.removeprefix(prefix): tensor for key, tensor in room.items() if key.startswith(prefix)}
        if random:
            set_tensor_states(random, trained.device)
        if saved.rest["num_steps"] is not None:
            trained.take_over(saved.rest["num_steps"], saved.rest.get("draws_seed"))


def open_checkpoint(path: Path) -> Saved:
    """The checkpoint at `path`; raises `InputError` where there is none that can be read."""
    folder = find(path)
    try:
        reader = CheckpointReader(folder)
        tensors = reader.read_metadata().state_dict_metadata
        rest = contents.room_like("rest", tensors)
        _read(rest, reader)
        told = contents.as_value(rest["rest"])
    except (OSError, KeyError, ValueError, RuntimeError, EOFError) as error:
        raise InputError(f"{folder} is no checkpoint of zb.save that can be read: {type(error).__name__}: {error}") from error
    if told["form"] != contents.FORM:
        raise InputError(f"{folder} is a checkpoint of form {told['form']}, and this version of zerobubble reads form {contents.FORM}")
    return Saved(folder, reader, told, tensors)


def _read(room: dict[str, Tensor], reader: FileSystemReader) -> None:
    """What `torch.distributed.checkpoint.load` does with nobody else but this rank, which older versions of torch cannot be told."""
    planner, metadata = DefaultLoadPlanner(), reader.read_metadata()
    planner.set_up_planner(room, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
