"""Writes a checkpoint: what each rank has, by name, and its place among what the others have."""

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
from zerobubble.runtime.checkpoint.background import Saving
from zerobubble.runtime.checkpoint.checksums import FILE
from zerobubble.runtime.checkpoint.folder import Draft, place
from zerobubble.runtime.checkpoint.joined import marks_of
from zerobubble.runtime.checkpoint.names import Names
from zerobubble.runtime.checkpoint.optimizer_state import states_of
from zerobubble.runtime.checkpoint.parts import Part
from zerobubble.runtime.checkpoint.random_states import plain_states, tensor_states
from zerobubble.runtime.checkpoint.together import agreed
from zerobubble.runtime.checkpoint.trained import Trained
from zerobubble.runtime.hooks.post_validation import PostValidation
from zerobubble.runtime.step.optimizers import Optimizers, optimizers_in

AnyOptimizer = Optimizers | PostValidation


class Writing:
    """One call of `save` on this rank."""

    def __init__(
        self, trained: Trained, optimizer: AnyOptimizer | None, scaler: torch.amp.GradScaler | None, extra: Mapping[str, Any] | None
    ) -> None:
        self._trained = trained
        self._optimizer = optimizer
        self._scaler = scaler
        self._extra = extra

    def write(self, path: Any, *, wait: bool) -> Saving:
        """Write the checkpoint, or begin to; all ranks call it."""
        trained = self._trained
        with trained.activity("while saving a checkpoint"):
            saves = trained.saves
            saves.finish()
            found = self._place(path)
            tensors = self._tensors()
            draft = agreed(trained, lambda: Draft(found) if trained.rank == 0 else None)
            try:
                return self._begin(draft, tensors, wait=wait)
            except InputError:  # on every rank, so none writes any more
                if draft is not None:
                    draft.remove()
                raise
            except BaseException:  # this process lives on, and would keep it locked
                if draft is not None:
                    draft.release()
                raise

    def _begin(self, draft: Draft | None, tensors: dict[str, Tensor], *, wait: bool) -> Saving:
        """Write into the `draft`, which rank 0 has, at once or in the background."""
        trained = self._trained
        folder = Path(trained.gather(draft and str(draft.folder), "choosing where to write")[0])
        agreed(trained, lambda: _refuse_unseen(folder, trained.rank))
        part = Part(tensors, folder, trained, None if wait else trained.saves.copies)
        saving = Saving(part, draft, trained.schedule(), trained)
        if wait:
            saving.write_now()
            saving.wait()
        else:
            trained.saves.start(saving)
        return saving

    def _place(self, path: Any) -> Path:
        """Where the checkpoint shall be; raises `InputError` on every rank for what is no path, and for ranks with different ones."""
        trained = self._trained
        found = agreed(trained, lambda: place(path))
        given = trained.gather(os.fsdecode(path), "comparing where to write")
        agreed(trained, lambda: _refuse_other([{"path": each} for each in given]))
        return found

    def _tensors(self) -> dict[str, Tensor]:
        """All that this rank has, as tensors by key; raises `InputError` on every rank for what cannot be saved on one."""
        trained = self._trained
        inner = agreed(trained, lambda: self._settled())
        num_steps = trained.settle()
        names = trained.names()
        tensors, mine = agreed(trained, lambda: self._mine(names, inner))
        told = trained.gather(mine, "telling the others what a checkpoint holds")
        agreed(trained, lambda: _refuse_other(told))
        options = {name: kept for theirs in told for name, kept in theirs["optimizer"].items()}
        rest = {"form": contents.FORM, "num_ranks": len(told), "num_steps": num_steps, **names.as_plain(), "optimizer": options}
        rest |= {"draws_seed": trained.draws_seed(), "layout": trained.layout(), "scaler": mine["scaler"], "extra": mine["extra"]}
        rest["checksums"] = FILE
        own = {"hooks": mine["hooks"], "random": plain_states()}
        return tensors | {"rest": contents.as_tensor(rest), f"rank.{trained.rank}": contents.as_tensor(own)}

    def _settled(self) -> tuple[Optimizer, ...]:
        """The optimizers, their last step final; raises `InputError` where others train the same stages."""
        optimizers = settled(self._optimizer)
        if optimizers:
            self._trained.refuse_partial(optimizers)
        return optimizers

    def _mine(self, names: Names, optimizers: Sequence[Optimizer]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What this rank has: tensors, and all else."""
        trained = self._trained
        named = dict(contents.parameters_by_name(trained.modules, names))
        states = states_of(optimizers)
        random = {f"rank.{trained.rank}.random.{kind}": state for kind, state in tensor_states(trained.device).items()}
        kept = contents.optimizer_tensors(named, states, marks_of(trained.modules.values()))
        tensors = {**contents.model_tensors(trained.modules, names), **kept, **random}
        mine = {
            "optimizer": {name: list(states[one][1:]) for name, one in named.items() if one in states},
            "hooks": contents.hook_states(trained.hooks),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "extra": dict(self._extra or {}),
        }
        contents.refuse_what_is_not_plain(mine)
        return tensors, mine


def settled(optimizer: AnyOptimizer | None) -> tuple[Optimizer, ...]:
    """The optimizers of torch that were given, none for None, their last step final; raises `InputError` for anything else."""
    if isinstance(optimizer, PostValidation):
        optimizer.settle()
        return optimizer.optimizers
    return () if optimizer is None else optimizers_in(optimizer)


def _refuse_other(told: list[dict[str, Any]]) -> None:
    """Raise `InputError` where ranks have `told` other things that there are once in a checkpoint."""
    for what in {"extra", "scaler", "path"} & told[0].keys():
        for rank, theirs in enumerate(told):
            if theirs[what] != told[0][what] and repr(theirs[what]) != repr(told[0][what]):  # NaN does not equal itself
                raise InputError(
                    f"{what} is {told[0][what]!r:.200} on rank 0 and {theirs[what]!r:.200} on rank {rank}: "
                    "a checkpoint has one for all ranks, so give the same on each"
                )


def _refuse_unseen(folder: Path, rank: int) -> None:
    """Raise `InputError` on a rank that does not see the `folder` that rank 0 has made."""
    if not folder.is_dir():
        raise InputError(f"rank {rank} does not see {folder}, which rank 0 has made: save to a file system that all ranks share")
