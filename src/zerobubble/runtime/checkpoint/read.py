"""Loads a checkpoint: compares it with the training state, then replaces that state."""

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

from zerobubble.errors import InputError, raise_faults
from zerobubble.runtime.checkpoint import checksums, contents
from zerobubble.runtime.checkpoint.checkpointed import Checkpointed
from zerobubble.runtime.checkpoint.folder import find_checkpoint, resolve_path
from zerobubble.runtime.checkpoint.names import Names
from zerobubble.runtime.checkpoint.ranks import CheckpointRanks, agreed, faults_of_all
from zerobubble.runtime.checkpoint.states import OptimizerState, SavedRandomStates, ScalerState
from zerobubble.runtime.checkpoint.tensor_parts import marks_of
from zerobubble.runtime.checkpoint.write import AnyOptimizer, refuse_more_than_model, refuse_others, settled
from zerobubble.runtime.step.state_changes import Change, HookState, load_states, named_hooks
from zerobubble.runtime.values.buffers import changing_weights


class Saved(NamedTuple):
    """A checkpoint: its folder, its description, the states of optimizers, and the size and dtype of each tensor in it."""

    folder: Path
    reader: CheckpointReader
    rest: dict[str, Any]
    states: contents.SavedStates
    tensors: Mapping[str, Any]
    identity: int

    def read(self, targets: dict[str, Tensor]) -> None:
        """Reads tensors into `targets`, which nothing uses yet; every rank reads its own.

        Raises `InputError` if they cannot be read, or if another checkpoint has replaced this one in the meantime.
        """
        self._read(targets, DefaultLoadPlanner())

    def stage(self, targets: dict[str, Tensor]) -> StagedTensors:
        """Reads like `read`, but leaves `targets` unchanged until the result is applied."""
        staged = StagedTensors()
        self._read(targets, staged)
        return staged

    def _read(self, targets: dict[str, Tensor], planner: DefaultLoadPlanner) -> None:
        with _readable(self.folder):
            _read(targets, self.reader, planner)
        if checksums.identity(self.folder) != self.identity:
            raise InputError(
                "{folder} was replaced by another checkpoint while it was being read", folder=str(self.folder), remedy="load it once more"
            )


class StagedTensors(DefaultLoadPlanner):
    """Tensors on the host that were read for others, so that reading fails before anything has changed.

    It is a `Change` that copies them to their targets.
    """

    what = "the model"

    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._num_exchanged = 0

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns the staging tensor to read into."""
        target = super().resolve_tensor(read_item)
        staged = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        self._pairs.append((target, staged))
        return staged

    def make(self) -> None:
        """Copies all tensors to their targets, and keeps the previous values on the host."""
        for target, staged in self._pairs:
            self._exchange(target, staged)
            self._num_exchanged += 1

    def undo(self) -> None:
        """Restores the previous values."""
        for target, staged in self._pairs[: self._num_exchanged]:
            self._exchange(target, staged)
        self._num_exchanged = 0

    def _exchange(self, target: Tensor, staged: Tensor) -> None:
        with torch.no_grad():
            before = target.to("cpu", copy=True)
            target.copy_(staged)
            staged.copy_(before)


class CheckpointReader(FileSystemReader):
    """Reads the metadata only once."""

    _list: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the list."""
        if self._list is None:
            self._list = super().read_metadata(*args, **kwargs)
        return self._list


