"""Budgets of large plans over all placements: time and memory of a process, and the gap of its plan to its bound.

`python benchmarks/planner/budgets.py` writes budgets.json. `holds`: the wall time is at most 1.2 times the budget and 2 s, or the processor
time is, if other processes used the machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

CASES = ((32, 256, 10), (64, 512, 10), (128, 1024, 10), (256, 2048, 60))

PLAN = """
import json, resource, sys
from time import perf_counter, process_time
import zerobubble as zb
ranks, microbatches, budget = map(int, sys.argv[1:])
zb.plan(zb.Workload.uniform(2, (3, 3, 2)), 4, memory=1, evaluations=2000)  # compiles
started, processor = perf_counter(), process_time()
work = zb.Workload.uniform(ranks, times=(18.522, 18.086, 9.337), comm=0.601, held=0.941)
found = zb.plan(work, microbatches, memory=ranks, placements="any", seconds=budget)
str(found)
print(json.dumps({
    "wall": round(perf_counter() - started, 1),
    "processor": round(process_time() - processor, 1),
    "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    "placement": found.choices[0].name,
    "bubble": round(found.bubble, 4),
    "over_bound": round(found.gap, 4),
    "made": sum(choice.plan.order is not None for choice in found.choices),
}))
"""


def main() -> None:
    results = []
    for case in CASES:
        done = subprocess.run([sys.executable, "-c", PLAN, *map(str, case)], capture_output=True, text=True, check=True)
        figures = json.loads(done.stdout)
        limit = 1.2 * case[2] + 2
        holds = figures["wall"] <= limit or figures["processor"] <= limit
        results.append({"ranks": case[0], "microbatches": case[1], "budget": case[2], **figures, "holds": holds, "cpus": os.cpu_count()})
        print(results[-1], flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
