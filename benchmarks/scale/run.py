"""The time to check, simulate and lower a schedule: zb-v at growing sizes, compared with PyTorch's own lowering of the same order.

`compile_s` is what each rank of a new pipeline computes for its schedule: lowering, verification of its program, and its channels.

One process, best of a few turns. Writes `results.json` next to this file. PyTorch's figure includes its validation, its insertion of sends
and receives, and its dry run; sizes that would take minutes are left out, and marked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import schedules as theirs

import zerobubble as zb
from zerobubble.export import to_torch_csv
from zerobubble.lowering import Compiled
from zerobubble.runtime.executor.program_cache import every_channel

SIZES = [(4, 16), (8, 64), (16, 128), (64, 512)]
PYTORCH_UP_TO = 16


def main() -> None:
    """Measure every size and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="turns per size; the fastest counts")
    options = parser.parse_args()
    rows = []
    for ranks, microbatches in SIZES:
        rows.append(measure(ranks, microbatches, options.repeats))
        print(json.dumps(rows[-1]), flush=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    Path(__file__).with_name("results.json").write_text(json.dumps({"machine": machine, "scale": rows}, indent=1) + "\n")


def measure(ranks: int, microbatches: int, repeats: int) -> dict[str, Any]:
    """The seconds of every part, for one size."""
    costs = zb.Costs.uniform(2 * ranks, comm=0.1)
    parts: dict[str, float] = {}
    for _ in range(repeats):
        made = zb.make("zb-v", ranks, microbatches)  # a new value each turn: a judged one is not judged again
        turn = {"verify_s": seconds(lambda made=made: zb.schedule_faults(made))}
        turn |= {"simulate_s": seconds(lambda made=made: zb.simulate(made, costs)), "lower_s": seconds(lambda made=made: zb.lower(made))}
        turn["compile_s"] = seconds(lambda made=made: every_channel(Compiled.from_schedule(made)))
        if not parts or sum(turn.values()) < sum(parts.values()):
            parts = turn
    ours = sum(parts.values()) - parts["compile_s"]
    whole = {"ranks": ranks, "microbatches": microbatches, "passes": 6 * ranks * microbatches, **parts, "ours_s": ours}
    if ranks <= PYTORCH_UP_TO:
        whole["pytorch_s"] = seconds(lambda: pytorchs(zb.make("zb-v", ranks, microbatches)))
        whole["ours_over_pytorch"] = whole["ours_s"] / whole["pytorch_s"]
    return {key: round(value, 4) for key, value in whole.items()}


def seconds(job: Callable[[], object]) -> float:
    """How long `job` takes."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def pytorchs(schedule: zb.Schedule) -> None:
    """What PyTorch does with the same order before it can run: validate, add sends and receives, and play it dry."""
    lines = to_torch_csv(schedule).splitlines()
    actions = {rank: [theirs._Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(lines)}
    homes = theirs._validate_schedule(actions, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
    lowered = theirs._add_send_recv(actions, homes.__getitem__, schedule.num_stages)
    theirs._simulate_comms_compute(lowered, homes.__getitem__, schedule.num_stages)


if __name__ == "__main__":
    main()
