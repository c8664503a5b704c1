"""The one table of kinds of passes: what each uses, makes, takes, adds, how it runs and how it looks. Every reader goes by it.

Passes meet only through values. A pass needs another pass exactly when it uses a value the other makes:

    F(s,j)   uses the activation of s-1                      makes its own activation, and what backward will need (saved)
    B(s,j)   uses saved(s,j) and the gradient from s+1       makes the gradient for s-1, and weight work left to do (work)
    W(s,j)   uses work(s,j)                                  makes nothing: it adds into the weights' gradients
    BW(s,j)  uses saved(s,j) and the gradient from s+1       makes the gradient for s-1
    R(s,j)   uses the input of F(s,j)                        makes saved(s,j), which F(s,j) then does not make: it keeps its input alone

A head that is divided over ranks by its vocabulary has passes of its own, which meet through collectives besides (arXiv 2411.05288): every
rank gives its part, and whoever gathers waits for all parts of its microbatch. The stage of such a pass says which part it computes.

    S(s,j)   gathers the last stage's output     gives to the softmax and the gradient of that output     makes head work for T(s,j)
    T(s,j)   gathers the softmax                 uses head work(s,j): it adds into the weights' gradients
    SL, TX   the same with the gradient of the last stage's output in TX: less work, and one more collective to wait for

With them the last stage's backward gathers its gradient from all parts instead of taking it from the loss.

The first stage's activation comes from the batch and the last stage's gradient from the loss, so those need no pass.
Activations and gradients travel between ranks; saved, input and work stay where they were made and are what fills the memory.

The table is open: `add_kind` gives it a further row, and `add_stuff` a further thing that passes leave for each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import ClassVar, TypeVar

from zerobubble.errors import InputError

__all__ = ["KINDS", "Collective", "Kind", "LeanForward", "Stuff", "Traits", "add_kind", "add_stuff", "change_kind", "traits_of"]

T = TypeVar("T")


class Kind(str):
    """What a pass computes: F forward, B gradient for the input, W gradient for the weights, BW both in one, R forward again, or added.

    S and T, or SL and TX, are the passes of a divided head.

    `Kind("F")` is `Kind.F`: there is one object for each kind of the table, so kinds may be compared with `is`. Raises `InputError`
    for letters that the table does not hold.
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
        known = _KIND_OF.get(letters)
        if known is None:
            raise _unknown(letters)
        return known

    def __repr__(self) -> str:
        return f"Kind({str(self)!r})"


class Stuff(str):
    """What a value is: `a` activation, `g` its gradient, `s` saved for backward, `w` weight work, `i` kept input, or what was added.

    `v` is what S leaves for T, and `u` what SL leaves for TX. `o`, `x` and `p` are what passes of a divided head put together: the last
    stage's output, the maxima and sums of a part's softmax, and a part of the gradient for that output.

    There is one object for each, so stuff may be compared with `is`. Raises `InputError` for a letter that was not added.
    """

    __slots__ = ()

    ACTIVATION: ClassVar[Stuff]
    GRADIENT: ClassVar[Stuff]
    SAVED: ClassVar[Stuff]
    WORK: ClassVar[Stuff]
    INPUT: ClassVar[Stuff]
    HEAD_WORK: ClassVar[Stuff]
    HEAD_LOGITS: ClassVar[Stuff]
    OUTPUT: ClassVar[Stuff]
    SOFTMAX_SUMS: ClassVar[Stuff]
    GRADIENT_PART: ClassVar[Stuff]

    def __new__(cls, letter: str) -> Stuff:
        known = _STUFF_OF.get(letter)
        if known is None:
            raise InputError(f"{letter!r} is nothing that passes leave for each other; known are {', '.join(_STUFF_OF)}: see add_stuff")
        return known

    def __repr__(self) -> str:
        return f"Stuff({str(self)!r})"


class Collective(Enum):
    """What passes of several ranks put together for one microbatch: whoever gathers it waits for every pass that gives to it."""

    OUTPUT = "the output of the last stage"
    """Given by the last stage's forward."""
    SOFTMAX = "the maximum and sum of the softmax"
    GRADIENT = "the gradient for the output of the last stage"
    """Gathered by the last stage's backward."""

    @property
    def stuff(self) -> Stuff:
        """What each pass that gives to it leaves for all that gather it."""
        return _GIVEN[self]


@dataclass(frozen=True, slots=True)
class LeanForward:
    """What the forward of a stage and microbatch is where another pass computes it again.

    - `makes`: what it leaves for other passes, instead of what its own row of the table says.
    - `run`: the name of the function that runs it: see `zerobubble.runtime.executor.runs`.
    """

    makes: tuple[Stuff, ...]
    run: str


