"""Levels of recomputation: how much of a stage R computes again, and how much of what F saves it keeps until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerobubble.arguments import as_tuple, require, require_ms
from zerobubble.errors import InputError
from zerobubble.units import MOST_MS


@dataclass(frozen=True, slots=True)
class Level:
    """How much of a stage is computed again: `extra` is the time of R as a share of that of F, `kept` what F keeps of its bytes until then.

    Each is one number for all stages, or a tuple with one for each stage, as `Pipeline.profile` measures them. To compute all again takes a
    whole F and keeps the stage's input; to compute again what is large and quick, such as attention, takes little and keeps some more.
    Raises `InputError` for shares that no stage can have.

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
            raise InputError(f"the name of a level of recomputation must be one line of printable text, got {self.name!r}")
        for field, what, most in (("extra", "time", MOST_MS), ("kept", "bytes", 1)):
            value = getattr(self, field)
            if not isinstance(value, (int, float)):
                value = as_tuple(f"the share of the {what} of level {self.name!r}", value, "a number, or a tuple with one for each stage")
                object.__setattr__(self, field, value)
            for share in value if isinstance(value, tuple) else (value,):
                require_ms(f"the share of the {what} of level {self.name!r}", share)
                if share > most:
                    raise InputError(
                        f"level {self.name!r} keeps {share:g} of what F keeps, but R can only make less of it than F: give 0 to 1"
                    )

    def extra_in(self, stage: int) -> float:
        """The time of R in a stage as a share of that of F."""
        return self.extra[stage] if isinstance(self.extra, tuple) else self.extra

    def kept_in(self, stage: int) -> float:
        """What F of a stage keeps as a share of what it saves."""
        return self.kept[stage] if isinstance(self.kept, tuple) else self.kept

    @property
    def mean_kept(self) -> float:
        """What F keeps as a share of what it saves, the mean over stages."""
        return sum(self.kept) / len(self.kept) if isinstance(self.kept, tuple) else self.kept

    def on(self, stages: Sequence[int]) -> Level:
        """The level where these `stages` are all there are."""
        parts = {name: tuple(given[s] for s in stages) for name in ("extra", "kept") if isinstance(given := getattr(self, name), tuple)}
        return replace(self, **parts)  # type: ignore[arg-type]

    def require_fit(self, num_stages: int) -> None:
        """Raise `InputError` unless the level has as many shares as there are stages, or one for all."""
        for given in (self.extra, self.kept):
            if isinstance(given, tuple) and len(given) != num_stages:
                raise InputError(
                    f"level {self.name!r} has shares of {len(given)} stages, and here are {num_stages}: give one number for all, or as many"
                )


FULL = Level("full", extra=1.0, kept=0.06)
"""All of a stage computed again: its input is 2 of the 34 bytes that a transformer layer keeps for each number (arXiv 2205.05198)."""


NONE = Level("none", extra=0.0, kept=1.0)
"""Nothing computed again."""
SELECTIVE = Level("selective", extra=0.03, kept=0.588)
"""Attention alone computed again: of the 34 bytes that a layer keeps for each number 20 stay, for 3 % of F (arXiv 2205.05198)."""
