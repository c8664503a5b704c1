"""Record the traces of this folder again: `python -m tests.pure.traces.record`, with the package on the path."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.procs.ranks import Ranks
from tests.procs.traced_runs import record

FOLDER = Path(__file__).parent
RUNS = {
    "gpipe": ("ScheduleGPipe", 1, False),
    "1f1b": ("Schedule1F1B", 1, True),
    "1f1b-unnamed": ("Schedule1F1B", 1, False),
    "interleaved": ("ScheduleInterleaved1F1B", 2, False),
    "zbv": ("ScheduleZBVZeroBubble", 2, False),
    "dualpipev": ("ScheduleDualPipeV", 2, False),
}
MICROBATCHES, STEPS = 4, 3
OTHERS = 12
"""Events that are kept in a trace although they do not describe the pipeline."""
ATTEMPTS = 8
"""Runs of each schedule, of which the quickest is kept: other programs disturb the others."""


def trimmed(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace with the ranges that people and communication name, and some of the others."""
    events = trace["traceEvents"]
    seen = [event for event in events if event.get("cat") == "user_annotation" or event["name"].startswith("c10d::")]
    kept = [event for event in events if event not in seen][:OTHERS] + seen
    return trace | {"traceEvents": kept, "host_name": "a", "traceName": "trace.json"}


def recorded(world: Ranks, name: str, per_rank: int, named: bool) -> list[dict[str, Any]]:
    """The traces of a run, one a rank."""
    with tempfile.TemporaryDirectory() as folder:
        files = world.run(record, name, per_rank, MICROBATCHES, STEPS, folder, named, ranks=2)
        return [trimmed(json.loads(Path(file).read_text())) for file in files]


def duration(traces: list[dict[str, Any]]) -> float:
    """How long the steps of a run took, in microseconds."""
    return sum(event["dur"] for trace in traces for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep"))


def main() -> None:
    """Write all of them."""
    world = Ranks(2)
    for run, (name, per_rank, named) in RUNS.items():
        quickest = min((recorded(world, name, per_rank, named) for _ in range(ATTEMPTS)), key=duration)
        for rank, trace in enumerate(quickest):
            (FOLDER / f"{run}-rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))
    world.kill()


if __name__ == "__main__":
    main()