@dataclass(frozen=True, slots=True)
class Traits:
    """A row of the table: all that is known of one kind of pass.

    - `phrase`: what it computes, in words, such as `input gradient`.
    - `uses`: the values without which it cannot start, as (stuff, hop): what stage `s + hop` made, for a pass of stage `s`.
    - `makes`: what it leaves for other passes; at most one that travels between ranks.
    - `times`: the columns of `Costs` whose sum is its duration.
    - `in_one`: the further column of `Costs` with its duration where that is less than the sum, in costs that have it; empty for none.
    - `run`: the name of the function that runs it: see `zerobubble.runtime.executor.runs`.
    - `lost`: what goes wrong without it, as a clause, such as `no gradient flows back`.
    - `colour`: its colour in pictures, `#rrggbb`, on the first stage of a rank.
    - `adds_gradients`: whether it adds to the gradients of the parameters of its stage.
    - `uses_weights`: whether it computes with the parameters of its stage, which must then be there where they lie in shards. A part of
      the head is no part of the stage by which it goes.
    - `fills_from_start`: whether memory counts what it makes from its start on, as for a forward; otherwise from its end.
    - `torch_letter`: its letter in PyTorch's schedule CSV; None where PyTorch has no such pass, so that the export is refused.
    - `gathers`: the collectives that it waits for: until every pass of its microbatch that gives to them has run.
    - `gives`: the collectives that it gives a part to. The last stage's forward and backward give and gather without saying so here.
    - `forward`: for a pass that computes the forward of its stage and microbatch again, what that forward is where this pass follows.
    """

    phrase: str
    uses: tuple[tuple[Stuff, int], ...]
    makes: tuple[Stuff, ...]
    times: tuple[str, ...]
    run: str
    lost: str
    colour: str = field(repr=False)
    adds_gradients: bool = False
    uses_weights: bool = True
    fills_from_start: bool = False
    torch_letter: str | None = None
    gathers: tuple[Collective, ...] = field(default=(), repr=False)
    gives: tuple[Collective, ...] = field(default=(), repr=False)
    in_one: str = ""
    forward: LeanForward | None = field(default=None, repr=False)


_STUFF_OF: dict[str, Stuff] = {letter: str.__new__(Stuff, letter) for letter in "agswivuoxp"}
_KIND_OF: dict[str, Kind] = {letters: str.__new__(Kind, letters) for letters in ("F", "B", "W", "BW", "R", "S", "T", "SL", "TX")}
Stuff.ACTIVATION, Stuff.GRADIENT, Stuff.SAVED, Stuff.WORK, Stuff.INPUT, Stuff.HEAD_WORK, Stuff.HEAD_LOGITS, *_given = _STUFF_OF.values()
Stuff.OUTPUT, Stuff.SOFTMAX_SUMS, Stuff.GRADIENT_PART = _given
_GIVEN: dict[Collective, Stuff] = dict(zip(Collective, _given, strict=True))
Kind.F, Kind.B, Kind.W, Kind.BW, Kind.R, Kind.S, Kind.T, Kind.SL, Kind.TX = _KIND_OF.values()

MOVES = frozenset({Stuff.ACTIVATION, Stuff.GRADIENT})
"""Stuff that travels from a stage to its neighbour."""

TRAVELS: dict[Stuff, tuple[str, str]] = {
    Stuff.ACTIVATION: ("activation", "activations"),
    Stuff.GRADIENT: ("gradient", "gradients"),
    Stuff.OUTPUT: ("output for the head", "outputs for the head"),
    Stuff.SOFTMAX_SUMS: ("part of the softmax", "parts of the softmax"),
    Stuff.GRADIENT_PART: ("head's part of the gradient", "head's parts of gradients"),
}
"""Stuff that may be sent from rank to rank, with its name in messages, for one and for several."""

HELD: dict[Stuff, str] = {
    Stuff.SAVED: "held_after_f",
    Stuff.WORK: "held_after_b",
    Stuff.INPUT: "held_input",
    Stuff.HEAD_WORK: "held_head",
    Stuff.HEAD_LOGITS: "held_head",
}
"""Stuff that stays on its rank and fills its memory, with the column of `Costs` that tells its bytes. `add_stuff` adds to it."""

