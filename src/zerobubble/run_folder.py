"""The files of a run folder, in which each rank of a training run records its steps.

| file | written | contents |
|---|---|---|
| `run.json` | by rank 0, when the run begins and when its schedule changes | schedule and costs |
| `rank-3.jsonl` | by rank 3, a line at a time, appended | `begin`, the report of each step, `end` with the failure, if any |
| `rank-3.detail-0.json`, `...-1.json` | by rank 3, in turns, each whole | all passes and messages of a step, and the bytes held |

Rank 3 holds a lock on `rank-3.jsonl` while its pipeline is open. A process that is killed writes no `end`, and its lock is free.

A line of `RESERVED` blanks follows each `begin`. If the disk is full when the run ends, `end` is written there, where it needs no space.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerobubble.costs import Costs
from zerobubble.errors import MOST_WHOLE, ParseError, whole
from zerobubble.ir import Op

FORM = "zerobubble run 1"
HEADER = "run.json"
BEGIN, END = "begin", "end"
MOST_RANKS = 1 << 14
"""The most ranks of a run that is read."""
RESERVED = 512
"""The bytes of the line for an `end` on a full disk."""
MOST_TEXT = 20_000
"""The most characters of the message of a failure that is read."""
MOST_SECONDS = 1e9
LAST_TIME = 253_402_300_799.0
"""The end of the year 9999, in unix time."""
_PASSES = re.compile(r"(0|[1-9][0-9]{0,5})[A-Z]{1,8}")
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")


def log_name(rank: int) -> str:
    """The name of the file with a line for each step of `rank`."""
    return f"rank-{rank}.jsonl"


def detail_name(rank: int, slot: int) -> str:
    """The name of a file with all passes of a step of `rank`."""
    return f"rank-{rank}.detail-{slot}.json"


NUM_DETAILS = 2
"""Files with details for each rank: while one rank is a step ahead, all still have one step in common."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step as one rank saw it.

    Attributes:
        step: The number of the step, from 0.
        seconds: The time of `Pipeline.step` on this rank.
        bubble: The share of it (0 to 1) in which the rank ran no pass. Forwards that started over (`PostValidation`) count as bubble.
        loss: The mean loss.
        mfu: Model FLOPs utilization, the share of `peak_flops` that the rank reached; None without a peak.
        added_losses: The parts of the loss that stages added, by name.
        passes: The median seconds of a pass, by kind and stage, such as "0F".
        waits: The seconds in which the rank waited for messages, by the rank that sent them; empty if messages are not timed.
        peak_bytes: The most bytes held for backward passes; None if this step did not measure them.
    """

    step: int
    seconds: float
    bubble: float
    loss: float
    mfu: float | None
    added_losses: Mapping[str, float] = field(default_factory=dict)
    passes: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[int, float] = field(default_factory=dict)
    peak_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form. Losses that are not finite are texts, which `float` reads: JSON has no such numbers."""
        fields = {
            "step": self.step,
            "seconds": round(self.seconds, 9),
            "bubble": round(self.bubble, 6),
            "loss": _plain(self.loss),
            "mfu": self.mfu,
            "added_losses": {name: _plain(part) for name, part in self.added_losses.items()},
            "passes": {name: round(seconds, 9) for name, seconds in self.passes.items()},
            "waits": {rank: round(seconds, 9) for rank, seconds in self.waits.items()},
            "peak_bytes": self.peak_bytes,
        }
        return {name: value for name, value in fields.items() if value is not None and value != {}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepReport:
        """Read `data`, as `to_dict` returns it; raises `KeyError` or `ParseError` for anything else."""
        added, passes, waits = (_mapping(data.get(name, {})) for name in ("added_losses", "passes", "waits"))
        mfu, peak_bytes = data.get("mfu"), data.get("peak_bytes")
        return cls(
            count(data["step"]),
            seconds(data["seconds"]),
            within(data["bubble"], -MOST_SECONDS, 1.0),
            _loss(data["loss"]),
            None if mfu is None else within(mfu, 0.0, MOST_SECONDS),
            {text(name): _loss(part) for name, part in added.items()},
            {_passes(name): seconds(time) for name, time in passes.items()},
            {_rank(rank): seconds(time) for rank, time in waits.items()},
            None if peak_bytes is None else count(peak_bytes),
        )


class Begin(NamedTuple):
    """The first line of a process: its host, its number there, when it began (unix time), and the ranks of its pipeline."""

    host: str
    pid: int
    at: float
    ranks: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Begin:
        """Read the JSON form; raises `KeyError` or `ParseError` for anything else."""
        return cls(text(data["host"]), count(data["pid"]), time_of(data), count(data["ranks"], MOST_RANKS))


class End(NamedTuple):
    """The last line of a process: when it was written (unix time), and the failure that ended the pipeline, if any."""

    at: float
    message: str = ""
    rank: int | None = None
    op: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> End:
        """Read the JSON form; raises `KeyError` or `ParseError` for anything else."""
        failure = _mapping(data[END] or {})
        rank, op = failure.get("rank"), failure.get("op")
        message = text(failure.get("message", ""), MOST_TEXT)
        return cls(time_of(data), message, None if rank is None else count(rank, MOST_RANKS - 1), None if op is None else text(op))


def time_of(data: Mapping[str, Any]) -> float:
    """Return the unix time at which a line was written; raises `ParseError` for one that no calendar has."""
    return within(data["at"], 0.0, LAST_TIME)


def seconds(value: Any) -> float:
    """Return a duration in s, in whole ns as it is written."""
    return round(within(value, 0.0, MOST_SECONDS), 9)


def within(value: Any, least: float, most: float) -> float:
    """Return a number that is finite and in this range; raises `ParseError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ParseError("{value!r:.40} is not a number from {least:g} to {most:g}", value=value, least=least, most=most)
    return float(value)


def count(value: Any, most: int = MOST_WHOLE) -> int:
    """Return a whole number from 0 to `most`; raises `ParseError` for anything else."""
    if not 0 <= whole(value) <= most:
        raise ParseError("{value} is not a number from 0 to {most}", value=value, most=most)
    return int(value)


def text(value: Any, most: int = 255) -> str:
    """Return a text of at most `most` characters; raises `ParseError` for anything else."""
    if not isinstance(value, str) or len(value) > most or (not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value)):
        raise ParseError("{value!r:.40} is not text of at most {most} characters", value=value, most=most)
    return value


def _loss(value: Any) -> float:
    """Return a loss; one that is not finite is a text."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return within(value, -sys.float_info.max, sys.float_info.max)


def _passes(name: str) -> str:
    if not _PASSES.fullmatch(name):
        raise ParseError("{name!r:.40} is not a stage and a kind of pass, such as 0F", name=name)
    return name


def _rank(digits: str) -> int:
    if not _RANK.fullmatch(digits):
        raise ParseError("{digits!r:.40} is not the number of a rank", digits=digits)
    return count(int(digits), MOST_RANKS - 1)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ParseError("{value!r:.40} is not an object", value=value)
    return value


def _plain(loss: float) -> float | str:
    return loss if -float("inf") < loss < float("inf") else str(loss)


def to_line(data: Mapping[str, Any]) -> str:
    """Return a line of a log."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"


def drifts(passes: Mapping[str, float], costs: Costs | None) -> dict[str, float]:
    """Return by how much `passes`, seconds by names such as "0F", took longer than `costs` say, as a share of that time.

    Empty without costs. Passes that take no time by `costs` are left out.
    """
    if costs is None:
        return {}
    ops = {name: Op.parse(f"{name}0") for name in passes if _is_of_a_kind(name)}
    planned = {name: costs.time(op.kind, op.stage) / 1e9 for name, op in ops.items() if op.stage < costs.num_stages}
    return {name: passes[name] / seconds - 1 for name, seconds in planned.items() if seconds}


def _is_of_a_kind(name: str) -> bool:
    """Whether passes with a name such as "0F" are of a kind that this process has: a run may have its own (`kinds.add_kind`)."""
    try:
        Op.parse(f"{name}0")
    except ParseError:
        return False
    return True
