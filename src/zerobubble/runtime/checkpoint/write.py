"""Saves a checkpoint: what each rank has, by name, and its place among the tensors of others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint import contents
from zerobubble.runtime.checkpoint.background import BackgroundSave
from zerobubble.runtime.checkpoint.checkpointed import Checkpointed
from zerobubble.runtime.checkpoint.folder import Draft, resolve_path
from zerobubble.runtime.checkpoint.names import Names
from zerobubble.runtime.checkpoint.parts import CheckpointPart
from zerobubble.runtime.checkpoint.ranks import CheckpointRanks, agreed
from zerobubble.runtime.checkpoint.states import plain_states, states_of, tensor_states
from zerobubble.runtime.checkpoint.tensor_parts import marks_of
from zerobubble.runtime.hooks.post_validation import PostValidation
from zerobubble.runtime.step.optimizers import Optimizers, optimizers_in, refuse_foreign
from zerobubble.runtime.step.state_changes import hook_states
from zerobubble.runtime.values.random_state import RandomStates

AnyOptimizer = Optimizers | PostValidation


class CheckpointWriter:
    """One call of `save` on this rank."""

    def __init__(
        self,
        trained: Checkpointed,
        optimizer: AnyOptimizer | None,
        scaler: torch.amp.GradScaler | None,
        extra: Mapping[str, Any] | None,
        *,
        model_only: bool,
    ) -> None:
        self._trained = trained
        self._model_only = model_only
        self._optimizer = optimizer
        self._scaler = scaler
        self._extra = extra

    def write(self, path: Any, *, wait: bool) -> BackgroundSave:
        """Writes the checkpoint, or starts to; all ranks call it."""
        trained = self._trained
        with trained.activity("in zb.save"):
            saves = trained.saves
            saves.finish()  # one checkpoint at a time: its copies are reused, and it may be replaced at the same path

            target = self._place(path)
            tensors = self._tensors()
            draft = agreed(trained, lambda: Draft(target) if trained.rank == 0 else None)
            try:
                return self._begin(draft, tensors, wait=wait)
            except InputError:  # every rank raises it, so none writes any more
                if draft is not None:
                    draft.remove()
                raise
            except BaseException:  # this process may live on, and would keep the draft locked
                if draft is not None:
                    draft.release()
                raise

    def _begin(self, draft: Draft | None, tensors: dict[str, Tensor], *, wait: bool) -> BackgroundSave:
        """Writes into the `draft` of rank 0, at once or in the background."""
        trained = self._trained
        folder = Path(trained.gather(draft and str(draft.folder), "choosing where to write")[0])
        agreed(trained, lambda: _refuse_unseen(folder, trained))
        part = CheckpointPart(tensors, folder, trained, None if wait else trained.saves.copies)
        saving = BackgroundSave(part, draft, trained.schedule(), trained)
        if wait:
            saving.write_now()
            saving.wait()
        else:
            trained.saves.start(saving)
        return saving

    def _place(self, path: Any) -> Path:
        """Returns the path of the checkpoint. Raises `InputError` on every rank if it is not a path, or if ranks have different ones."""
        trained = self._trained
        target = agreed(trained, lambda: resolve_path(path))
        paths = trained.gather(os.fsdecode(path), "comparing where to write")
        agreed(trained, lambda: _refuse_other([{"path": other_path} for other_path in paths], trained.numbers))
        return target

    def _tensors(self) -> dict[str, Tensor]:
        """Returns all that this rank has, as tensors by key. Raises `InputError` on every rank for what cannot be saved on one."""
        trained = self._trained
        inner = agreed(trained, lambda: self._settled())
        num_steps = trained.settle()
        names = trained.names()
        now = None if self._model_only else RandomStates.now(trained.device)
        tensors, mine = agreed(trained, lambda: self._mine(names, inner, now))
        of_ranks = trained.gather(mine, "telling the others what a checkpoint holds")
        agreed(trained, lambda: _refuse_other(of_ranks, trained.numbers))
        tensors = _without_old_buffers(tensors, of_ranks, trained.rank)
        options = {name: kept for theirs in of_ranks for name, kept in theirs["optimizer"].items()}
        rest = {"form": contents.FORM, "num_ranks": len(of_ranks), **names._asdict(), "optimizer": options}
        rest |= {"num_steps": None, "draws_seed": None} if self._model_only else {"num_steps": num_steps, "draws_seed": trained.rng_seed()}
        rest |= {"layout": trained.layout(), "scaler": mine["scaler"], "extra": mine["extra"]}
        of_rank = {"hooks": mine["hooks"], "random": None if now is None else plain_states(now)}
        return tensors | {"rest": contents.as_tensor(rest), f"rank.{trained.rank}": contents.as_tensor(of_rank)}

    def _settled(self) -> tuple[Optimizer, ...]:
        """Returns the optimizers, their last step final. Raises `InputError` if others train the same stages, or if these train others."""
        refuse_more_than_model(self._optimizer, self._scaler, model_only=self._model_only)
        optimizers = settled(self._optimizer)
        if optimizers:
            refuse_others(optimizers, self._trained)
        if not self._model_only:
            self._trained.refuse_partial(optimizers)
        return optimizers

    def _mine(self, names: Names, optimizers: Sequence[Optimizer], now: RandomStates | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns what this rank has: tensors, and everything else."""
        trained = self._trained
        named = dict(contents.parameters_by_name(trained.modules, names))
        states = states_of(optimizers)
        random = {} if now is None else {f"rank.{trained.rank}.random.{kind}": state for kind, state in tensor_states(now).items()}
        kept = contents.optimizer_tensors(named, states, marks_of(trained.modules.values()))
        tensors = {**contents.model_tensors(trained.modules, names), **kept, **random}
        mine = {
            "optimizer": {name: list(states[parameter][1:]) for name, parameter in named.items() if parameter in states},
            "hooks": {} if self._model_only else hook_states(trained.hooks),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "extra": dict(self._extra or {}),
            "model_only": self._model_only,
            "buffers": contents.stages_of_buffers(trained.modules, names),
        }
        contents.refuse_what_is_not_plain(mine)
        return tensors, mine


