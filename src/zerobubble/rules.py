"""Who needs whom, by the table of kinds: the values a pass uses and makes. Nothing else in the package knows a dependency."""

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
    kinds_again,
    kinds_making,
    kinds_using,
    made_where,
    traits_of,
    when_kinds_change,
)
from zerobubble.kinds import MOVES as MOVES
from zerobubble.kinds import Stuff as Stuff


class Value(NamedTuple):
    """A value made by `stage` for `microbatch`. Text form: `a0.3`."""

    stuff: Stuff
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stuff}{self.stage}.{self.microbatch}"


Recomputed = Mapping[tuple[int, int], Kind]
"""By stage and microbatch, the kind of the pass that computes their forward again; without those whose forward is computed once."""


def recomputed(passes: Iterable[Op]) -> Recomputed:
    """What of `passes` is computed again: the forwards there make something else than the table of kinds says, see `made_where`."""
    again = kinds_again()
    return {(stage, microbatch): kind for kind, stage, microbatch in passes if kind in again}


def uses(op: Op, num_stages: int, parts: tuple[int, ...] = ()) -> list[Value]:
    """The values `op` cannot start without; with `parts`, those of a divided head, also what it gathers."""
    own = [Value(stuff, stage, op.microbatch) for stuff, stage in used_stages(op.kind, op.stage, num_stages)]
    for collective in gathered(op.kind, op.stage, num_stages) if parts else ():
        givers = (num_stages - 1,) if collective is Collective.OUTPUT else parts
        own += [Value(collective.stuff, stage, op.microbatch) for stage in givers]
    return own


def makes(op: Op, num_stages: int, forward_only: bool = False, again: Kind | None = None, parts: tuple[int, ...] = ()) -> list[Value]:
    """The values `op` leaves behind for other passes; an inference F saves nothing, one computed `again` by such a pass only its input.

    With `parts`, those of a divided head, they are also what it gives.
    """
    own = [Value(stuff, op.stage, op.microbatch) for stuff in made_stuff(op.kind, op.stage, num_stages, forward_only, again)]
    given = given_to(op.kind, op.stage, num_stages) if parts else ()
    return own + [Value(collective.stuff, op.stage, op.microbatch) for collective in given]


@cache
def used_stages(kind: Kind, stage: int, num_stages: int) -> tuple[tuple[Stuff, int], ...]:
    """What a pass of `kind` and `stage` uses of its own microbatch, as (stuff, stage it belongs to)."""
    return tuple((stuff, stage + hop) for stuff, hop in traits_of(kind).uses if 0 <= stage + hop < num_stages)


@cache
def made_stuff(kind: Kind, stage: int, num_stages: int, forward_only: bool = False, again: Kind | None = None) -> tuple[Stuff, ...]:
    """What a pass of `kind` and `stage` makes for other passes: only what some pass of an existing stage uses."""
    readers = kinds_making(Stuff.ACTIVATION) if forward_only else KINDS
    used = {stuff for reader in readers for stuff, hop in KINDS[reader].uses if 0 <= stage - hop < num_stages}
    return tuple(stuff for stuff in made_where(kind, again) if stuff in used)


def makers(value: Value) -> list[Op]:
    """The passes that could make `value`, those that compute a forward again first: the first of them that is there makes it."""
    kinds = [kind for kind in KINDS if kind in kinds_making(value.stuff)]
    return [Op(kind, value.stage, value.microbatch) for kind in sorted(kinds, key=lambda kind: kind not in kinds_again())]


def moving(kind: Kind) -> Stuff:
    """The one stuff that a kind makes for a neighbouring stage."""
    return next(stuff for stuff in traits_of(kind).makes if stuff in MOVES)


@cache
def given_by(maker: Kind, made_by: int, user: Kind, used_by: int, num_stages: int) -> tuple[Stuff, ...]:
    """What a pass of kind `maker` and stage `made_by` gives that one of kind `user` and stage `used_by` gathers."""
    gathers = gathered(user, used_by, num_stages)
    return tuple(given.stuff for given in given_to(maker, made_by, num_stages) if given in gathers)


@cache
def message_receiver(kind: Kind, stage: int, num_stages: int) -> int | None:
    """The stage that uses what may travel of a pass's results; None where no stage does."""
    for stuff in made_stuff(kind, stage, num_stages):
        if stuff in MOVES:
            readers = (traits for reader in kinds_using(stuff) for traits in [KINDS[reader]])
            return next(stage - hop for traits in readers for used, hop in traits.uses if used is stuff)
    return None


@cache
def given_to(kind: Kind, stage: int, num_stages: int) -> tuple[Collective, ...]:
    """The collectives to which a pass gives a part; the last stage's forward gives its output."""
    output = (Collective.OUTPUT,) if stage == num_stages - 1 and kind in kinds_making(Stuff.ACTIVATION) else ()
    return traits_of(kind).gives + output


@cache
def gathered(kind: Kind, stage: int, num_stages: int) -> tuple[Collective, ...]:
    """The collectives that a pass waits for where some pass gives to them; the last stage's backward gathers its gradient."""
    gradient = (Collective.GRADIENT,) if stage == num_stages - 1 and kind in kinds_making(Stuff.GRADIENT) else ()
    return traits_of(kind).gathers + gradient


@cache
def complete_sets() -> frozenset[frozenset[Kind]]:
    """The sets of kinds that together train one microbatch on one stage.

    Each has one forward, for what stays on the rank one maker and one user or none of both, and no head divided in two ways at once.
    """
    forwards = kinds_making(Stuff.ACTIVATION)
    sets = (frozenset(kinds) for size in range(1, len(KINDS) + 1) for kinds in combinations(KINDS, size))
    trained = (kinds for kinds in sets if len(kinds & forwards) == 1 and all(_is_passed_on(stuff, kinds) for stuff in HELD))
    return frozenset(kinds for kinds in trained if sum(Collective.GRADIENT in KINDS[kind].gives for kind in kinds) <= 1)


def _is_passed_on(stuff: Stuff, kinds: frozenset[Kind]) -> bool:
    """Whether one of `kinds` makes `stuff` and one uses it, or none does either."""
    again = next(iter(kinds & kinds_again()), None)
    num_makers, num_users = sum(stuff in made_where(kind, again) for kind in kinds), len(kinds & kinds_using(stuff))
    return num_makers == num_users <= 1


for _derived in (used_stages, made_stuff, message_receiver, given_to, gathered, given_by, complete_sets):
    when_kinds_change(_derived.cache_clear)
