"""The table of kinds of passes: what each uses and makes, its times, how it runs and how it is drawn.

Passes depend on each other only through values. A pass depends on another pass exactly if it uses a value that the other makes:

    F(s,j)   uses the activation of s-1                      makes its own activation, and what the backward needs (saved)
    B(s,j)   uses saved(s,j) and the gradient from s+1       makes the gradient for s-1, and the remaining weight work (work)
    W(s,j)   uses work(s,j)                                  makes nothing: it adds to the gradients of the weights
    BW(s,j)  uses saved(s,j) and the gradient from s+1       makes the gradient for s-1
    R(s,j)   uses the input of F(s,j)                        makes saved(s,j); F(s,j) then makes only its input instead

A head divided over ranks by its vocabulary has passes of its own, which also depend on each other through collectives (arXiv 2411.05288).
Every rank gives its part, and a pass that gathers waits for all parts of its microbatch. The stage of such a pass identifies its part.

    S(s,j)   gathers the last stage's output     gives to the softmax and the gradient of that output     makes head work for T(s,j)
    T(s,j)   gathers the softmax                 uses head work(s,j): it adds to the gradients of the weights
    SL, TX   the same, but TX computes the gradient of the last stage's output: less work, and one more collective to wait for

With these passes the backward of the last stage gathers its gradient from all parts instead of taking it from the loss.

If microbatches are cut into slices of their sequence, attention makes passes of one stage depend on each other, too. Slice k attends to
the keys and values of the slices before it, and their gradient is complete once the backward of the slices behind it has run:

    F(s,k)        uses the keys of F(s,k-1)             makes keys for F(s,k+1)
    B, BW(s,k)    uses the keys' gradient of B(s,k+1)   makes a gradient for B(s,k-1)

The activation for the first stage comes from the batch and the gradient for the last stage from the loss, so no pass makes them.
Activations and gradients are sent between ranks. Saved values, inputs and work stay on the rank that made them and fill its memory.

Everything that depends on kinds reads this table, so `add_kind` is enough to add a kind of pass, and `add_value_kind` a value kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import ClassVar, TypeVar

from zerobubble.arguments import takes, wrong
from zerobubble.errors import InputError
from zerobubble.listing import listing

__all__ = [
    "KINDS",
    "CheckpointedForward",
    "Collective",
    "Kind",
    "Traits",
    "ValueKind",
    "add_kind",
    "add_value_kind",
    "change_kind",
    "traits_of",
]

__dir__ = listing(__all__)

T = TypeVar("T")


class Kind(str):
    """Kind of pass: F forward, B input gradient, W weight gradient, BW both, R recomputed forward, or an added kind.

    `Kind("F")` is `Kind.F`: each kind is a single object, so kinds can be compared with `is`. Raises `InputError` for letters that are
    not in the table.

    Args:
        letters: The letters of a kind in the table, in the text of passes such as "2BW5".

    Attributes:
        F: Forward.
        B: Input gradient.
        W: Weight gradient.
        BW: Input and weight gradient.
        R: Forward that runs again, to recompute activations.
        S, T: The passes of a head that is divided over ranks.
        SL, TX: The passes of a divided head by the other algorithm.
    """

    __slots__ = ()

    F: ClassVar[Kind]
    B: ClassVar[Kind]
    W: ClassVar[Kind]
    BW: ClassVar[Kind]
    R: ClassVar[Kind]
    S: ClassVar[Kind]
    T: ClassVar[Kind]
    SL: ClassVar[Kind]
    TX: ClassVar[Kind]

    def __new__(cls, letters: str) -> Kind:
        kind = _KIND_OF.get(letters) if isinstance(letters, str) else None
        if kind is None:
            raise _unknown(letters)
        return kind

    def __repr__(self) -> str:
        return f"Kind({str(self)!r})"


class ValueKind(str):
    """Value kind: `a` activation, `g` its gradient, `s` saved for backward, `w` weight work, `i` kept input, or an added one.

    Weight work is what B defers to W. `v` is the value that S makes for T, and `u` the one that SL makes for TX. `o`, `x` and `p` are
    contributions to the collectives of a divided head: the output of the last stage, the maxima and sums of a part's softmax, and a part
    of the gradient for that output. `y` and `q` are the keys and values that a slice of a sequence leaves to the next one, and the gradient
    for them that goes to the slice before.

    Each value kind is a single object, so value kinds can be compared with `is`. Raises `InputError` for a `letter` that was not added.
    """

    __slots__ = ()

    ACTIVATION: ClassVar[ValueKind]
    GRADIENT: ClassVar[ValueKind]
    SAVED: ClassVar[ValueKind]
    WEIGHT_WORK: ClassVar[ValueKind]
    INPUT: ClassVar[ValueKind]
    HEAD_WORK: ClassVar[ValueKind]
    HEAD_LOGITS: ClassVar[ValueKind]
    OUTPUT: ClassVar[ValueKind]
    SOFTMAX_SUMS: ClassVar[ValueKind]
    GRADIENT_PART: ClassVar[ValueKind]
    KEYS: ClassVar[ValueKind]
    KEY_GRADIENT: ClassVar[ValueKind]

    def __new__(cls, letter: str) -> ValueKind:
        value_kind = _VALUE_KIND_OF.get(letter) if isinstance(letter, str) else None
        if value_kind is None:
            message = "{letter!r} is not a value kind; known are {known}"
            raise InputError(message, letter=letter, known=", ".join(_VALUE_KIND_OF), remedy="see zerobubble.kinds.add_value_kind")
        return value_kind

    def __repr__(self) -> str:
        return f"ValueKind({str(self)!r})"


class Collective(Enum):
    """Values that passes of several ranks combine for one microbatch. A pass that gathers one waits for every pass that gives to it."""

    OUTPUT = "the output of the last stage"
    """Given by the last stage's forward."""
    SOFTMAX = "the maximum and sum of the softmax"
    GRADIENT = "the gradient for the output of the last stage"
    """Gathered by the last stage's backward."""

    @property
    def value_kind(self) -> ValueKind:
        """The kind of value that each sending pass contributes, and that all gathering passes receive."""
        return _GIVEN[self]


