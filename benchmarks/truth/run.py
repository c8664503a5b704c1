"""What recording costs: process CPU time of a training step with messages timed and without, in turns.

The stages compute next to nothing, so that the figure is the host's; `share` holds it against a step whose passes take a
millisecond each, which is short for training. Writes `results.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import zerobubble as zb

CASES = [(2, 32, name) for name in ("1f1b", "zb-h1", "zb-v")]
PASS_US = 1000.0
MOST = 0.01


def main() -> None:
    """Measure every case in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200, help="steps measured each way")
    options = parser.parse_args()
    rows = [in_ranks(*case, options.repeats) for case in CASES]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    results = {"cores": os.cpu_count(), "torch": torch.__version__, "pass_us": PASS_US}
    results |= {"holds": all(row["share"] < MOST for row in rows), "cases": rows}
    Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n")


def in_ranks(ranks: int, microbatches: int, name: str, repeats: int) -> dict[str, Any]:
    """What rank 0 of fresh gloo ranks found."""
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (ranks, 20000 + os.getpid() % 20000, queue, microbatches, name, repeats), nprocs=ranks)
    row: dict[str, Any] = queue.get()
    return row


def _rank(rank: int, ranks: int, port: int, queue: Any, *case: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    row = compare(*case)
    if rank == 0:
        queue.put(row)
    dist.barrier()
    dist.destroy_process_group()


def compare(microbatches: int, name: str, repeats: int) -> dict[str, Any]:
    """Microseconds of CPU time per pass with recording and without, and what recording adds per pass and per pass of `PASS_US`."""
    x = torch.ones(microbatches, 16)
    with zb.Pipeline(lambda s, n: nn.Linear(16, 16), name, microbatches, nn.functional.mse_loss) as pipe:
        spent: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * repeats + 20):
            pipe.recording = turn % 2 == 0
            begin = time.process_time()
            pipe.step(x, x)
            if turn >= 20:
                spent[pipe.recording].append(time.process_time() - begin)
        passes = len(pipe.schedule.rows[pipe.rank])
        differences = [on - off for on, off in zip(spent[True], spent[False], strict=True)]
        on, off = (1e6 * statistics.median(spent[value]) / passes for value in (True, False))
        added = 1e6 * statistics.median(differences) / passes
    row = {"name": name, "passes": passes, "on_us": round(on, 2), "off_us": round(off, 2), "added_us": round(added, 3)}
    return row | {"share": round(added / PASS_US, 5)}


if __name__ == "__main__":
    main()
