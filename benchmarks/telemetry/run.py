"""What `zb.hooks.Telemetry` with a run folder adds to a step.

Two ranks train with passes stretched to 5 ms. Turns of 15 steps with the hook and 15 without it alternate, in pairs, in an order drawn at
random. A turn takes just over 2 s, and the thread of the hook writes once a second, counted from the begin of the turn, so that a turn has
the writes of its own steps. Writes `results.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import in_ranks, machine, show

RANKS, MICROBATCHES, PASS_MS, WIDTH = 2, 8, 5.0, 16
STEPS, DETAIL_EVERY = 15, 50


def main() -> None:
    """Measure both ways of recording in fresh ranks, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of turns (%(default)s)")
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        row = show(in_ranks(measured, RANKS, folder, pairs))
    result = {"machine": machine(), "ranks": RANKS, "microbatches": MICROBATCHES, "pass_ms": PASS_MS, "pairs": pairs, **row}
    Path(__file__).with_name("results.json").write_text(json.dumps(result, indent=1) + "\n")


class InTurns(zb.hooks.Telemetry):
    """Records while it is `on`, and adds up what it takes."""

    on = True
    taken = 0.0

    def on_step_begin(self, step: zb.hooks.TrainingStep) -> None:
        if self.on:
            began = time.perf_counter()
            super().on_step_begin(step)
            self.taken += time.perf_counter() - began

    def on_step_end(self, step: zb.hooks.TrainingStep) -> None:
        if self.on:
            began = time.perf_counter()
            super().on_step_end(step)
            self.taken += time.perf_counter() - began

    def begin_turn(self) -> None:
        """Write what waits, and count the second until the next write from here."""
        assert self._recorder is not None
        self._recorder._wake.set()
        time.sleep(0.1)

    def writing(self) -> float:
        """The seconds that the writing thread has computed."""
        assert self._recorder is not None
        ident = self._recorder._thread.ident
        assert ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(ident))


def measured(folder: str, pairs: int) -> dict[str, Any]:
    """What steps take, in turns with the hook and without it."""
    costs = zb.Costs.uniform(RANKS, times=(PASS_MS,) * 3)
    hook = InTurns(folder=folder, costs=costs, detail_every=DETAIL_EVERY)
    data, draw = torch.zeros(MICROBATCHES, WIDTH), random.Random(0)
    times: dict[bool, list[float]] = {True: [], False: []}
    with zb.Pipeline(lambda stage, count: nn.Linear(WIDTH, WIDTH), "zb-h1", MICROBATCHES, nn.functional.mse_loss, pace=costs) as pipe:
        pipe.attach(hook)
        for _ in range(3):
            pipe.step(data, data)
        hook.begin_turn()
        hook.taken, written = 0.0, hook.writing()
        for _ in range(pairs):
            for hook.on in draw.sample((True, False), 2):
                hook.begin_turn()
                torch.distributed.barrier()
                began = time.perf_counter()
                for _ in range(STEPS):
                    pipe.step(data, data)
                torch.distributed.barrier()
                times[hook.on].append((time.perf_counter() - began) / STEPS)
        hook.begin_turn()
        written = hook.writing() - written
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    step, recorded = statistics.median(times[False]), pairs * STEPS
    found = sorted(100 * (on - off) / step for on, off in zip(times[True], times[False], strict=True))
    spread = round(0.98 * pairs**0.5)  # of the median's interval of 95 %, by the binomial distribution
    return {
        "step_ms": round(1000 * step, 2),
        "longer": round(statistics.median(found), 3),
        "low": round(found[max(0, pairs // 2 - spread)], 3),
        "high": round(found[min(pairs - 1, pairs // 2 + spread)], 3),
        "in_step_us": round(1e6 * hook.taken / recorded, 1),
        "in_step": round(100 * hook.taken / recorded / step, 3),
        "writing_us": round(1e6 * written / recorded, 1),
        "writing": round(100 * written / recorded / step, 3),
        "bytes_per_step": round(size / recorded / RANKS),
    }


if __name__ == "__main__":
    main()
