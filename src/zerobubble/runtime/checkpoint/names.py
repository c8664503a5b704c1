"""The names of parameters and buffers in a checkpoint: those of the whole model, or those of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from zerobubble.errors import InputError

StageNames = Mapping[int, Sequence[str]]
"""By stage, the names in its state."""


def are_of_one_model(of_ranks: Sequence[StageNames], tied: Sequence[Sequence[tuple[int, str]]]) -> bool:
    """Whether names are those of the whole model: no two stages use a name for different things. Needs the names of all ranks."""
    same = [set(group) for group in tied]
    holders: dict[str, set[int]] = {}
    for names in of_ranks:
        for stage, in_stage in names.items():
            for name in in_stage:
                holders.setdefault(name, set()).add(stage)
    return all(len(stages) == 1 or any({(stage, name) for stage in stages} <= group for group in same) for name, stages in holders.items())


def refuse_taken(of_ranks: Sequence[StageNames], heads: Set[str]) -> None:
    """Raises `InputError` if a stage uses one of the names that `heads` have in the whole model."""
    for names in of_ranks:
        for stage, in_stage in sorted(names.items()):
            if taken := sorted(heads & set(in_stage)):
                message = "stage {stage} has {name!r}, which is also the name of a part of the divided head in checkpoints"
                raise InputError(
                    message, stage=stage, name=taken[0], remedy="give DividedHead the name of the head in the whole model, name=..."
                )


class Names(NamedTuple):
    """Maps names in a stage to names in a checkpoint: unchanged if they are those of the whole model, else prefixed by the stage."""

    num_stages: int
    is_whole_model: bool

    def prefix(self, stage: int) -> str:
        """Returns the prefix of the names of a stage."""
        return "" if self.is_whole_model else f"stages.{stage}."

    def refuse_other(self, saved: Mapping[str, Any]) -> None:
        """Raises `InputError` if names have another meaning in the checkpoint with this `saved` form."""
        if self.is_whole_model != saved["is_whole_model"] or (not self.is_whole_model and self.num_stages != saved["num_stages"]):
            raise InputError(
                "the checkpoint has {got} stages, but this pipeline has {expected}, and parameters are not named as in the whole model",
                got=saved["num_stages"],
                expected=self.num_stages,
                remedy="give another folder if it is from another program; else load it with as many stages, or keep the names of the "
                "whole model in the stages that you build, as zb.split does",
            )
