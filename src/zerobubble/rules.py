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

BACKWARD = frozenset({Kind.B, Kind.BW})
"""The kinds that turn what F saved into a gradient: each F needs exactly one of them."""


def uses(op: Op, num_stages: int) -> list[Value]:
    """The values `op` cannot start without."""
    found = []
    for stuff, hop in RULES[op.kind].uses:
        stage = op.stage + hop
        if 0 <= stage < num_stages:
            found.append(Value(stuff, stage, op.microbatch))
    return found


def makes(op: Op, num_stages: int, forward_only: bool = False) -> list[Value]:
    """The values `op` leaves behind for other passes; an inference F saves nothing."""
    found = []
    for stuff in RULES[op.kind].makes:
        if stuff is Stuff.ACTIVATION and op.stage == num_stages - 1:
            continue
        if stuff is Stuff.GRADIENT and op.stage == 0:
            continue
        if stuff is Stuff.SAVED and forward_only:
            continue
        found.append(Value(stuff, op.stage, op.microbatch))
    return found


def makers(value: Value) -> list[Op]:
    """The passes that could make `value`: one of them must be in the schedule."""
    return [Op(kind, value.stage, value.microbatch) for kind, rule in RULES.items() if value.stuff in rule.makes]


def user_ops(value: Value) -> list[Op]:
    """The passes that could use `value`."""
    found = []
    for kind, rule in RULES.items():
        found += [Op(kind, value.stage - hop, value.microbatch) for stuff, hop in rule.uses if stuff is value.stuff]
    return found
