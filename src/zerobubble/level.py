"""Levels of recomputation: how much of a stage R recomputes, and how much of its saved bytes F keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerobubble.arguments import NUMBER, as_tuple, require, require_ms, wrong
from zerobubble.errors import InputError
from zerobubble.units import MOST_MS


@dataclass(frozen=True, slots=True)
class Level:
    """A level of recomputation: `extra` is the time of R as a share of F's time, `kept` the bytes kept as a share of the bytes F saves.

    Each is one number for all stages, or a tuple with one for each stage, as measured by `Pipeline.profile`. Recomputing a whole stage
    takes as long as F and keeps only the stage's input. Recomputing only large and fast parts, such as attention, takes less time and keeps
    more. Raises `InputError` for shares out of range.

    >>> import zerobubble as zb
    >>> zb.costs.Level("full", extra=1.0, kept=0.06)
    Level(name='full', extra=1.0, kept=0.06)
    """

    name: str
    extra: float | tuple[float, ...]
    kept: float | tuple[float, ...]

    def __post_init__(self) -> None:
        require("the name of a level of recomputation", self.name, str)
        if not self.name.isprintable() or not self.name.strip():
            raise wrong("the name of a level of recomputation", self.name, "one line of printable text")
        for field, what, most in (("extra", "time", MOST_MS), ("kept", "bytes", 1)):
            value = getattr(self, field)
            if not isinstance(value, (int, float)):
                value = as_tuple(
                    f"the share of the {what} of level {self.name!r}", value, "a number, or a tuple with one for each stage", NUMBER.remedy
                )
                object.__setattr__(self, field, value)
            for share in value if isinstance(value, tuple) else (value,):
                require_ms(f"the share of the {what} of level {self.name!r}", share)
                if share > most:
                    message = "level {name!r} keeps {share:g} of the bytes that F saves"
                    raise InputError(message, name=self.name, share=share, remedy="pass a share from 0 to 1")

    def extra_in(self, stage: int) -> float:
        """Return the time of R in a stage as a share of F's time."""
        return self.extra[stage] if isinstance(self.extra, tuple) else self.extra

    def kept_in(self, stage: int) -> float:
        """Return the bytes that F of a stage keeps as a share of those it saves."""
        return self.kept[stage] if isinstance(self.kept, tuple) else self.kept

    @property
    def mean_kept(self) -> float:
        """The bytes that F keeps as a share of those it saves, averaged over stages."""
        return sum(self.kept) / len(self.kept) if isinstance(self.kept, tuple) else self.kept

    def on(self, stages: Sequence[int]) -> Level:
        """Return the level for these `stages` only."""
        parts = {name: tuple(share[s] for s in stages) for name in ("extra", "kept") if isinstance(share := getattr(self, name), tuple)}
        return replace(self, **parts)  # type: ignore[arg-type]

    def require_fit(self, num_stages: int) -> None:
        """Raise `InputError` unless the level has one share for all stages or one for each."""
        for shares in (self.extra, self.kept):
            if isinstance(shares, tuple) and len(shares) != num_stages:
                message = "level {name!r} has shares of {got} stages, but there are {num_stages}"
                raise InputError(message, name=self.name, got=len(shares), num_stages=num_stages, remedy="pass one, or one for each")


FULL = Level("full", extra=1.0, kept=0.06)
"""Recompute whole stages. The input is 2 of the 34 bytes that a transformer layer saves for each number (arXiv 2205.05198)."""
NONE = Level("none", extra=0.0, kept=1.0)
"""Recompute nothing."""
SELECTIVE = Level("selective", extra=0.03, kept=0.588)
"""Recompute attention only. Of the 34 bytes that a layer saves for each number it keeps 20, for 3 % of F's time (arXiv 2205.05198)."""
