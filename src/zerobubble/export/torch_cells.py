"""The cells of PyTorch's schedule CSV: steps, both ends of messages, waits for sends, and operations on a stage's weights.

PyTorch writes `<stage><letter><microbatch>`, with I for our B and B for our BW; F and W are the same. The table of kinds has these letters.
The grammar is strict, whereas PyTorch's reader ignores characters after a cell (it reads `2F0junk` as 2F0).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from zerobubble.errors import InputError, ParseError
from zerobubble.ir import Op, Schedule, Step
from zerobubble.kinds import KINDS, Kind, ValueKind, kinds_making, traits_of
from zerobubble.units import counted

_DIRECTION = {ValueKind.ACTIVATION: "F", ValueKind.GRADIENT: "B"}
_VALUE_KINDS = {letter: value_kind for value_kind, letter in _DIRECTION.items()}


class MessageEnd(NamedTuple):
    """One end of a message, a send or a receive. `stage` is on this rank: the maker's for a send, the user's for a receive."""

    is_send: bool
    value_kind: ValueKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{'SEND' if self.is_send else 'RECV'}_{_DIRECTION[self.value_kind]}{self.microbatch}"


class SendWait(NamedTuple):
    """The wait for a send of `stage` and `microbatch`, after which its buffer is freed. PyTorch has it since version 2.15."""

    value_kind: ValueKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}WAIT_SEND_{_DIRECTION[self.value_kind]}{self.microbatch}"


class WeightAction(StrEnum):
    """Operation on the weights of a stage: gather, free, divide and reduce gradients, wait for the reduction."""

    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"


class Weights(NamedTuple):
    """An `action` on the weights of `stage`."""

    action: WeightAction
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.action}"


Cell = Step | MessageEnd | SendWait | Weights

_PASS = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_END = re.compile(r"([0-9]{1,9})(SEND|RECV)_([FB])([0-9]{1,9})")
_SEND_WAIT = re.compile(r"([0-9]{1,9})WAIT_SEND_([FB])([0-9]{1,9})")
_WEIGHTS = re.compile(rf"([0-9]{{1,9}})({'|'.join(WeightAction)})")


def step_cell(step: Step) -> str:
    """Return the cell of a step, such as `0F8` or `(0F8;7B0)OVERLAP_F_B`; raises `InputError` for a pass that PyTorch does not have."""
    passes = [f"{op.stage}{_letter(op.kind)}{op.microbatch}" for op in step]
    return passes[0] if len(passes) == 1 else f"({';'.join(passes)})OVERLAP_F_B"


def _letter(kind: Kind) -> str:
    letter = traits_of(kind).torch_letter
    if letter is None:
        having = ", ".join(kind for kind, traits in KINDS.items() if traits.torch_letter)
        message = "PyTorch's CSV has no cell for {kind} ({phrase}), only for {known}; {remedy}"
        raise InputError(message, kind=str(kind), phrase=traits_of(kind).phrase, known=having, remedy="use the text or JSON form")
    return letter


def cell_text(cell: Cell) -> str:
    """Return the text of a cell; `parse_cell` reads it."""
    return str(cell) if isinstance(cell, (MessageEnd, SendWait, Weights)) else step_cell(cell)


def parse_cell(text: str) -> Cell:
    """Read one cell; raises `ParseError` for anything else."""
    if match := _END.fullmatch(text):
        return MessageEnd(match[2] == "SEND", _VALUE_KINDS[match[3]], int(match[1]), int(match[4]))
    if match := _SEND_WAIT.fullmatch(text):
        return SendWait(_VALUE_KINDS[match[2]], int(match[1]), int(match[3]))
    if match := _WEIGHTS.fullmatch(text):
        return Weights(WeightAction(match[2]), int(match[1]))
    if match := _OVERLAP.fullmatch(text):
        step = tuple(_parse_pass(part.strip(), text) for part in match[1].split(";"))
        if len(step) != 2:
            raise ParseError("{cell!r} overlaps {count}; an overlapped step has two", cell=text, count=counted(len(step), "pass"))
        return step
    return (_parse_pass(text, text),)


def _parse_pass(text: str, cell: str) -> Op:
    match = _PASS.fullmatch(text)
    if match is None:
        example = "(0F8;7B0)OVERLAP_F_B" if cell.startswith("(") else "0F3"
        message = "{cell!r} is not a pass; {remedy}"
        raise ParseError(message, cell=cell, remedy=f"write <stage><letter><microbatch> with letter F, I, W or B, such as {example}")
    kind = next(kind for kind, traits in KINDS.items() if traits.torch_letter == match[2])
    return Op(kind, int(match[1]), int(match[3]))


def require_expressible(schedule: Schedule) -> None:
    """Raise `InputError` for a schedule that PyTorch cannot run: it has unknown passes, several routes, slices, or losses out of order.

    PyTorch keeps one copy of each stage, and numbers the losses of microbatches in the order in which they are computed.
    """
    name, routes = schedule.name, len(schedule.placement.routes)
    if routes > 1:
        message = "schedule {name!r} has {routes} routes, but PyTorch's CSV can express one; {remedy}"
        raise InputError(message, name=name, routes=routes, remedy="use the text or JSON form")
    if schedule.slices > 1:
        message = "schedule {name!r} cuts microbatches into {slices} slices, which PyTorch's CSV cannot express; {remedy}"
        raise InputError(message, name=name, slices=schedule.slices, remedy="use the text or JSON form")
    for kind in {op.kind for _, _, op in schedule.ops()}:
        _letter(kind)
    forwards, end = kinds_making(ValueKind.ACTIVATION), schedule.num_stages - 1
    last = [op.microbatch for _, _, op in schedule.ops() if op.stage == end and op.kind in forwards]
    if last != sorted(last):
        order = " ".join(map(str, last[:8])) + " ..." * (len(last) > 8)
        message = "PyTorch numbers losses in order, but the last stage of {name!r} runs microbatches {order}"
        raise InputError(message, name=name, order=order, remedy="renumber the microbatches")
