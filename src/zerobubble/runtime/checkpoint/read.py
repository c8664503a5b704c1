"""Reads a checkpoint: compares it with what is trained, and then lets that take it over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.optim import Optimizer

from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint import checksums, contents
from zerobubble.runtime.checkpoint.folder import find, place
from zerobubble.runtime.checkpoint.joined import marks_of
from zerobubble.runtime.checkpoint.names import Names
from zerobubble.runtime.checkpoint.optimizer_state import OptimizerState
from zerobubble.runtime.checkpoint.random_states import RandomStates
from zerobubble.runtime.checkpoint.scaler_state import ScalerState
from zerobubble.runtime.checkpoint.together import agreed, faults_of_all
from zerobubble.runtime.checkpoint.trained import Trained
from zerobubble.runtime.checkpoint.write import AnyOptimizer, settled
from zerobubble.runtime.step.all_or_nothing import Change
from zerobubble.runtime.step.hook_states import HookState, load_states
from zerobubble.runtime.values.weight_caches import changing_weights


class Saved(NamedTuple):
    """A checkpoint: where it is, what it says of itself, and the size and type of each tensor in it."""

    folder: Path
    reader: CheckpointReader
    rest: dict[str, Any]
    tensors: Mapping[str, Any]
    identity: int

    def read(self, room: dict[str, Tensor]) -> None:
        """Read tensors into `room`, which nobody uses yet; every rank reads its own.

        Raises `InputError` where they cannot be read, and where another checkpoint has replaced this one meanwhile.
        """
        self._read(room, DefaultLoadPlanner())

    def stage(self, room: dict[str, Tensor]) -> Staged:
        """As `read`, but `room` stays as it is until what was read is taken over."""
        staged = Staged()
        self._read(room, staged)
        return staged

    def _read(self, room: dict[str, Tensor], planner: DefaultLoadPlanner) -> None:
        with _readable(self.folder):
            _read(room, self.reader, planner)
        if checksums.identity(self.folder) != self.identity:
            raise InputError(f"{self.folder} was replaced by another checkpoint while it was being read: read it again")


class Staged(DefaultLoadPlanner):
    """Tensors on the host that have been read for others, so that reading fails before anything has changed, or not at all.

    A `Change` that takes them over.
    """

    what = "the model"

    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._num_exchanged = 0

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a tensor is read to: not yet where it belongs."""
        target = super().resolve_tensor(read_item)
        staged = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        self._pairs.append((target, staged))
        return staged

    def make(self) -> None:
        """Copy all of them to where they belong, and keep what was there in their place on the host."""
        for target, staged in self._pairs:
            self._exchange(target, staged)
            self._num_exchanged += 1

    def undo(self) -> None:
        """Put back what was there."""
        for target, staged in self._pairs[: self._num_exchanged]:
            self._exchange(target, staged)
        self._num_exchanged = 0

    def _exchange(self, target: Tensor, staged: Tensor) -> None:
        with torch.no_grad():
            before = target.to("cpu", copy=True)
            target.copy_(staged)
            staged.copy_(before)


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

    def read(self, path: Any) -> dict[str, Any]:
        """Take over the checkpoint at `path` and give its extra; all ranks call it."""
        trained = self._trained
        with trained.activity("while loading a checkpoint"):
            trained.saves.finish()
            folder = self._checked(path)
            optimizers, saved = agreed(trained, lambda: (settled(self._given), _open(folder)))
            trained.settle()
            names = trained.names()
            held = trained.gather(contents.model_keys(trained.modules, names), "comparing with the checkpoint")
            room = agreed(trained, lambda: self._room(saved, names, optimizers, {key for keys in held for key in keys}))
            own, staged = agreed(trained, lambda: (self._own(saved), saved.stage(room)))
            with changing_weights():
                self._take_over(saved, names, optimizers, room, own, staged)
            if saved.rest["num_steps"] is not None:
                trained.take_over(saved.rest["num_steps"], saved.rest.get("draws_seed"))
        extra: dict[str, Any] = saved.rest["extra"]
        return extra

    def _checked(self, path: Any) -> Path:
        """The folder of the checkpoint, of which each rank has compared a share of the files with their checksums; all ranks call it."""
        trained = self._trained
        folder = agreed(trained, lambda: find(place(path)))
        agreed(trained, lambda: checksums.check(folder, trained.rank, trained.num_ranks))
        mine = agreed(trained, lambda: checksums.identity(folder))
        told = trained.gather(mine, "comparing which checkpoint is loaded")
        agreed(trained, lambda: _refuse_different(told, folder, trained.rank))
        return folder

    def _room(self, saved: Saved, names: Names, optimizers: Sequence[Optimizer], held: set[str]) -> dict[str, Tensor]:
        """Where the checkpoint is read to: the model's own tensors, and new ones; raises `InputError` with all that does not fit."""
        names.refuse_other(saved.rest)
        modules = self._trained.modules
        found = contents.model_tensors(modules, names)
        faults = contents.model_faults(found, held, saved.tensors)
        if bool(optimizers) != bool(saved.rest["optimizer"]):
            has, given = ("no", "one") if optimizers else ("an", "none")
            faults.append(f"the checkpoint has {has} optimizer, and load was given {given}")
        if self._scaler is None and saved.rest["scaler"]:
            faults.append("the checkpoint has a scaler, and load was given none")
        if self._scaler is not None and self._scaler.is_enabled() and not saved.rest["scaler"]:
            faults.append("the checkpoint has no scaler that was enabled, and load was given one")
        named = dict(contents.parameters_by_name(modules, names))
        if optimizers and not faults:
            faults += contents.optimizer_faults(optimizers, named, saved.rest["optimizer"])
        if faults:
            raise InputError("; ".join(faults))
        if optimizers:
            found |= contents.room_for_optimizer(optimizers, named, saved.tensors, marks_of(modules.values()))
        if self._goes_on_exactly(saved):
            found |= contents.room_like(f"rank.{self._trained.rank}.random", saved.tensors)
        return found

    def _goes_on_exactly(self, saved: Saved) -> bool:
        """Whether the ranks divide the model as they did, so that each goes on with its own random numbers and the states of its hooks."""
        trained = self._trained
        return bool(saved.rest["num_ranks"] == trained.num_ranks and saved.rest["layout"] == trained.layout())

    def _own(self, saved: Saved) -> dict[str, Any] | None:
        """What the checkpoint has for this rank alone, None where the ranks divide the model in another way."""
        if not self._goes_on_exactly(saved):
            return None
        key = f"rank.{self._trained.rank}"
        with _readable(saved.folder):
            room = contents.room_like(key, {key: saved.tensors[key]})
            saved.read(room)
            own: dict[str, Any] = contents.as_value(room[key])
        return own

    def _take_over(
        self,
        saved: Saved,
        names: Names,
        optimizers: Sequence[Optimizer],
        room: Mapping[str, Tensor],
        own: dict[str, Any] | None,
        staged: Staged,
    ) -> None:
        """Give everything what was read; raises `InputError` on every rank, with everything as before, if anything refuses it."""
        trained = self._trained
        changes: list[Change] = [staged]
        if optimizers:
            named = dict(contents.parameters_by_name(trained.modules, names))
            states = contents.optimizer_states(named, room, saved.rest["optimizer"], marks_of(trained.modules.values()))
            changes += [OptimizerState(optimizer, states) for optimizer in optimizers]
        if self._scaler is not None and saved.rest["scaler"]:
            changes.append(ScalerState(self._scaler, saved.rest["scaler"]))
        prefix = f"rank.{trained.rank}.random."
        random = {key.removeprefix(prefix): tensor for key, tensor in room.items() if key.startswith(prefix)}
        changes.append(RandomStates(own and own["random"], random, trained.device))
        hooks = contents.named_hooks(trained.hooks)
        states_of_hooks = {} if own is None else {name: state for name, state in own["hooks"].items() if name in hooks}
        where = f"rank {trained.rank}: " if trained.num_ranks > 1 else ""
        faults = load_states(
            [HookState(hooks[name], state) for name, state in states_of_hooks.items()],
            changes,
            lambda fault: faults_of_all(trained, fault, "taking over the checkpoint"),
            where,
        )
        if faults:
            with trained.alike():
                raise InputError(faults)


