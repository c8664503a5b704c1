"""The cost of recording: CPU time of timing one message, and training steps with and without timed messages, in turns.

`mark_us` is the CPU time that timing adds to one message. A pass has at most two, one sent and one received: `share` relates both to a pass
of a millisecond, which is short for training. The passes of the steps compute almost nothing, so `on_us` and `off_us` are the host's CPU
time per pass, including spinning while ranks wait: compare them on a quiet machine only. Writes `results.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerobubble as zb
from zerobubble.rules import Value, ValueKind
from zerobubble.runtime.executor.executor import Executor
from zerobubble.timeline import Doing

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import in_ranks, machine, show

CASES = [(2, 32, name) for name in ("1f1b", "zb-h1")]
PASS_US = 1000.0
WARM_UP = 4
MOST = 0.01


def main() -> None:
    """Measure every case in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40, help="steps measured each way (%(default)s)")
    options = parser.parse_args()
    rows = [show(in_ranks(compare, ranks, m, name, options.repeats)) for ranks, m, name in CASES]
    results = {"machine": machine(), "pass_us": PASS_US}
    share = max(2 * row["mark_us"] / PASS_US for row in rows)
    results |= {"share": round(share, 5), "holds": share < MOST, "steps": rows}
    Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n")


def compare(microbatches: int, name: str, repeats: int) -> dict[str, Any]:
    """Microseconds of CPU time per pass with recording and without, and what timing one message adds."""
    x = torch.ones(microbatches, 16)
    with zb.Pipeline(lambda s, n: nn.Linear(16, 16), name, microbatches, nn.functional.mse_loss) as pipe:
        spent: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * repeats + WARM_UP):
            pipe.recording = turn % 2 == 0
            begin = time.process_time()
            pipe.step(x, x)
            if turn >= WARM_UP:
                spent[pipe.recording].append(time.process_time() - begin)
        passes = len(pipe.schedule.rows[pipe.rank])
        added = mark_us(pipe._steps.last)
    on, off = (1e6 * statistics.median(spent[value]) / passes for value in (True, False))
    return {"name": name, "passes": passes, "on_us": round(on, 2), "off_us": round(off, 2), "mark_us": round(added, 3)}


def mark_us(executor: Executor) -> float:
    """Microseconds of CPU time that timing adds to a call that does nothing; the median of several rounds."""

    def nothing() -> None:
        pass

    executor.recording = True
    timed = executor.records.timed(Doing.SEND, Value(ValueKind.ACTIVATION, 0, 0), nothing)
    rounds = [cpu_us(timed) - cpu_us(nothing) for _ in range(21)]
    return statistics.median(rounds)


def cpu_us(call: Callable[[], Any], times: int = 5000) -> float:
    begin = time.process_time()
    for _ in range(times):
        call()
    return 1e6 * (time.process_time() - begin) / times


if __name__ == "__main__":
    main()
