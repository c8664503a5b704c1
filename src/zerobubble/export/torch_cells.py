"""The cells of PyTorch's schedule CSV: steps, the two ends of a message, the wait for a send, and the care for a stage's weights.

PyTorch writes `<stage><letter><microbatch>` with I for our B and B for our BW; F and W are the same: the table of kinds
has these letters. The grammar is exact, where PyTorch's own reader drops what follows a cell (`2F0junk` is 2F0 to it).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from zerobubble.errors import InputError, ParseError
from zerobubble.ir import Op, Schedule, Step
from zerobubble.kinds import KINDS, Kind, Stuff, kinds_making, traits_of

_DIRECTION = {Stuff.ACTIVATION: "F", Stuff.GRADIENT: "B"}
_STUFF = {letter: stuff for stuff, letter in _DIRECTION.items()}


class End(NamedTuple):
    """One end of a message: `is_send` or the receive. `stage` is that of this rank: the maker's at a send, the user's at a receive."""

    is_send: bool
    stuff: Stuff
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{'SEND' if self.is_send else 'RECV'}_{_DIRECTION[self.stuff]}{self.microbatch}"


class SendWait(NamedTuple):
    """The wait until a message that `stage` sent for `microbatch` has left, after which it is let go. PyTorch has it from version 2.15."""

    stuff: Stuff
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}WAIT_SEND_{_DIRECTION[self.stuff]}{self.microbatch}"


class Care(StrEnum):
    """What happens to the weights of a stage: gathered, given up again, their gradients divided and reduced, the reduction waited for."""

    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"


class Weights(NamedTuple):
    """`care` for the weights of `stage`."""

    care: Care
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.care}"


Cell = Step | End | SendWait | Weights

_PASS = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_END = re.compile(r"([0-9]{1,9})(SEND|RECV)_([FB])([0-9]{1,9})")
_SEND_WAIT = re.compile(r"([0-9]{1,9})WAIT_SEND_([FB])([0-9]{1,9})")
_WEIGHTS = re.compile(rf"([0-9]{{1,9}})({'|'.join(Care)})")


def step_cell(step: Step) -> str:
    """The cell of a step: `0F8`, or `(0F8;7B0)OVERLAP_F_B` for two passes; raises `InputError` for a pass that PyTorch does not know."""
    passes = [f"{op.stage}{_letter(op.kind)}{op.microbatch}" for op in step]
    return passes[0] if len(passes) == 1 else f"({';'.join(passes)})OVERLAP_F_B"


def _letter(kind: Kind) -> str:
    letter = traits_of(kind).torch_letter
    if letter is None:
        known = ", ".join(kind for kind, traits in KINDS.items() if traits.torch_letter)
        raise InputError(f"PyTorch's CSV has no cell for {kind} ({traits_of(kind).phrase}), only for {known}; use the text or JSON form")
    return letter


def cell_text(cell: Cell) -> str:
    """The cell as it stands in the CSV; `parse_cell` reads it back."""
    return str(cell) if isinstance(cell, (End, SendWait, Weights)) else step_cell(cell)


def parse_cell(text: str) -> Cell:
    """Read one cell; raises `ParseError` for anything else."""
    if match := _END.fullmatch(text):
        return End(match[2] == "SEND", _STUFF[match[3]], int(match[1]), int(match[4]))
    if match := _SEND_WAIT.fullmatch(text):
        return SendWait(_STUFF[match[2]], int(match[1]), int(match[3]))
    if match := _WEIGHTS.fullmatch(text):
        return Weights(Care(match[2]), int(match[1]))
    if match := _OVERLAP.fullmatch(text):
        step = tuple(_parse_pass(part.strip(), text) for part in match[1].split(";"))
        if len(step) != 2:
            raise ParseError(f"{text!r} overlaps {len(step)} {'pass' if len(step) == 1 else 'passes'}; an overlapped step has two")
        return step
    return (_parse_pass(text, text),)


def _parse_pass(text: str, cell: str) -> Op:
    match = _PASS.fullmatch(text)
    if match is None:
        example = "(0F8;7B0)OVERLAP_F_B" if cell.startswith("(") else "0F3"
        raise ParseError(f"{cell!r} is not a pass; write <stage><letter><microbatch> with letter F, I, W or B, such as {example}")
    kind = next(kind for kind, traits in KINDS.items() if traits.torch_letter == match[2])
    return Op(kind, int(match[1]), int(match[3]))


def require_expressible(schedule: Schedule) -> None:
    """Raise `InputError` for a schedule that PyTorch cannot play: passes it does not know, several routes, or losses out of order.

    PyTorch keeps one copy of each stage, and takes the first loss that is computed for that of microbatch 0.
    """
    name, routes = schedule.name, len(schedule.placement.routes)
    if routes > 1:
        raise InputError(f"schedule {name!r} has {routes} routes, PyTorch's CSV can hold one; use the text or JSON form")
    for kind in {op.kind for _, _, op in schedule.ops()}:
        _letter(kind)
    forwards, end = kinds_making(Stuff.ACTIVATION), schedule.num_stages - 1
    last = [op.microbatch for _, _, op in schedule.ops() if op.stage == end and op.kind in forwards]
    if last != sorted(last):
        order = " ".join(map(str, last[:8])) + " ..." * (len(last) > 8)
        raise InputError(f"PyTorch numbers losses as they come, but the last stage of {name!r} runs {order}; number the microbatches so")
