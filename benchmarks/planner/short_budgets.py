"""Short budgets: our span over that of the Zero Bubble authors' planner at equal memory, on the problems where ours was longer.

`python benchmarks/planner/short_budgets.py` writes short_budgets.json: 28.3B on 32 ranks, 256 microbatches, in a V, with 9/8 to 7/4 of p.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import cases

import zerobubble as zb

BUDGETS = (1, 2)


def main() -> None:
    chosen = [r for r in cases.references() if (r.model, r.microbatches, r.placement) == ("28.3B", 256, "vee") and 32 < r.limit <= 56]
    results = []
    for reference in chosen:
        for seconds in BUDGETS:
            found = zb.planning.solve(reference.problem, seconds=seconds)
            assert found.time is not None
            ratio = round(found.time / 1e6 / reference.span_ms, 4)
            results.append({"problem": reference.key, "seconds": seconds, "how": found.how, "ratio": ratio, "holds": ratio <= 1})
            print(results[-1], flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
