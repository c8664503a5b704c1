"""What a pipeline tells of its split: how each stage leaves weight gradients to W, how much of them, and which stay in B."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from zerobubble.runtime.split.layers.eligibility import WATCHED, is_divided, is_scripted, is_watched
from zerobubble.runtime.split.layers.stand_ins import STAND_INS


@dataclass(frozen=True)
class SplitReport:
    """How a stage splits its backward pass.

    `way` is "deferred" (layers leave their weight gradients to W), "graph", "compiled" (the stage's traced graph is cut), or "whole"
    (B does all). `share` is the part of the FLOPs of weight gradients that W does, None where they cannot be counted: a stage with compiled
    parts, and one that trains nothing. `at_once` has a line for each parameter whose gradient was computed in B, and why. `passes` are
    those that have something to compute: "F" where nothing trains here and no input needs a gradient, "FB" where nothing trains here, or
    "FBW". `notes` tells, in a line each, where the stage falls short of the way it was given.
    """

    stage: int
    way: str
    share: float | None
    at_once: tuple[str, ...]
    passes: str = "FBW"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.passes == "F":
            return f"stage {self.stage}: F alone, nothing trains here and no input needs a gradient"
        if self.passes == "FB":
            return f"stage {self.stage}: F and B alone, nothing trains here"
        share = "share not known" if self.share is None else f"W does {self.share:.1%} of weight gradients"
        return "\n".join(
            [
                f"stage {self.stage}: {self.way}, {share}",
                *(f"  in B: {line}" for line in self.at_once),
                *(f"  {note}" for note in self.notes),
            ]
        )


class SplitReports(tuple[SplitReport, ...]):
    """The reports of all stages, in order; `str` prints them one below the other."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def at_once(module: nn.Module, deferred: Iterable[Tensor], found: Iterable[Tensor], reasons: Mapping[Tensor, str]) -> tuple[str, ...]:
    """A line for each parameter among `found`, those with a gradient, that is not `deferred`; `reasons` were known before the step."""
    waits = set(deferred)
    has = set(found)
    owners = {p: part for part in module.modules() for p in part.parameters(recurse=False)}
    named = module.named_parameters()
    return tuple(f"{name}: {_reason(owners[p], p, reasons.get(p))}" for name, p in named if p in has and p not in waits)


def _reason(owner: nn.Module, parameter: nn.Parameter, known: str | None) -> str:
    kind = type(owner).__name__
    if parameter.dim() < 2:
        return f"a vector of {kind}, whose gradient costs little"
    if known is not None:
        return known
    if is_scripted(owner):
        return "it is in a TorchScript module, whose backward pass computes all gradients at once"
    if is_divided(parameter) and type(owner) is not nn.Linear:
        return "it is divided over ranks (a DTensor), and only Linear layers are known to leave such gradients to W"
    if is_watched(parameter):
        return WATCHED
    if type(owner).forward in STAND_INS:
        return f"this {kind} is used in a way that cannot wait: compiled, sparse, hooked, cast by autocast, or not by its own forward"
    return f"no way is known to defer what {kind} does with it; write it with zerobubble.nn.deferral"
