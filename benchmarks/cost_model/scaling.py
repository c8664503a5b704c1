"""Estimated scaling of a Llama 3 405B step from 1,024 to 131,072 H100, each cluster divided in its fastest way.

Weak scaling gives every GPU the same share of the batch; strong scaling divides one batch over all of them. DeepSeek-V3 is divided once,
for its experts. The figures are arithmetic, equal on every machine. Writes `scaling.json` next to this file, and the picture of
docs/cost-model.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parent))
from line_chart import Line, line_chart
from run import rounded, show

MODEL, GPU = "llama3-405b", "H100"
GPUS = tuple(1024 << power for power in range(8))
BATCH, AT = 2048, 16384
"""Sequences of a step on so many GPUs, as Llama 3 was trained (arXiv 2407.21783, table 4): 16 M tokens."""
PICTURE = Path(__file__).parents[2] / "docs/scaling.svg"


def main() -> None:
    """Divide every cluster, and draw what share of the peak FLOP/s is used."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    weak = [show(scaled("weak", gpus, BATCH * gpus // AT)) for gpus in GPUS]
    strong = [show(scaled("strong", gpus, BATCH)) for gpus in GPUS]
    experts = show(best_way("deepseek-v3", 2048, None))
    results = rounded({"model": MODEL, "gpu": GPU, "weak": weak, "strong": strong, "experts": experts})
    Path(__file__).with_name("scaling.json").write_text(json.dumps(results, indent=1) + "\n")
    PICTURE.write_text(picture(results), encoding="utf-8")


def scaled(scaling: str, gpus: int, batch: int) -> dict[str, Any]:
    """The quickest way to divide the model over so many GPUs, and its step."""
    return {"scaling": scaling} | best_way(MODEL, gpus, batch)


def best_way(model: str, gpus: int, batch: int | None) -> dict[str, Any]:
    """The quickest of all ways to divide a model, and its step; the batch is that of its training if not given."""
    found = zb.cost_model.divide(model, gpu=GPU, gpus=gpus, batch=batch, top=1)
    best = found.best
    shape = {name: getattr(best.setting, name) for name in ("tp", "cp", "ep", "pp", "v", "dp", "microbatch", "recompute")}
    figures = {"seconds": best.step.seconds, "utilization": best.step.utilization, "tokens_per_s": best.step.tokens_per_second}
    figures |= {"tflops_per_gpu": best.step.flops_per_gpu / 1e12}
    return {"model": model, "gpus": gpus, "batch": found.batch} | shape | {"schedule": best.step.schedule} | figures | {"ways": found.ways}


def picture(results: dict[str, Any]) -> str:
    """The share of the peak FLOP/s that is used, as SVG."""
    lines = [
        Line(
            {"weak": "weak: 2,048 sequences for every 16,384 GPUs", "strong": "strong: 2,048 sequences"}[name],
            [(row["gpus"], round(100 * row["utilization"], 1)) for row in results[name]],
        )
        for name in ("weak", "strong")
    ]
    return line_chart(f"{MODEL} on {GPU} in bf16: estimated % of the peak FLOP/s, by number of GPUs", lines)


if __name__ == "__main__":
    main()