KINDS: dict[Kind, Traits] = {
    Kind.F: Traits(
        phrase="forward",
        uses=((Stuff.ACTIVATION, -1),),
        makes=(Stuff.ACTIVATION, Stuff.SAVED),
        times=("forward",),
        run="forward",
        lost="nothing is computed",
        colour="#3d6fc2",
        fills_from_start=True,
        torch_letter="F",
    ),
    Kind.B: Traits(
        phrase="input gradient",
        uses=((Stuff.SAVED, 0), (Stuff.GRADIENT, +1)),
        makes=(Stuff.GRADIENT, Stuff.WORK),
        times=("backward",),
        run="backward",
        lost="no gradient flows back",
        colour="#34b58c",
        adds_gradients=True,
        torch_letter="I",
    ),
    Kind.W: Traits(
        phrase="weight gradient",
        uses=((Stuff.WORK, 0),),
        makes=(),
        times=("weight",),
        run="weight",
        lost="its weight gradient is lost",
        colour="#efb13c",
        adds_gradients=True,
        uses_weights=False,
        torch_letter="W",
    ),
    Kind.BW: Traits(
        phrase="backward",
        uses=((Stuff.SAVED, 0), (Stuff.GRADIENT, +1)),
        makes=(Stuff.GRADIENT,),
        times=("backward", "weight"),
        in_one="fused",
        run="backward with weight",
        lost="no gradient flows back",
        colour="#96284f",
        adds_gradients=True,
        torch_letter="B",
    ),
    Kind.R: Traits(
        phrase="forward again",
        uses=((Stuff.INPUT, 0),),
        makes=(Stuff.SAVED,),
        times=("recompute",),
        run="forward again",
        lost="the backward finds nothing saved",
        colour="#5f246b",
        fills_from_start=True,
        forward=LeanForward(makes=(Stuff.ACTIVATION, Stuff.INPUT), run="forward that keeps its input"),
    ),
    Kind.S: Traits(
        phrase="part of the softmax and input gradient",
        uses=(),
        makes=(Stuff.HEAD_WORK,),
        times=("head_forward", "head_backward"),
        run="part of the softmax and input gradient",
        lost="a part of the vocabulary is missing from the softmax",
        colour="#84f0e4",
        uses_weights=False,
        fills_from_start=True,
        gathers=(Collective.OUTPUT,),
        gives=(Collective.SOFTMAX, Collective.GRADIENT),
    ),
    Kind.T: Traits(
        phrase="weight gradient of the head",
        uses=((Stuff.HEAD_WORK, 0),),
        makes=(),
        times=("head_weight",),
        run="weight gradient of the head",
        lost="a part of the head's weight gradient is lost",
        colour="#a88430",
        adds_gradients=True,
        uses_weights=False,
        gathers=(Collective.SOFTMAX,),
    ),
    Kind.SL: Traits(
        phrase="part of the softmax",
        uses=(),
        makes=(Stuff.HEAD_LOGITS,),
        times=("head_forward",),
        run="part of the softmax",
        lost="a part of the vocabulary is missing from the softmax",
        colour="#84f0e4",
        uses_weights=False,
        fills_from_start=True,
        gathers=(Collective.OUTPUT,),
        gives=(Collective.SOFTMAX,),
    ),
    Kind.TX: Traits(
        phrase="backward of the head",
        uses=((Stuff.HEAD_LOGITS, 0),),
        makes=(),
        times=("head_backward", "head_weight"),
        run="backward of the head",
        lost="a part of the gradient is missing",
        colour="#a88430",
        adds_gradients=True,
        uses_weights=False,
        gathers=(Collective.SOFTMAX,),
        gives=(Collective.GRADIENT,),
    ),
}
"""The table of kinds of passes, by their letters. `traits_of` looks a kind up in it and refuses unknown ones; `add_kind` adds to it."""

_WHEN_CHANGED: list[Callable[[], object]] = []


def traits_of(kind: str) -> Traits:
    """The row of `kind`; raises `InputError` naming the known kinds where there is none."""
    return KINDS[Kind(kind)]


def made_where(kind: Kind, again: Kind | None) -> tuple[Stuff, ...]:
    """What a pass of `kind` makes where a pass of kind `again` computes the forward of its stage and microbatch again, None for none."""
    traits = traits_of(kind)
    lean = None if again is None else KINDS[again].forward
    return traits.makes if lean is None or Stuff.ACTIVATION not in traits.makes else lean.makes


def _unknown(kind: object) -> InputError:
    return InputError(f"{str(kind)!r} is not a kind of pass; known are {', '.join(KINDS)}: see zerobubble.kinds.add_kind")


