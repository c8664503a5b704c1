"""The one table of rules: what each kind of pass uses, makes and holds. Nothing else in the package knows a dependency.

Passes meet only through values. A pass needs another pass exactly when it uses a value the other makes:

    F(s,j)   uses the activation of s-1                      makes its own activation, and what backward will need (saved)
    B(s,j)   uses saved(s,j) and the gradient from s+1       makes the gradient for s-1, and weight work left to do (work)
    W(s,j)   uses work(s,j)                                  makes nothing: it adds into the weights' gradients
    BW(s,j)  uses saved(s,j) and the gradient from s+1       makes the gradient for s-1

The first stage's activation comes from the batch and the last stage's gradient from the loss, so those need no pass.
Activations and gradients travel between ranks; saved and work stay where they were made and are what fills the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from zerobubble.ir import Kind, Op


class Stuff(StrEnum):
    """What a value is: `a` activation, `g` gradient of an activation, `s` saved for backward, `w` weight work."""

    ACTIVATION = "a"
    GRADIENT = "g"
    SAVED = "s"
    WORK = "w"


class Value(NamedTuple):
    """A value made by `stage` for `microbatch`. Text form: `a0.3`."""

    stuff: Stuff
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stuff.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Rule:
    """`uses` and `makes`: (stuff, hop) pairs, where the value belongs to stage `s + hop` of a pass of stage `s`."""

    uses: tuple[tuple[Stuff, int], ...]
    makes: tuple[Stuff, ...]
    phrase: str


RULES: dict[Kind, Rule] = {
    Kind.F: Rule(((Stuff.ACTIVATION, -1),), (Stuff.ACTIVATION, Stuff.SAVED), "forward"),
    Kind.B: Rule(((Stuff.SAVED, 0), (Stuff.GRADIENT, +1)), (Stuff.GRADIENT, Stuff.WORK), "input gradient"),
    Kind.W: Rule(((Stuff.WORK, 0),), (), "weight gradient"),
    Kind.BW: Rule(((Stuff.SAVED, 0), (Stuff.GRADIENT, +1)), (Stuff.GRADIENT,), "backward"),
}

MOVES = frozenset({Stuff.ACTIVATION, Stuff.GRADIENT})
"""Stuff that may travel between ranks."""

MOVING = {kind: stuff for kind, rule in RULES.items() for stuff in rule.makes if stuff in MOVES}
"""The one stuff that may travel among what a kind makes."""

BACKWARD = frozenset({Kind.B, Kind.BW})
"""The kinds that turn what F saved into a gradient: each F needs exactly one of them."""


def uses(op: Op, num_stages: int) -> list[Value]:
    """The values `op` cannot start without."""
    return [Value(stuff, stage, op.microbatch) for stuff, stage in used_stages(op.kind, op.stage, num_stages)]


def makes(op: Op, num_stages: int, forward_only: bool = False) -> list[Value]:
    """The values `op` leaves behind for other passes; an inference F saves nothing."""
    return [Value(stuff, op.stage, op.microbatch) for stuff in made_stuff(op.kind, op.stage, num_stages, forward_only)]


@cache
def used_stages(kind: Kind, stage: int, num_stages: int) -> tuple[tuple[Stuff, int], ...]:
    """What a pass of `kind` and `stage` uses of its own microbatch, as (stuff, stage it belongs to)."""
    return tuple((stuff, stage + hop) for stuff, hop in RULES[kind].uses if 0 <= stage + hop < num_stages)


@cache
def made_stuff(kind: Kind, stage: int, num_stages: int, forward_only: bool = False) -> tuple[Stuff, ...]:
    """What a pass of `kind` and `stage` makes for other passes: only what some pass of an existing stage uses."""
    readers = [Kind.F] if forward_only else list(RULES)
    used = {stuff for reader in readers for stuff, hop in RULES[reader].uses if 0 <= stage - hop < num_stages}
    return tuple(stuff for stuff in RULES[kind].makes if stuff in used)


def makers(value: Value) -> list[Op]:
    """The passes that could make `value`: one of them must be in the schedule."""
    return [Op(kind, value.stage, value.microbatch) for kind, rule in RULES.items() if value.stuff in rule.makes]