def open_checkpoint(path: str | os.PathLike[str]) -> Saved:
    """The checkpoint at `path`, for one process; raises `InputError` where there is none that can be read, or it is damaged."""
    folder = find(place(path))
    checksums.check(folder, 0, 1)
    return _open(folder)


def _open(folder: Path) -> Saved:
    """The checkpoint in `folder`, whose files have been checked where it has checksums."""
    identity = checksums.identity(folder)
    with _readable(folder):
        reader = CheckpointReader(folder)
        tensors = reader.read_metadata().state_dict_metadata
        room = contents.room_like("rest", tensors)
        _read(room, reader, DefaultLoadPlanner())
        rest = contents.as_value(room["rest"])
        form, has_checksums = rest["form"], "checksums" in rest
    if form != contents.FORM:
        raise InputError(f"{folder} is a checkpoint of form {form}, and this version of zerobubble reads form {contents.FORM}")
    if has_checksums and checksums.read_checksums(folder) is None:
        raise InputError(f"the checkpoint is damaged: {folder / checksums.FILE} is missing; restore it from a copy")
    return Saved(folder, reader, rest, tensors, identity)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Whatever torch and pickle raise for damaged files comes out as an `InputError` that names the checkpoint."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise InputError(f"{folder} is no checkpoint of zb.save that can be read: {type(error).__name__}: {why}") from error


def _refuse_different(told: list[int], folder: Path, rank: int) -> None:
    if told[rank] != told[0]:
        raise InputError(f"rank {rank} finds another checkpoint at {folder} than rank 0: give the same path on every rank")


def _read(room: dict[str, Tensor], reader: FileSystemReader, planner: DefaultLoadPlanner) -> None:
    """What `torch.distributed.checkpoint.load` does with nobody else but this rank, which older versions of torch cannot be told."""
    metadata = reader.read_metadata()
    planner.set_up_planner(room, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