class CheckpointLoader:
    """One call of `load` on this rank."""

    def __init__(
        self, trained: Checkpointed, optimizer: AnyOptimizer | None, scaler: torch.amp.GradScaler | None, *, model_only: bool
    ) -> None:
        self._trained = trained
        self._model_only = model_only
        self._given = optimizer
        self._scaler = scaler

    def read(self, path: Any) -> dict[str, Any]:
        """Loads the checkpoint at `path` and returns its extra; all ranks call it."""
        trained = self._trained
        with trained.activity("in zb.load"):
            trained.saves.finish()
            folder = self._checked(path)
            optimizers, saved = agreed(trained, lambda: (self._settled(), _open(folder)))
            trained.settle()
            names = trained.names()
            held = trained.gather(contents.model_keys(trained.modules, names), "comparing with the checkpoint")
            targets = agreed(trained, lambda: self._targets(saved, names, optimizers, {key for keys in held for key in keys}))
            of_rank, staged = agreed(trained, lambda: (self._own(saved), saved.stage(targets)))
            with changing_weights():
                self._apply(saved, names, optimizers, targets, of_rank, staged)
            if saved.rest["num_steps"] is not None and not self._model_only:
                trained.take_over(saved.rest["num_steps"], saved.rest["draws_seed"])
        extra: dict[str, Any] = saved.rest["extra"]
        return extra

    def _settled(self) -> tuple[Optimizer, ...]:
        """Returns the optimizers, their last step final. Raises `InputError` if they train others."""
        refuse_more_than_model(self._given, self._scaler, model_only=self._model_only)
        optimizers = settled(self._given)
        if optimizers:
            refuse_others(optimizers, self._trained)
        return optimizers

    def _checked(self, path: Any) -> Path:
        """Returns the folder of the checkpoint, after each rank has checked the checksums of a share of its files; all ranks call it."""
        trained = self._trained
        folder = agreed(trained, lambda: find_checkpoint(resolve_path(path)))
        agreed(trained, lambda: checksums.check(folder, trained.rank, trained.num_ranks))
        mine = agreed(trained, lambda: checksums.identity(folder)), self._model_only
        of_ranks = trained.gather(mine, "comparing which checkpoint is loaded")
        agreed(trained, lambda: _refuse_different(of_ranks, folder, trained))
        return folder

    def _targets(self, saved: Saved, names: Names, optimizers: Sequence[Optimizer], held: set[str]) -> dict[str, Tensor]:
        """Returns the tensors to read into: those of the model, and new ones. Raises `InputError` with all that does not match."""
        names.refuse_other(saved.rest)
        modules = self._trained.modules
        tensors = contents.model_tensors(modules, names)
        faults = contents.model_faults(tensors, held, saved.tensors)
        if not self._model_only:
            faults += self._faults_of_rest(saved, optimizers)
        named = dict(contents.parameters_by_name(modules, names))
        if optimizers and not faults:
            faults += contents.optimizer_faults(optimizers, named, saved.states)
        raise_faults(faults)
        if optimizers:
            tensors |= contents.optimizer_targets(optimizers, named, saved.states, saved.tensors, marks_of(modules.values()))
        if self._restores_exactly(saved):
            tensors |= contents.empty_like_saved(f"rank.{self._trained.rank}.random", saved.tensors)
        return tensors

    def _faults_of_rest(self, saved: Saved, optimizers: Sequence[Optimizer]) -> list[str]:
        """Returns what the checkpoint has in addition to the model and load was not given, and the reverse."""
        faults = []
        if bool(optimizers) != bool(saved.states):
            without_one = "an optimizer, and load was given none: give it, or model_only=True to load the model alone"
            faults.append(f"the checkpoint has {'no optimizer, and load was given one' if optimizers else without_one}")
        if self._scaler is None and saved.rest["scaler"]:
            faults.append("the checkpoint has a scaler, and load was given none")
        if self._scaler is not None and self._scaler.is_enabled() and not saved.rest["scaler"]:
            faults.append("the checkpoint has no enabled scaler, and load was given one")
        return faults

    def _restores_exactly(self, saved: Saved) -> bool:
        """Whether the ranks divide the model in the same way as when it was saved, and more than the model is loaded.

        If so, each restores its own random numbers and states of hooks.
        """
        trained = self._trained
        return not self._model_only and bool(saved.rest["num_ranks"] == trained.num_ranks and saved.rest["layout"] == trained.layout())

    def _own(self, saved: Saved) -> dict[str, Any] | None:
        """Returns what the checkpoint has for this rank alone; None if the ranks divide the model differently."""
        if not self._restores_exactly(saved):
            return None
        key = f"rank.{self._trained.rank}"
        with _readable(saved.folder):
            targets = contents.empty_like_saved(key, {key: saved.tensors[key]})
            saved.read(targets)
            of_rank: dict[str, Any] = contents.as_value(targets[key])
        return of_rank

    def _apply(
        self,
        saved: Saved,
        names: Names,
        optimizers: Sequence[Optimizer],
        targets: Mapping[str, Tensor],
        of_rank: dict[str, Any] | None,
        staged: StagedTensors,
    ) -> None:
        """Applies everything that was read. Raises `InputError` on every rank, with everything as before, if any of it is refused."""
        trained = self._trained
        changes: list[Change] = [staged]
        if optimizers:
            named = dict(contents.parameters_by_name(trained.modules, names))
            states = contents.optimizer_states(named, targets, saved.states, marks_of(trained.modules.values()))
            changes += [OptimizerState(optimizer, states) for optimizer in optimizers]
        if self._scaler is not None and saved.rest["scaler"]:
            changes.append(ScalerState(self._scaler, saved.rest["scaler"]))
        prefix = f"rank.{trained.rank}.random."
        random = {key.removeprefix(prefix): tensor for key, tensor in targets.items() if key.startswith(prefix)}
        if not self._model_only:
            changes.append(SavedRandomStates(of_rank and of_rank["random"], random, trained.device))
        hooks = named_hooks(trained.hooks)
        states_of_hooks = {} if of_rank is None else {name: state for name, state in of_rank["hooks"].items() if name in hooks}
        where = f"rank {trained.numbers[trained.rank]}: " if trained.num_ranks > 1 else ""
        faults = load_states(
            [HookState(hooks[name], state) for name, state in states_of_hooks.items()],
            changes,
            lambda fault: faults_of_all(trained, fault, "taking over the checkpoint"),
            where,
        )
        if faults:
            with trained.agreed_errors():
                raise InputError(faults)


