"""The files of a run folder, in which each rank of a training run records its steps.

| file | written | contents |
|---|---|---|
| `run.json` | by rank 0, when the run begins and when its schedule changes | schedule and costs |
| `rank-3.jsonl` | by rank 3, a line at a time, only ever appended | `begin`, the report of each step, `end` with the failure, if any |
| `rank-3.detail-0.json`, `...-1.json` | by rank 3, in turns, each whole | all passes and messages of a step, and the bytes held |

Rank 3 holds a lock on `rank-3.jsonl` while its pipeline is open. A process that is killed writes no `end`, and its lock is free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerobubble.costs import Costs
from zerobubble.ir import Op

FORM = "zerobubble run 1"
HEADER = "run.json"
BEGIN, END = "begin", "end"


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
        given = {
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
        return {name: value for name, value in given.items() if value is not None and value != {}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepReport:
        """Read the JSON form; raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        return cls(
            int(data["step"]),
            float(data["seconds"]),
            float(data["bubble"]),
            float(data["loss"]),
            data.get("mfu"),
            {name: float(part) for name, part in data.get("added_losses", {}).items()},
            {name: float(seconds) for name, seconds in data.get("passes", {}).items()},
            {int(rank): float(seconds) for rank, seconds in data.get("waits", {}).items()},
            data.get("peak_bytes"),
        )


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
    ops = {name: Op.parse(f"{name}0") for name in passes}
    planned = {name: costs.time(op.kind, op.stage) / 1e9 for name, op in ops.items() if op.stage < costs.num_stages}
    return {name: passes[name] / seconds - 1 for name, seconds in planned.items() if seconds}