@takes()
@dataclass(frozen=True, slots=True)
class CheckpointedForward:
    """A forward that another pass recomputes.

    - `makes`: the value kinds that it makes, instead of those in its own row of the table.
    - `run`: the name of the function that runs it: see `zerobubble.runtime.executor.runs`.
    """

    makes: tuple[ValueKind, ...]
    run: str


@takes()
@dataclass(frozen=True, slots=True)
class Traits:
    """A row of the table: the properties of one kind of pass.

    - `phrase`: a description of what it computes, such as `input gradient`.
    - `uses`: the values that it needs to start, as (value kind, hop): a pass of stage `s` uses the value of stage `s + hop`.
    - `makes`: the value kinds that it makes for other passes; at most one of them may be sent between ranks.
    - `carries`: the values that go from slice to slice of a sequence on its stage, as (value kind, hop): a pass of slice `k` uses the value
      of slice `k + hop`, and makes the one for slice `k - hop`.
    - `times`: the columns of `Costs` whose sum is its duration.
    - `fused_time`: an optional column of `Costs` with its duration as a fused pass, used if less than the sum; empty if it has none.
    - `run`: the name of the function that runs it: see `zerobubble.runtime.executor.runs`.
    - `lost`: the consequence of leaving it out, as a clause, such as `no gradient flows back`.
    - `color`: its color in pictures, `#rrggbb`, on the first stage of a rank.
    - `adds_gradients`: whether it adds to the gradients of the parameters of its stage.
    - `uses_weights`: whether it computes with the parameters of its stage. Sharded parameters must be gathered for it. A part of a divided
      head does not use the parameters of the stage that names it.
    - `fills_from_start`: whether the values that it makes count as memory from its start, as for a forward, or from its end.
    - `torch_letter`: its letter in PyTorch's schedule CSV; None if PyTorch has no such pass, so that the export refuses it.
    - `gathers`: the collectives that it waits for, until every pass of its microbatch that gives to them has run.
    - `gives`: the collectives that it contributes to. The forward and backward of the last stage give and gather implicitly.
    - `forward`: for a pass that recomputes the forward of its stage and microbatch, the properties of that forward.
    """

    phrase: str
    uses: tuple[tuple[ValueKind, int], ...]
    makes: tuple[ValueKind, ...]
    times: tuple[str, ...]
    run: str
    lost: str
    color: str = field(repr=False)
    adds_gradients: bool = False
    uses_weights: bool = True
    fills_from_start: bool = False
    torch_letter: str | None = None
    gathers: tuple[Collective, ...] = field(default=(), repr=False)
    gives: tuple[Collective, ...] = field(default=(), repr=False)
    fused_time: str = ""
    forward: CheckpointedForward | None = field(default=None, repr=False)
    carries: tuple[tuple[ValueKind, int], ...] = field(default=(), repr=False)