class ByKind(dict[Kind, T]):
    """Something for each kind, worked out by `make` when it is first asked for; a kind outside the table raises `InputError`."""

    def __init__(self, make: Callable[[Kind], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, kind: Kind) -> T:
        traits_of(kind)
        value = self[kind] = self._make(kind)
        return value


def when_kinds_change(forget: Callable[[], object]) -> None:
    """Have `forget` called whenever the table changes: for what was derived from it and is kept."""
    _WHEN_CHANGED.append(forget)


def _changed() -> None:
    for forget in _WHEN_CHANGED:
        forget()


@cache
def kinds_making(stuff: Stuff) -> frozenset[Kind]:
    """The kinds that make `stuff`: those that make an activation are the forwards, those that make a gradient the backwards."""
    return frozenset(kind for kind, traits in KINDS.items() if stuff in traits.makes)


@cache
def kinds_using(stuff: Stuff) -> frozenset[Kind]:
    """The kinds that use `stuff`: those that use weight work take it out of the backward pass."""
    return frozenset(kind for kind, traits in KINDS.items() if any(used is stuff for used, _ in traits.uses))


@cache
def kinds_again() -> frozenset[Kind]:
    """The kinds that compute a forward again."""
    return frozenset(kind for kind, traits in KINDS.items() if traits.forward is not None)


@cache
def head_kinds() -> frozenset[Kind]:
    """The kinds of a divided head's passes: those that gather or give parts."""
    return frozenset(kind for kind, traits in KINDS.items() if traits.gathers or traits.gives)


for _derived in (kinds_making, kinds_using, kinds_again, head_kinds):
    when_kinds_change(_derived.cache_clear)


def add_stuff(letter: str, held: str) -> Stuff:
    """Let passes leave something new for each other, on their own rank; `held` names the column of `Costs` with its bytes.

    Raises `InputError` for a letter that is taken or is not one lower-case letter.
    """
    if not re.fullmatch("[a-z]", letter):
        raise InputError(f"what passes leave for each other is named by one letter from a to z, got {letter!r}")
    if letter in _STUFF_OF:
        raise InputError(f"{letter!r} is taken; taken are {', '.join(_STUFF_OF)}")
    stuff = _STUFF_OF[letter] = str.__new__(Stuff, letter)
    HELD[stuff] = held
    _changed()
    return stuff


def add_kind(letters: str, traits: Traits) -> Kind:
    """Add a kind of pass to the table, in this process: every rank that runs it has to. It is then read, checked, timed and drawn.

    Raises `InputError` for letters that are taken or are not one to three capitals, and for traits that no pass can have.
    """
    if not re.fullmatch("[A-Z]{1,3}", letters):
        raise InputError(f"a kind of pass is named by one to three capital letters, got {letters!r}")
    if letters in _KIND_OF:
        raise InputError(f"there is a kind {letters} already; known are {', '.join(KINDS)}")
    _check_traits(letters, traits)
    kind = _KIND_OF[letters] = str.__new__(Kind, letters)
    KINDS[kind] = traits
    _changed()
    return kind


def _check_traits(letters: str, traits: Traits) -> None:
    moving = [stuff for stuff in traits.makes if stuff in MOVES]
    if len(moving) > 1:
        raise InputError(f"a pass sends at most one message, but {letters} makes {' and '.join(moving)}")
    away = [stuff for stuff, hop in traits.uses if hop and stuff not in MOVES]
    if away:
        raise InputError(f"{letters} uses {away[0]} of another stage, but only {' and '.join(sorted(MOVES))} travel between stages")
    lean = traits.forward
    if lean is not None and [stuff for stuff in lean.makes if stuff in MOVES] != [Stuff.ACTIVATION]:
        made = " and ".join(lean.makes) or "nothing"
        raise InputError(f"the forward that {letters} computes again sends its activation a and nothing else, but makes {made}")
    if not re.fullmatch("#[0-9a-fA-F]{6}", traits.colour):
        raise InputError(f"the colour of {letters} is written #rrggbb, got {traits.colour!r}")


def change_kind(kind: Kind, traits: Traits) -> None:
    """Give `kind` other traits, in this process; raises as `add_kind` does."""
    _check_traits(kind, traits)
    KINDS[kind] = traits
    _changed()


@contextmanager
def kinds_restored() -> Iterator[None]:
    """Whatever the block adds or changes is gone after it: for tests and for trying a kind out."""
    kinds, stuff = dict(KINDS), dict(HELD)
    try:
        yield
    finally:
        for letters in KINDS.keys() - kinds.keys():
            del _KIND_OF[letters]
        for letter in HELD.keys() - stuff.keys():
            del _STUFF_OF[letter]
        KINDS.clear()
        KINDS.update(kinds)
        HELD.clear()
        HELD.update(stuff)
        _changed()
