"""The dataflow between the units of a model in one forward, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class UnitCall(NamedTuple):
    """The `number`-th call of a unit in one forward, counted from 0."""

    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.unit!r}" if self.number == 0 else f"call {self.number} of {self.unit!r}"


class DirectParameter(NamedTuple):
    """A parameter that code between the units uses, by name."""

    name: str


class RandomDraw(NamedTuple):
    """The `number`-th draw of random numbers by code between the units, such as dropout of outputs of the units `behind`."""

    number: int
    operation: str
    behind: tuple[str, ...]


Source = UnitCall | DirectParameter | RandomDraw
"""The origin of a tensor. The model's inputs and constants have no source: every stage has the inputs."""
Sources = frozenset[Source]


class OutputForm(NamedTuple):
    """The form of a call's output: its `structure` and its `leaves`, with a meta tensor for each tensor.

    For a unit, it includes the output, recorded outputs (`Recorded`) and entries put into mappings (`Put`).
    """

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @classmethod
    def from_output(cls, output: Any) -> OutputForm:
        """Returns the form of `output`, whose tensors are on the meta device."""
        leaves, structure = pytree.tree_flatten(output)
        return cls(tuple(leaves), structure)

    def filled(self, leaves: list[Any]) -> Any:
        """Returns an output of this form with these leaves."""
        return pytree.tree_unflatten(leaves, self.structure)

    @property
    def tensors(self) -> list[Tensor]:
        """Returns the meta tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class CallRecord:
    """The observation of one call of a unit.

    `sources` are the sources of its arguments, `given` is their form (a tuple and a dict), `form` the form of its output, and `flops` the
    FLOPs of its forward. `changed_later` is True if code after the call changed its output in place.
    """

    call: UnitCall
    sources: Sources
    given: OutputForm
    form: OutputForm
    flops: int
    changed_later: bool


class Together(NamedTuple):
    """Units that must be in one stage, and the reason."""

    units: frozenset[str]
    reason: str


@dataclass(frozen=True)
class Dataflow:
    """The calls of the units in order, and the sources of the model's output.

    `together` are units between which the model cannot be cut. `changes_inputs` is True if code around the units changes the model's
    arguments in place. `marked` are the units before which it calls `pipe_split()` of torch.distributed.pipelining, with None for a call
    that no unit follows before the next call or the end. `drawn` are the generators of Python, NumPy and the model that this code draws
    from, by path, with the number of unit calls before the last draw. `places` are the numbers of unit calls before its draws from torch's
    default generators. `reads_draws` is True if it reads such numbers, as by `item`.
    """

    calls: Mapping[UnitCall, CallRecord]
    output: Sources
    together: tuple[Together, ...] = ()
    changes_inputs: bool = False
    marked: tuple[str | None, ...] = ()
    drawn: Mapping[str, int] = field(default_factory=dict)
    places: frozenset[int] = frozenset()
    reads_draws: bool = False

    @property
    def units(self) -> list[str]:
        """Returns the called units, in the order of their first calls."""
        return list(dict.fromkeys(call.unit for call in self.calls))


def kind_of(leaf: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """Returns a key for an argument: `of_tensor` of a tensor, a constant itself, the type of any other value."""
    if isinstance(leaf, Tensor):
        return of_tensor(leaf)
    return leaf if isinstance(leaf, (bool, int, float, str, torch.dtype)) or leaf is None else type(leaf)