def open_checkpoint(path: str | os.PathLike[str]) -> Saved:
    """Returns the checkpoint at `path`, for one process. Raises `InputError` if there is none that can be read, or if it is damaged."""
    folder = find_checkpoint(resolve_path(path))
    checksums.check(folder, 0, 1)
    return _open(folder)


def _open(folder: Path) -> Saved:
    """Returns the checkpoint in `folder`, whose files have been checked."""
    identity = checksums.identity(folder)
    with _readable(folder):
        reader = CheckpointReader(folder)
        tensors = reader.read_metadata().state_dict_metadata
        targets = contents.empty_like_saved("rest", tensors)
        _read(targets, reader, DefaultLoadPlanner())
        rest = contents.as_value(targets["rest"])
        if rest["form"] != contents.FORM:
            message = "{file} is a checkpoint of form {got}, but this version of zerobubble reads form {expected}"
            remedy = "load it with the version that saved it"
            raise InputError(message, file=str(folder), got=rest["form"], expected=contents.FORM, remedy=remedy)
        states = contents.saved_states(rest, tensors)
    return Saved(folder, reader, rest, states, tensors, identity)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """A context in which any error of torch and pickle for damaged files becomes an `InputError` that names the checkpoint."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        why = f"{type(error).__name__}: {why}"
        raise InputError("{file} is not a readable checkpoint of zb.save: {reason}", file=str(folder), reason=why) from error


def _refuse_different(of_ranks: list[tuple[int, bool]], folder: Path, ranks: CheckpointRanks) -> None:
    (identity, model_only), (identity_of_first, model_only_of_first) = of_ranks[ranks.rank], of_ranks[0]
    numbers = {"rank": ranks.numbers[ranks.rank], "first": ranks.numbers[0]}
    if identity != identity_of_first:
        message = "rank {rank} finds a different checkpoint at {folder} than rank {first}"
        raise InputError(message, **numbers, folder=str(folder), remedy="give the same path on every rank")
    if model_only != model_only_of_first:
        message = "model_only is {expected} on rank {first} and {got} on rank {rank}"
        raise InputError(message, **numbers, expected=model_only_of_first, got=model_only, remedy="give the same on each")


def _read(targets: dict[str, Tensor], reader: FileSystemReader, planner: DefaultLoadPlanner) -> None:
    """Does what `torch.distributed.checkpoint.load` does, for this rank alone; older versions of torch cannot do so."""
    metadata = reader.read_metadata()
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
