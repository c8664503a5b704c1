"""Heads divided by their vocabulary, simulated beside what was published: MFU by size of the vocabulary for 1F1B and V-Half.

Writes `results.json` next to this file, from `published.json` (arXiv 2411.05288, tables 3, 5 and 6). Nothing is fitted. A layer takes
72h + 12s and a head 6V floating point operations for each of bsh (the paper's table 4), all at one speed, in equal thirds for F, B, W; a
divided head is slower by the factor of table 3, the mean of its neighbours for 24 GPUs, which that table lacks. Messages, collectives, the
embedding and the optimizer take no time. So an efficiency here is the share of the ranks' time in which they compute at that speed, and MFU
is it times a speed that is not known: only ratios can be compared.

- `over_32K`: MFU over that of the same method with a vocabulary of 32K, published and simulated.
- `over_vocab-1`: MFU of the head on the last stage over that with the head divided by algorithm 1, published and simulated.

`*_off_percent` is the simulated ratio against the published one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zerobubble as zb
from zerobubble.schedules import with_vocabulary

HERE = Path(__file__).parent
MICROBATCHES = 128
MODELS = {
    ("1f1b", 8): (32, 3072),
    ("1f1b", 16): (48, 4096),
    ("1f1b", 32): (64, 5120),
    ("v-half", 16): (32, 4096),
    ("v-half", 24): (48, 5120),
    ("v-half", 32): (64, 6144),
}
"""Layers and hidden size by schedule and GPUs. Those of 1F1B are the paper's table 1; those of V-Half were not at hand and are taken to be
those of the usual 7B, 15B and 30B models, whose hidden sizes the published growth of memory with the vocabulary confirms."""
UNIT = 1e-5
"""Milliseconds for an operation per bsh; any other gives the same ratios."""

Row = tuple[int, int, str, str]


def efficiency(schedule: str, gpus: int, seq: int, method: str, vocabulary: int, scaling: dict[Any, float]) -> float:
    """The share of the ranks' time in which they compute."""
    layers, hidden = MODELS[schedule, gpus]
    plain = zb.make(schedule, gpus, MICROBATCHES)
    layer, head = (72 * hidden + 12 * seq) / 3 * UNIT, 2 * vocabulary * UNIT
    column = [layers / plain.num_stages * layer] * plain.num_stages
    if method == "baseline":
        column[-1] += head
        costs, played = zb.Costs.from_ms(column, column, column), plain
    else:
        algorithm = int(method[-1])
        part = head / gpus / scaling[seq, algorithm, gpus]
        costs = zb.Costs.from_ms(column, column, column).with_divided_head((part, part, part))
        played = with_vocabulary(plain, algorithm, costs)
    work = 3 * (layers * layer + head) * MICROBATCHES
    return work / gpus / (zb.simulate(played, costs).makespan / 1e6)


def scaling_factors(table: dict[str, Any]) -> dict[Any, float]:
    """By sequence, algorithm and GPUs; of 24 GPUs the mean of 16 and 32."""
    found = {(seq, way, gpus): value / 100 for seq, way, *values in table["rows"] for gpus, value in zip((8, 16, 32), values, strict=True)}
    return found | {(seq, way, 24): (found[seq, way, 16] + found[seq, way, 32]) / 2 for seq, way, _ in found}


def compared(published: float, simulated: float) -> dict[str, float]:
    off = 100 * (simulated / published - 1)
    return {"published": round(published, 4), "simulated": round(simulated, 4), "off_percent": round(off, 2)}


def cases(schedule: str, rows: list[Any], scaling: dict[Any, float]) -> list[dict[str, Any]]:
    """Each published row beside the simulation."""
    published: dict[Row, float] = {(gpus, seq, method, size): mfu for gpus, seq, method, size, mfu in rows}
    simulated = {
        (gpus, seq, method, size): efficiency(schedule, gpus, seq, method, int(size[:-1]) * 1024, scaling)
        for gpus, seq, method, size in published
    }
    found = []
    for row, mfu in published.items():
        gpus, seq, method, size = row
        smallest, divided = (gpus, seq, method, "32K"), (gpus, seq, "vocab-1", size)
        case: dict[str, Any] = {"schedule": schedule, "gpus": gpus, "seq": seq, "method": method, "vocabulary": size, "published_mfu": mfu}
        case["efficiency"] = round(simulated[row], 4)
        if size != "32K":
            case["over_32K"] = compared(mfu / published[smallest], simulated[row] / simulated[smallest])
        if method == "baseline":
            case["over_vocab-1"] = compared(mfu / published[divided], simulated[row] / simulated[divided])
        found.append(case)
    return found


def within(found: list[dict[str, Any]], key: str, schedule: str, percent: float) -> str:
    """How many of the rows of a schedule have that ratio within so many percent."""
    offs = [abs(case[key]["off_percent"]) for case in found if key in case and case["schedule"] == schedule]
    return f"{sum(off <= percent for off in offs)} of {len(offs)} within {percent:g} %, worst {max(offs):.1f} %"


def main() -> None:
    published = json.loads((HERE / "published.json").read_text())
    scaling = scaling_factors(published["scaling_percent"])
    found = [case for schedule in ("1f1b", "v-half") for case in cases(schedule, published[schedule], scaling)]
    summary = {
        f"{schedule}, {key}": within(found, key, schedule, 2) for schedule in ("1f1b", "v-half") for key in ("over_32K", "over_vocab-1")
    }
    (HERE / "results.json").write_text(json.dumps({"summary": summary, "cases": found}, indent=1) + "\n")
    for key, text in summary.items():
        print(f"{key}: {text}")


if __name__ == "__main__":
    main()
