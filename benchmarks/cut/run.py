"""The processor time to cut a model of many layers without its weights, compared with making the model.

A Llama with the widths of Llama 2 7B is made from its configuration. `zb.split` of a function that makes it cuts it into 8 stages and
proves the cut. For comparison: the time in which Transformers makes the model on the meta device, and that of one forward there. The import
of Transformers is counted separately. Times are processor times, the minimum over rounds, taken in turns in one process. Writes
`results.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from ranks import machine, show

from tests.libraries import library

STAGES = 8
WIDTHS = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 100])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    imported = _seconds(_import)
    rows = [show(measure(layers, options.rounds)) for layers in options.layers]
    results = {"machine": machine(), "import_transformers_s": round(imported, 2), "cut": rows}
    Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n")


def measure(layers: int, rounds: int) -> dict[str, Any]:
    """The times for a model of so many layers."""
    transformers = library("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=layers, **WIDTHS)

    def make() -> Any:
        return transformers.AutoModelForCausalLM.from_config(config)

    def make_on_meta() -> Any:
        with torch.device("meta"):
            return make()

    model = make_on_meta()
    tokens = torch.zeros(3, 5, dtype=torch.long, device="meta")
    jobs: dict[str, Callable[[], Any]] = {
        "cut": lambda: zb.split(make).describe(STAGES),
        "make_on_meta": make_on_meta,
        "forward_on_meta": lambda: model(input_ids=tokens),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            times[name].append(_seconds(job))
    least = {f"{name}_s": round(min(each), 3) for name, each in times.items()}
    ratio = min(times["cut"]) / (min(times["make_on_meta"]) + min(times["forward_on_meta"]))
    return {"layers": layers, "stages": STAGES} | least | {"cut_over_both": round(ratio, 2)}


def _import() -> None:
    library("transformers.models.llama.modeling_llama")


def _seconds(job: Callable[[], Any]) -> float:
    began = time.process_time()
    job()
    return time.process_time() - began


if __name__ == "__main__":
    main()
