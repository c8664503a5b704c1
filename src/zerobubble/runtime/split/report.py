"""Reports how each stage splits its backward pass: the share of weight gradients in W, and which gradients stay in B and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import floor
from typing import NamedTuple

from torch import Tensor, nn

from zerobubble.runtime.split.layers.eligibility import WATCHED, is_divided, is_scripted, is_watched
from zerobubble.runtime.split.layers.stand_ins import STAND_INS
from zerobubble.units import counted


class InB(NamedTuple):
    """A parameter whose gradient was computed in B, by name, and the reason. `vector_of` is the class of its module if it is a vector."""

    parameter: str
    reason: str
    vector_of: str = ""

    def __str__(self) -> str:
        return f"{self.parameter}: {self.reason}"


@dataclass(frozen=True)
class SplitReport:
    """How a stage splits its backward pass.

    Attributes:
        stage: The stage.
        way: "deferred" (layers defer their weight gradients to W), "graph" or "compiled" (the stage's traced graph is cut), or "whole" (B
            computes everything).
        share: The fraction of the FLOPs of weight gradients that W computes. None if they cannot be counted: for a stage with compiled
            parts, and for one that trains nothing.
        in_b: Each `parameter` whose gradient was computed in B, with the `reason`.
        passes: The passes with work to do: "F" if nothing trains here and no input requires grad, "FB" if nothing trains here, else "FBW".
        notes: A line for each limitation of the chosen way on this stage.
    """

    stage: int
    way: str
    share: float | None
    in_b: tuple[InB, ...]
    passes: str = "FBW"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.passes == "F":
            return f"stage {self.stage}: only F, nothing trains here and no input needs a gradient"
        if self.passes == "FB":
            return f"stage {self.stage}: only F and B, nothing trains here"
        share = "unknown share" if self.share is None else f"W does {self._percent} of the FLOPs of weight gradients"
        return "\n".join(
            [
                f"stage {self.stage}: {self.way}, {share}",
                *(f"  in B: {line}" for line in _by_reason(self.in_b)),
                *(f"  {note}" for note in self.notes),
            ]
        )

    @property
    def _percent(self) -> str:
        """The share, rounded down: 100 % leaves nothing in B, where the FLOPs of vectors are too few to be counted."""
        share = floor(1000 * (self.share or 0)) / 10
        return "over 99.9%" if share == 100 and self.in_b else f"{share:.1f}%"


def _by_reason(in_b: Iterable[InB]) -> Iterator[str]:
    """Yields a line for the parameters of each reason, and one for all vectors."""
    vectors: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name, reason, vector_of in in_b:
        if vector_of:
            vectors.append(vector_of)
        else:
            reasons.setdefault(reason, []).append(name)
    if vectors:
        yield f"{counted(len(vectors), 'vector')} of {' and '.join(dict.fromkeys(vectors))}, whose gradients are cheap"
    for reason, names in reasons.items():
        yield f"{names[0] if len(names) == 1 else f'{len(names)} parameters, {names[0]} to {names[-1]}'}: {reason}"


class SplitReports(tuple[SplitReport, ...]):
    """The reports of all stages, in order; `str` gives one per line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def in_b(module: nn.Module, deferred: Iterable[Tensor], trained: Iterable[Tensor], reasons: Mapping[Tensor, str]) -> tuple[InB, ...]:
    """Returns the `trained` parameters, which have a gradient, that are not `deferred`; `reasons` were known before the step."""
    waits = set(deferred)
    has = set(trained)
    owners = {p: part for part in module.modules() for p in part.parameters(recurse=False)}
    named = module.named_parameters()
    return tuple(_kept(name, owners[p], p, reasons.get(p)) for name, p in named if p in has and p not in waits)


def _kept(name: str, owner: nn.Module, parameter: nn.Parameter, reason: str | None) -> InB:
    if parameter.dim() < 2:
        kind = type(owner).__name__
        return InB(name, f"a vector of {kind}, whose gradient is cheap", kind)
    return InB(name, _reason(owner, parameter, reason))


def _reason(owner: nn.Module, parameter: nn.Parameter, reason: str | None) -> str:
    kind = type(owner).__name__
    if reason is not None:
        return reason
    if is_scripted(owner):
        return "it is in a TorchScript module, whose backward pass computes all gradients at once"
    if is_divided(parameter) and type(owner) is not nn.Linear:
        return "it is a DTensor, and only Linear layers can defer such gradients to W"
    if is_watched(parameter):
        return WATCHED
    if type(owner).forward in STAND_INS:
        return f"this {kind} is used in a way that cannot defer: compiled, sparse, hooked, cast by autocast, or not by its own forward"
    return f"gradients of {kind} cannot be deferred; write it with zerobubble.nn.deferral"