_VALUE_KIND_OF: dict[str, ValueKind] = {letter: str.__new__(ValueKind, letter) for letter in "agswivuoxpyq"}
_KIND_OF: dict[str, Kind] = {letters: str.__new__(Kind, letters) for letters in ("F", "B", "W", "BW", "R", "S", "T", "SL", "TX")}
(
    ValueKind.ACTIVATION,
    ValueKind.GRADIENT,
    ValueKind.SAVED,
    ValueKind.WEIGHT_WORK,
    ValueKind.INPUT,
    ValueKind.HEAD_WORK,
    ValueKind.HEAD_LOGITS,
    *_given,
) = _VALUE_KIND_OF.values()
ValueKind.OUTPUT, ValueKind.SOFTMAX_SUMS, ValueKind.GRADIENT_PART, ValueKind.KEYS, ValueKind.KEY_GRADIENT = _given
_GIVEN: dict[Collective, ValueKind] = dict(zip(Collective, _given[:3], strict=True))
Kind.F, Kind.B, Kind.W, Kind.BW, Kind.R, Kind.S, Kind.T, Kind.SL, Kind.TX = _KIND_OF.values()

SENT_BETWEEN_STAGES = frozenset({ValueKind.ACTIVATION, ValueKind.GRADIENT})
"""Value kinds that are sent from a stage to its neighbor."""

SENT_BETWEEN_RANKS: dict[ValueKind, tuple[str, str]] = {
    ValueKind.ACTIVATION: ("activation", "activations"),
    ValueKind.GRADIENT: ("gradient", "gradients"),
    ValueKind.OUTPUT: ("output for the head", "outputs for the head"),
    ValueKind.SOFTMAX_SUMS: ("part of the softmax", "parts of the softmax"),
    ValueKind.GRADIENT_PART: ("head's part of the gradient", "head's parts of gradients"),
}
"""Value kinds that may be sent between ranks, with their singular and plural names in messages."""

HELD: dict[ValueKind, str] = {
    ValueKind.SAVED: "held_after_f",
    ValueKind.WEIGHT_WORK: "held_after_b",
    ValueKind.INPUT: "held_input",
    ValueKind.HEAD_WORK: "held_head",
    ValueKind.HEAD_LOGITS: "held_head",
    ValueKind.KEYS: "held_keys",
}
"""Value kinds that stay on their rank and fill its memory, with the column of `Costs` for their bytes. `add_value_kind` adds to it."""

