"""The names of what all stages hold, as in one state of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import nn

from zerobubble.errors import InputError

StageNames = Mapping[int, Sequence[str]]
"""By stage, the names in its state."""


def names_of(modules: Mapping[int, nn.Module]) -> dict[int, list[str]]:
    """What a rank holds."""
    return {stage: list(module.state_dict()) for stage, module in modules.items()}


def are_of_one_model(told: Sequence[StageNames], tied: Sequence[Sequence[tuple[int, str]]]) -> bool:
    """Whether no two stages have other things under one name, by what each rank has `told`: then names are those of the whole model."""
    same = [set(group) for group in tied]
    holders: dict[str, set[int]] = {}
    for names in told:
        for stage, found in names.items():
            for name in found:
                holders.setdefault(name, set()).add(stage)
    return all(len(stages) == 1 or any({(stage, name) for stage in stages} <= group for group in same) for name, stages in holders.items())


def refuse_taken(told: Sequence[StageNames], heads: Set[str]) -> None:
    """Raise `InputError` where a stage has something under one of the names that `heads` have in the whole model."""
    for names in told:
        for stage, found in sorted(names.items()):
            if taken := sorted(heads & set(found)):
                raise InputError(
                    f"stage {stage} has {taken[0]!r}, and a checkpoint calls a part of the divided head so: "
                    "give DividedHead the name that the head has in the whole model, name=..."
                )


class Names(NamedTuple):
    """How names in a stage become those in a checkpoint: as they are where they are those of the whole model, else behind their stage."""

    num_stages: int
    is_whole_model: bool

    def prefix(self, stage: int) -> str:
        """What stands before the names of a stage."""
        return "" if self.is_whole_model else f"stages.{stage}."

    def as_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return self._asdict()

    def refuse_other(self, saved: Mapping[str, Any]) -> None:
        """Raise `InputError` where names mean something else in the checkpoint that says `saved`."""
        if self.is_whole_model != saved["is_whole_model"] or (not self.is_whole_model and self.num_stages != saved["num_stages"]):
            raise InputError(
                f"the checkpoint is of {saved['num_stages']} stages and this pipeline has {self.num_stages}, and parameters cannot be told "
                "by their names: load it with as many, or build stages in which they keep their names in the whole model, as zb.split does"
            )
