"""Judge plans of random problems with any combination of axes: figures by the second simulator, bounds by schedules, files by reading them.

    python -m benchmarks.axes.run [problems [first]]

Writes `results.json` next to this file: problems per axis, the number of plans, and each disagreement as a sentence. With `first`, adds
problems `first` to `problems` - 1 to a file that has the ones before.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import zerobubble as zb
from benchmarks.axes.judge import judged
from zerobubble.offload import HostLink
from zerobubble.partition import Layer
from zerobubble.planning import FewGathers, Head, Plan, Sharded

RESULTS = Path(__file__).with_name("results.json")
PROBLEMS = 400
MS = 1_000_000
AXES = ("layers", "baseline", "sharded", "shares", "recompute", "head", "host", "fused", "period")


def asked(dice: Random) -> tuple[set[str], dict[str, Any]]:
    """A random problem: its axes, and the arguments of `zb.plan`."""
    axes = {axis for axis in AXES if dice.random() < (0.15 if axis in ("baseline", "fused") else 0.45)}
    if "fused" in axes:
        axes -= {"layers"}  # fused times are drawn for ranks
    ranks, microbatches = dice.randint(2, 3), dice.randint(2, 5)
    placement = dice.choice([zb.Placement.linear(ranks), zb.Placement.vee(ranks), zb.Placement.looped(ranks, 2)])
    given: dict[str, Any] = {"num_microbatches": microbatches, "placements": placement, "seed": dice.randrange(100)}
    given |= {"evaluations": dice.choice([0, 0, 26]), "objective": "period" if "period" in axes else "makespan"}
    room = dice.choice([1.3, 2.0, 3.5])

    def times(most: float) -> list[float]:
        return [dice.uniform(0.1, most) for _ in range(3)]

    if "layers" in axes:
        count = placement.num_stages + dice.randint(1, 4)
        sizes = [(dice.randint(500, 1500), dice.randint(200, 900), dice.randint(0, 300)) for _ in range(count)]
        layers = [Layer(*(round(time * MS) for time in times(3)), *size, dice.randint(0, MS // 3)) for size in sizes]
        given |= {"work": layers, "memory": zb.Limits((round((room + 0.7) * 1500 * count / ranks),) * ranks)}
        size = 1000.0 * count / ranks
    else:
        columns = [[dice.uniform(1, 9) for _ in range(ranks)] for _ in range(3)]
        fused = {"fused": [0.9 * (b + w) for b, w in zip(*columns[1:], strict=True)]} if "fused" in axes else {}
        work = zb.Workload.from_ms(*columns, comm=[dice.uniform(0, 1)] * ranks, held=dice.choice([0.5, 1.0]), **fused)
        given |= {"work": work, "memory": room}
        size = float(work.held_after_f[0])
    if "shares" in axes:
        given["shares"] = tuple(dice.choice([0.7, 1, 1.3]) for _ in range(microbatches))
    if "recompute" in axes:
        given["recompute"] = dice.choice(["auto", "full"])
    if "head" in axes:
        given["head"] = Head(tuple(times(4)), held=size * dice.uniform(0, 0.3), collective=dice.uniform(0, 0.3), slowdown=1.1)  # type: ignore[arg-type]
    if "host" in axes:
        given["host"] = HostLink(size * dice.uniform(100, 900), size * dice.uniform(100, 900), dice.choice([0, 1000]))
    if "sharded" in axes:
        weights = 6 * 10**9
        given["sharded"] = Sharded(weights, dice.choice([None, 2 * weights]), dice.choice([None, weights * dice.uniform(50, 900)]))
    if "baseline" in axes:
        given["baseline"] = dice.choice(["zb-heuristic", "zb-v-greedy"])
    return axes, given


def disagreements(found: Plan) -> Iterator[str]:
    """What the second simulator, the bound and the file of a plan say against it."""
    judgment, by_period = judged(found), found.problem.objective == "period"
    assert found.time is not None
    if (judgment.makespan, judgment.peaks) != (found.makespan, found.peaks):
        yield f"figures {found.makespan} and {found.peaks}, judged {judgment.makespan} and {judgment.peaks}"
    if not found.bound.time <= found.time <= (judgment.span if by_period else judgment.makespan):
        yield f"time {found.time} against a bound of {found.bound.time}, judged {judgment}"
    if any(peak > limit for peak, limit in zip(judgment.peaks, found.problem.limits.memory, strict=True)):
        yield f"holds {judgment.peaks} of {found.problem.limits.memory}"
    gathers = found.saving(FewGathers)
    if gathers is not None:
        judgment = judged(gathers.chosen.plan, gathers.chosen.gathers)
        time = judgment.span if by_period else judgment.makespan
        if time != gathers.chosen.time or gathers.least_time > time:
            yield f"with gathers {gathers.chosen.time} over {gathers.least_time}, judged {time}"
    read = Plan.from_dict(json.loads(json.dumps(found.to_dict())))
    if (read.problem, read.schedule, read.time, read.offloads) != (found.problem, found.schedule, found.time, found.offloads):
        yield "its file gives back another plan"


def main(problems: int, first: int = 0) -> None:
    """Judge the problems from `first` on and write what came of them and of those before."""
    before = json.loads(RESULTS.read_text()) if first else {"problems": 0, "disagreements": []}
    if before["problems"] != first:
        raise SystemExit(f"{RESULTS.name} has {before['problems']} problems: begin with problem {before['problems']} or 0, not {first}")
    wrong: list[str] = before["disagreements"]
    counts = Counter({name: count for name, count in before.items() if name not in ("problems", "disagreements")})
    for number in range(first, problems):
        axes, given = asked(Random(number))
        counts.update(axes)
        try:
            found = zb.plan(**given)
            if found.order is None:
                raise zb.InputError(found.reason)
        except zb.InputError:
            counts["nothing fits"] += 1
            continue
        counts["planned"] += 1
        counts["pairs"] += len(axes) * (len(axes) - 1) // 2
        wrong += [f"problem {number}, {sorted(axes)}: {text}" for text in disagreements(found)]
        print(number, sorted(axes), "WRONG" if wrong and wrong[-1].startswith(f"problem {number},") else "", flush=True)
    RESULTS.write_text(json.dumps({"problems": problems, **dict(sorted(counts.items())), "disagreements": wrong}, indent=2) + "\n")
    print(f"{counts['planned']} plans, {len(wrong)} disagreements")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PROBLEMS, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
