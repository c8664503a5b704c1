"""Dependencies between passes, derived from the table of kinds: the values that a pass uses and makes.

No other module encodes a dependency. The checks, the simulation, the lowering and the bounds all use this one, so they agree, and a kind
added to the table works in all of them. Values without a maker or a user are left out: the input of the first stage, the gradient of the
last one, and results that no existing stage uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import combinations
from typing import NamedTuple

from zerobubble.ir import Op
from zerobubble.kinds import (
    HELD,
    KINDS,
    Collective,
    Kind,
    kinds_making,
    kinds_using,
    makes_if_recomputed,
    recomputing_kinds,
    traits_of,
    when_kinds_change,
)
from zerobubble.kinds import SENT_BETWEEN_STAGES as SENT_BETWEEN_STAGES
from zerobubble.kinds import ValueKind as ValueKind


class Value(NamedTuple):
    """A value that `stage` makes for `microbatch`. Text form: `a0.3`."""

    value_kind: ValueKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.value_kind}{self.stage}.{self.microbatch}"


Recomputed = Mapping[tuple[int, int], Kind]
"""By stage and microbatch, the kind of the pass that recomputes their forward, if any does."""


def recomputed(passes: Iterable[Op]) -> Recomputed:
    """Return which forwards `passes` recompute. Such a forward makes other values than its row of the table says.

    See `makes_if_recomputed`.
    """
    recomputed_by = recomputing_kinds()
    return {(stage, microbatch): kind for kind, stage, microbatch in passes if kind in recomputed_by}


def uses(op: Op, num_stages: int, parts: tuple[int, ...] = (), slices: int = 1) -> list[Value]:
    """Return the values that `op` needs to start. With `parts`, those of a divided head, they include the values it gathers.

    If each microbatch has several `slices`, they include what neighboring slices leave to it.
    """
    values = [Value(value_kind, stage, op.microbatch) for value_kind, stage in used_stages(op.kind, op.stage, num_stages)]
    for collective in gathered(op.kind, op.stage, num_stages) if parts else ():
        givers = (num_stages - 1,) if collective is Collective.OUTPUT else parts
        values += [Value(collective.value_kind, stage, op.microbatch) for stage in givers]
    return values + [Value(value_kind, op.stage, maker) for value_kind, maker in carried_to(op.kind, op.microbatch, slices)]


def makes(
    op: Op,
    num_stages: int,
    forward_only: bool = False,
    recomputed_by: Kind | None = None,
    parts: tuple[int, ...] = (),
    slices: int = 1,
) -> list[Value]:
    """Return the values that `op` makes for other passes.

    An F of inference saves nothing. An F that a pass of kind `recomputed_by` recomputes saves only its input. With `parts`, those of a
    divided head, the values include the contributions to collectives. With several `slices`, they include what it leaves to neighboring
    slices.
    """
    values = [
        Value(value_kind, op.stage, op.microbatch)
        for value_kind in made_value_kinds(op.kind, op.stage, num_stages, forward_only, recomputed_by)
    ]
    collectives = given_to(op.kind, op.stage, num_stages) if parts else ()
    values += [Value(collective.value_kind, op.stage, op.microbatch) for collective in collectives]
    return values + [Value(value_kind, op.stage, op.microbatch) for value_kind in carried_from(op.kind, op.microbatch, slices)]


def carried_to(kind: Kind, microbatch: int, slices: int) -> list[tuple[ValueKind, int]]:
    """Return the values that a pass uses of neighboring slices of its stage, as (value kind, microbatch number of the maker).

    With `slices`, microbatch numbers count slices: see `Schedule`.
    """
    if slices == 1:
        return []
    at = microbatch % slices
    return [(value_kind, microbatch + hop) for value_kind, hop in KINDS[kind].carries if 0 <= at + hop < slices]


def carried_from(kind: Kind, microbatch: int, slices: int) -> list[ValueKind]:
    """Return the value kinds that a pass makes for a neighboring slice of its stage."""
    if slices == 1:
        return []
    at = microbatch % slices
    return [value_kind for value_kind, hop in KINDS[kind].carries if 0 <= at - hop < slices]


@cache
def used_stages(kind: Kind, stage: int, num_stages: int) -> tuple[tuple[ValueKind, int], ...]:
    """Return the values of its own microbatch that a pass uses, as (value kind, stage that made it)."""
    return tuple((value_kind, stage + hop) for value_kind, hop in traits_of(kind).uses if 0 <= stage + hop < num_stages)


@cache
def made_value_kinds(
    kind: Kind, stage: int, num_stages: int, forward_only: bool = False, recomputed_by: Kind | None = None
) -> tuple[ValueKind, ...]:
    """Return the value kinds that a pass makes and that some pass of an existing stage uses."""
    readers = kinds_making(ValueKind.ACTIVATION) if forward_only else KINDS
    used = {value_kind for reader in readers for value_kind, hop in KINDS[reader].uses if 0 <= stage - hop < num_stages}
    return tuple(value_kind for value_kind in makes_if_recomputed(kind, recomputed_by) if value_kind in used)


def makers(value: Value) -> list[Op]:
    """Return the passes that can make `value`. The first of them that a schedule contains makes it: R comes before F."""
    kinds = [kind for kind, traits in KINDS.items() if value.value_kind in (*traits.makes, *(carried for carried, _ in traits.carries))]
    return [Op(kind, value.stage, value.microbatch) for kind in sorted(kinds, key=lambda kind: kind not in recomputing_kinds())]


def moving(kind: Kind) -> ValueKind:
    """Return the one value kind that passes of `kind` send to a neighboring stage."""
    return next(value_kind for value_kind in traits_of(kind).makes if value_kind in SENT_BETWEEN_STAGES)


@cache
def given_by(maker: Kind, made_by: int, user: Kind, used_by: int, num_stages: int) -> tuple[ValueKind, ...]:
    """Return the value kinds that a pass of kind `maker` and stage `made_by` gives and one of kind `user` and stage `used_by` gathers."""
    gathers = gathered(user, used_by, num_stages)
    return tuple(collective.value_kind for collective in given_to(maker, made_by, num_stages) if collective in gathers)


@cache
def message_receiver(kind: Kind, stage: int, num_stages: int) -> int | None:
    """Return the stage that receives the message of a pass; None if no stage does."""
    for value_kind in made_value_kinds(kind, stage, num_stages):
        if value_kind in SENT_BETWEEN_STAGES:
            readers = (traits for reader in kinds_using(value_kind) for traits in [KINDS[reader]])
            return next(stage - hop for traits in readers for used, hop in traits.uses if used is value_kind)
    return None


@cache
def given_to(kind: Kind, stage: int, num_stages: int) -> tuple[Collective, ...]:
    """Return the collectives that a pass gives to. The forward of the last stage gives its output."""
    output = (Collective.OUTPUT,) if stage == num_stages - 1 and kind in kinds_making(ValueKind.ACTIVATION) else ()
    return traits_of(kind).gives + output


@cache
def gathered(kind: Kind, stage: int, num_stages: int) -> tuple[Collective, ...]:
    """Return the collectives that a pass waits for if some pass gives to them. The backward of the last stage gathers its gradient."""
    gradient = (Collective.GRADIENT,) if stage == num_stages - 1 and kind in kinds_making(ValueKind.GRADIENT) else ()
    return traits_of(kind).gathers + gradient


@cache
def complete_sets() -> frozenset[frozenset[Kind]]:
    """Return the sets of kinds that together train one microbatch on one stage.

    Each set has exactly one forward. Every value kind that stays on the rank has one maker and one user in the set, or neither. At most
    one kind gives a part of the gradient, since a head cannot be divided by two algorithms at once.
    """
    forwards = kinds_making(ValueKind.ACTIVATION)
    sets = (frozenset(kinds) for size in range(1, len(KINDS) + 1) for kinds in combinations(KINDS, size))
    trained = (kinds for kinds in sets if len(kinds & forwards) == 1 and all(_is_passed_on(value_kind, kinds) for value_kind in HELD))
    return frozenset(kinds for kinds in trained if sum(Collective.GRADIENT in KINDS[kind].gives for kind in kinds) <= 1)


def _is_passed_on(value_kind: ValueKind, kinds: frozenset[Kind]) -> bool:
    """Whether exactly one of `kinds` makes `value_kind` and exactly one uses it, or none does either."""
    recomputed_by = next(iter(kinds & recomputing_kinds()), None)
    num_makers, num_users = (
        sum(value_kind in makes_if_recomputed(kind, recomputed_by) for kind in kinds),
        len(kinds & kinds_using(value_kind)),
    )
    return num_makers == num_users <= 1


# These caches depend on the table of kinds. A stale one would judge schedules by the old table.
for _derived in (used_stages, made_value_kinds, message_receiver, given_to, gathered, given_by, complete_sets):
    when_kinds_change(_derived.cache_clear)
