"""The first plan on a fresh machine: wall and processor time of a process without compiled kernels, and of one with all of them.

`python benchmarks/planner/first_plan.py` writes first_plan.json. `loop_seconds` is the processor time of a fixed loop in plain Python on
the same machine, for comparison; `wall` depends on other load.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

BUDGET = 1.0

PLAN = f"""
import json
from time import perf_counter, process_time
started = perf_counter()
import zerobubble as zb
work = zb.Workload.uniform(8, times=(18.522, 18.086, 9.337), comm=0.601, held=0.941)
found = zb.plan(work, 24, memory=8, placements="any", seconds={BUDGET})
print(json.dumps({{"wall": perf_counter() - started, "processor": process_time(), "compiling": found.compiling, "bubble": found.bubble}}))
"""


def measured(folder: str) -> dict[str, float]:
    environment = {**os.environ, "ZEROBUBBLE_CACHE_DIR": folder}
    done = subprocess.run([sys.executable, "-c", PLAN], env=environment, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return {name: round(value, 4) for name, value in figures.items()}


def loop_seconds() -> float:
    started, total = process_time(), 0
    for number in range(10_000_000):
        total += number
    return round(process_time() - started, 3)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        started = perf_counter()
        figures = {"budget": BUDGET, "loop_seconds": loop_seconds(), "first": measured(folder), "second": measured(folder)}
        print(f"{perf_counter() - started:.1f} s")
    Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
