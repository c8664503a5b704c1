"""What the units of a model get from each other in one forward, and how their outputs are put together. Values, without behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class UnitCall(NamedTuple):
    """The output of a unit, at the `number`-th call of it in one forward, from 0 on."""

    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.unit!r}" if self.number == 0 else f"call {self.number} of {self.unit!r}"


class DirectParameter(NamedTuple):
    """A parameter of the model that code between the units uses, by its name."""

    name: str


class RandomDraw(NamedTuple):
    """The `number`-th time that code between the units draws random numbers, as for dropout of what units `behind` it gave."""

    number: int
    operation: str
    behind: tuple[str, ...]


Source = UnitCall | DirectParameter | RandomDraw
"""Where a tensor comes from. What comes from the model's inputs or from nowhere has no source: every stage has the inputs."""
Sources = frozenset[Source]


class OutputForm(NamedTuple):
    """How the output of a call is put together: its `structure`, with a meta tensor in the place of each tensor among the `leaves`.

    That of a unit has its output, what it records beside (`Recorded`) and what it puts into mappings (`Put`).
    """

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, output: Any) -> OutputForm:
        """The form of `output`, whose tensors are on the meta device."""
        leaves, structure = pytree.tree_flatten(output)
        return cls(tuple(leaves), structure)

    def filled(self, leaves: list[Any]) -> Any:
        """An output of this form with these leaves."""
        return pytree.tree_unflatten(leaves, self.structure)

    @property
    def tensors(self) -> list[Tensor]:
        """The meta tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Called:
    """What was seen of one call of a unit.

    `sources` are those of its arguments, `given` the form of these, a tuple and a dict, `form` that of its output, `flops` the
    floating-point operations of its forward. `changed_later` tells that code behind the call changed its output in place.
    """

    call: UnitCall
    sources: Sources
    given: OutputForm
    form: OutputForm
    flops: int
    changed_later: bool


class Together(NamedTuple):
    """Units that only one stage can run, all of them, and why."""

    units: frozenset[str]
    reason: str


@dataclass(frozen=True)
class Dataflow:
    """The calls of the units in their order, and the sources of the model's output.

    `together` are units between which the model cannot be cut. `changes_inputs` tells that code around the units changes the model's
    arguments in place. `marked` are the units in front of which it calls `pipe_split()` of torch.distributed.pipelining, None for a call
    with no unit between it and the next, or behind it.
    """

    calls: Mapping[UnitCall, Called]
    output: Sources
    together: tuple[Together, ...] = ()
    changes_inputs: bool = False
    marked: tuple[str | None, ...] = ()

    @property
    def units(self) -> list[str]:
        """The units that are called, in the order of their first calls."""
        return list(dict.fromkeys(call.unit for call in self.calls))


def kind_of(leaf: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """What tells kinds of arguments apart: of a tensor what `of_tensor` says of it, a constant itself, of anything else its type."""
    if isinstance(leaf, Tensor):
        return of_tensor(leaf)
    return leaf if isinstance(leaf, (bool, int, float, str, torch.dtype)) or leaf is None else type(leaf)