KINDS: dict[Kind, Traits] = {
    Kind.F: Traits(
        phrase="forward",
        uses=((ValueKind.ACTIVATION, -1),),
        makes=(ValueKind.ACTIVATION, ValueKind.SAVED),
        times=("forward",),
        run="forward",
        lost="nothing is computed",
        color="#3d6fc2",
        fills_from_start=True,
        torch_letter="F",
        carries=((ValueKind.KEYS, -1),),
    ),
    Kind.B: Traits(
        phrase="input gradient",
        uses=((ValueKind.SAVED, 0), (ValueKind.GRADIENT, +1)),
        makes=(ValueKind.GRADIENT, ValueKind.WEIGHT_WORK),
        times=("backward",),
        run="backward",
        lost="no gradient flows back",
        color="#34b58c",
        adds_gradients=True,
        torch_letter="I",
        carries=((ValueKind.KEY_GRADIENT, +1),),
    ),
    Kind.W: Traits(
        phrase="weight gradient",
        uses=((ValueKind.WEIGHT_WORK, 0),),
        makes=(),
        times=("weight",),
        run="weight",
        lost="its weight gradient is lost",
        color="#efb13c",
        adds_gradients=True,
        uses_weights=False,
        torch_letter="W",
    ),
    Kind.BW: Traits(
        phrase="backward",
        uses=((ValueKind.SAVED, 0), (ValueKind.GRADIENT, +1)),
        makes=(ValueKind.GRADIENT,),
        times=("backward", "weight"),
        fused_time="fused",
        run="backward with weight",
        lost="no gradient flows back",
        color="#96284f",
        adds_gradients=True,
        torch_letter="B",
        carries=((ValueKind.KEY_GRADIENT, +1),),
    ),
    Kind.R: Traits(
        phrase="recomputed forward",
        uses=((ValueKind.INPUT, 0),),
        makes=(ValueKind.SAVED,),
        times=("recompute",),
        run="recompute",
        lost="the backward finds nothing saved",
        color="#5f246b",
        fills_from_start=True,
        forward=CheckpointedForward(makes=(ValueKind.ACTIVATION, ValueKind.INPUT), run="forward that keeps its input"),
    ),
    Kind.S: Traits(
        phrase="part of the softmax and input gradient",
        uses=(),
        makes=(ValueKind.HEAD_WORK,),
        times=("head_forward", "head_backward"),
        run="part of the softmax and input gradient",
        lost="a part of the vocabulary is missing from the softmax",
        color="#84f0e4",
        uses_weights=False,
        fills_from_start=True,
        gathers=(Collective.OUTPUT,),
        gives=(Collective.SOFTMAX, Collective.GRADIENT),
    ),
    Kind.T: Traits(
        phrase="weight gradient of the head",
        uses=((ValueKind.HEAD_WORK, 0),),
        makes=(),
        times=("head_weight",),
        run="weight gradient of the head",
        lost="a part of the head's weight gradient is lost",
        color="#a88430",
        adds_gradients=True,
        uses_weights=False,
        gathers=(Collective.SOFTMAX,),
    ),
    Kind.SL: Traits(
        phrase="part of the softmax",
        uses=(),
        makes=(ValueKind.HEAD_LOGITS,),
        times=("head_forward",),
        run="part of the softmax",
        lost="a part of the vocabulary is missing from the softmax",
        color="#84f0e4",
        uses_weights=False,
        fills_from_start=True,
        gathers=(Collective.OUTPUT,),
        gives=(Collective.SOFTMAX,),
    ),
    Kind.TX: Traits(
        phrase="backward of the head",
        uses=((ValueKind.HEAD_LOGITS, 0),),
        makes=(),
        times=("head_backward", "head_weight"),
        run="backward of the head",
        lost="a part of the gradient is missing",
        color="#a88430",
        adds_gradients=True,
        uses_weights=False,
        gathers=(Collective.SOFTMAX,),
        gives=(Collective.GRADIENT,),
    ),
}
"""The table of kinds of passes by their letters. `traits_of` looks up a kind and rejects unknown ones; `add_kind` adds to the table."""

_WHEN_CHANGED: list[Callable[[], object]] = []


@takes()
def traits_of(kind: str) -> Traits:
    """Return the row of `kind`; raises `InputError` naming the known kinds if there is none."""
    return KINDS[Kind(kind)]


def makes_if_recomputed(kind: Kind, recomputed_by: Kind | None) -> tuple[ValueKind, ...]:
    """Return what a pass of `kind` makes if a pass of kind `recomputed_by` (None for none) recomputes its forward."""
    checkpointed = checkpointed_forward(kind, recomputed_by)
    return traits_of(kind).makes if checkpointed is None else checkpointed.makes


def checkpointed_forward(kind: Kind, recomputed_by: Kind | None) -> CheckpointedForward | None:
    """Return the properties of a forward of `kind` that a pass of kind `recomputed_by` recomputes; None if it is not recomputed."""
    is_forward = ValueKind.ACTIVATION in traits_of(kind).makes
    return KINDS[recomputed_by].forward if recomputed_by is not None and is_forward else None


def _unknown(kind: object) -> InputError:
    return InputError(
        "{kind!v} is not a kind of pass; known are {known}", kind=kind, known=", ".join(KINDS), remedy="see zerobubble.kinds.add_kind"
    )