def _without_old_buffers(tensors: dict[str, Tensor], of_ranks: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Tensor]:
    """Returns the `tensors` of this rank without the buffers of which another rank has a later stage.

    A buffer around the parts is in all stages, and only the last one runs all of the model's code.
    """
    last: dict[str, int] = {}
    for theirs in of_ranks:
        for key, stage in theirs["buffers"].items():
            last[key] = max(stage, last.get(key, 0))
    mine = of_ranks[rank]["buffers"]
    return {key: tensor for key, tensor in tensors.items() if mine.get(key) == last.get(key)}


def settled(optimizer: AnyOptimizer | None) -> tuple[Optimizer, ...]:
    """Returns the given torch optimizers, their last step final; none for None. Raises `InputError` for anything else."""
    if isinstance(optimizer, PostValidation):
        optimizer.settle()
        return optimizer.optimizers
    return () if optimizer is None else optimizers_in(optimizer)


def refuse_more_than_model(optimizer: object, scaler: object, *, model_only: bool) -> None:
    """Raises `InputError` for an optimizer or a scaler that is given with `model_only`."""
    unused = [name for name, value in (("optimizer", optimizer), ("scaler", scaler)) if value is not None]
    if model_only and unused:
        message = "model_only=True leaves out {argument}, which was given"
        raise InputError(message, argument=" and ".join(unused), got=True, remedy="leave out one of them")


def refuse_others(optimizers: Sequence[Optimizer], trained: Checkpointed) -> None:
    """Raises `InputError` if `optimizers` train other parameters than those of `trained`."""
    parameters = [parameter for module in trained.modules.values() for parameter in module.parameters()]
    refuse_foreign(optimizers, parameters, trained.owner)


def _refuse_other(of_ranks: list[dict[str, Any]], numbers: Sequence[int]) -> None:
    """Raises `InputError` if ranks differ in a value that a checkpoint holds once."""
    for what in {"extra", "scaler", "path", "model_only"} & of_ranks[0].keys():
        for rank, theirs in zip(numbers, of_ranks, strict=True):
            if theirs[what] != of_ranks[0][what] and repr(theirs[what]) != repr(of_ranks[0][what]):  # NaN does not equal itself
                raise InputError(
                    "{argument} is {expected} on rank {first} and {got} on rank {rank}, but a checkpoint has one for all ranks",
                    argument=what,
                    expected=f"{of_ranks[0][what]!r:.200}",
                    got=f"{theirs[what]!r:.200}",
                    rank=rank,
                    first=numbers[0],
                    remedy="give the same on each",
                )


def _refuse_unseen(folder: Path, ranks: CheckpointRanks) -> None:
    """Raises `InputError` on a rank that does not see the `folder` of the first rank."""
    if not folder.is_dir():
        message = "rank {rank} does not see {folder}, which rank {first} has created"
        numbers = {"rank": ranks.numbers[ranks.rank], "first": ranks.numbers[0]}
        raise InputError(message, **numbers, folder=str(folder), remedy="save to a file system that all ranks share")