class ByKind(dict[Kind, T]):
    """A value for each kind, computed by `make` on first access; a kind outside the table raises `InputError`."""

    def __init__(self, make: Callable[[Kind], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, kind: Kind) -> T:
        traits_of(kind)
        value = self[kind] = self._make(kind)
        return value


def when_kinds_change(forget: Callable[[], object]) -> None:
    """Register `forget`, which is called whenever the table changes. Every cache of values derived from the table needs it."""
    _WHEN_CHANGED.append(forget)


def _changed() -> None:
    for forget in _WHEN_CHANGED:
        forget()


@cache
def kinds_making(value_kind: ValueKind) -> frozenset[Kind]:
    """Return the kinds that make `value_kind`. Kinds that make an activation are forwards, kinds that make a gradient are backwards."""
    return frozenset(kind for kind, traits in KINDS.items() if value_kind in traits.makes)


@cache
def kinds_using(value_kind: ValueKind) -> frozenset[Kind]:
    """Return the kinds that use `value_kind`. Kinds that use weight work are the second part of a split backward."""
    return frozenset(kind for kind, traits in KINDS.items() if any(used is value_kind for used, _ in traits.uses))


@cache
def recomputing_kinds() -> frozenset[Kind]:
    """Return the kinds that recompute a forward."""
    return frozenset(kind for kind, traits in KINDS.items() if traits.forward is not None)


@cache
def head_kinds() -> frozenset[Kind]:
    """Return the kinds of a divided head: they gather from collectives or give to them."""
    return frozenset(kind for kind, traits in KINDS.items() if traits.gathers or traits.gives)


for _derived in (kinds_making, kinds_using, recomputing_kinds, head_kinds):
    when_kinds_change(_derived.cache_clear)


@takes()
def add_value_kind(letter: str, held: str) -> ValueKind:
    """Add a value kind that stays on its rank; `held` names the column of `Costs` with its bytes.

    Raises `InputError` unless `letter` is one lower-case letter that is not taken.
    """
    if not re.fullmatch("[a-z]", letter):
        raise wrong("the name of a value kind", letter, "one letter from a to z")
    if letter in _VALUE_KIND_OF:
        raise InputError(
            "the value kind {letter!r} is taken", letter=letter, remedy=f"choose a letter other than {', '.join(_VALUE_KIND_OF)}"
        )
    value_kind = _VALUE_KIND_OF[letter] = str.__new__(ValueKind, letter)
    HELD[value_kind] = held
    _changed()
    return value_kind


@takes()
def add_kind(letters: str, traits: Traits) -> Kind:
    """Add the kind of pass `letters`, with its `traits`, to the table of this process. Every rank that runs it must add it.

    Schedules with the new kind can then be read, checked, simulated, lowered and drawn. Raises `InputError` unless `letters` are one to
    three capital letters that are not taken, and for inconsistent traits.
    """
    if not re.fullmatch("[A-Z]{1,3}", letters):
        raise wrong("the name of a kind of pass", letters, "one to three capital letters")
    if letters in _KIND_OF:
        raise InputError("the kind {letters} is taken", letters=letters, remedy=f"choose letters other than {', '.join(KINDS)}")
    _check_traits(letters, traits)
    kind = _KIND_OF[letters] = str.__new__(Kind, letters)
    KINDS[kind] = traits
    _changed()
    return kind


def _check_traits(letters: str, traits: Traits) -> None:
    moving = [value_kind for value_kind in traits.makes if value_kind in SENT_BETWEEN_STAGES]
    if len(moving) > 1:
        raise InputError("a pass sends at most one message, but {letters} makes {moving}", letters=letters, moving=" and ".join(moving))
    away = [value_kind for value_kind, hop in traits.uses if hop and value_kind not in SENT_BETWEEN_STAGES]
    if away:
        message = "{letters} uses {away} of another stage, but only {allowed} are sent between stages"
        raise InputError(message, letters=letters, away=away[0], allowed=" and ".join(sorted(SENT_BETWEEN_STAGES)))
    checkpointed = traits.forward
    if checkpointed is not None and [value_kind for value_kind in checkpointed.makes if value_kind in SENT_BETWEEN_STAGES] != [
        ValueKind.ACTIVATION
    ]:
        makes = " and ".join(checkpointed.makes) or "nothing"
        message = "the forward that {letters} recomputes must send its activation a and nothing else, but makes {made}"
        raise InputError(message, letters=letters, made=makes)
    if not re.fullmatch("#[0-9a-fA-F]{6}", traits.color):
        raise wrong(f"the color of {letters}", traits.color, "written as #rrggbb")


@takes()
def change_kind(kind: Kind, traits: Traits) -> None:
    """Replace the traits of `kind` by `traits` in this process; raises as `add_kind` does."""
    _check_traits(kind, traits)
    KINDS[kind] = traits
    _changed()
