"""The cost of new lengths for a stage split by its graph: CPU seconds of the first F, B and W of each, with one trace for all or for each.

Four transformer blocks, one thread, one process. Writes `lengths.json` next to this file.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))
from run import Block

from zerobubble.runtime.split.compiled.part import PartMaker
from zerobubble.runtime.split.graph import GraphSplitter
from zerobubble.runtime.stage.stage import Stage, make_stage

BLOCKS, WIDTH, BATCH = 4, 64, 2
LENGTHS = (64, 96, 80, 112, 72, 128)


def main() -> None:
    """Measure both ways and write the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(*[Block(WIDTH) for _ in range(BLOCKS)])
    inputs = [torch.randn(BATCH, length, WIDTH) for length in LENGTHS]
    measure(make_stage("graph", module, 1), inputs[:1])  # what torch imports for its first trace
    rows: dict[str, dict[str, Any]] = {}
    gradients = []
    for name in ("all", "each"):
        stage = make_stage("graph", module, 1)
        assert isinstance(stage.splitter, GraphSplitter)
        module.zero_grad()
        with patch.object(PartMaker, "takes_symbols", name == "all"):
            rows[name] = {"seconds": measure(stage, inputs), "traces": len(stage.splitter.traces)}
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True)), "a gradient differs"
    result: dict[str, Any] = {"blocks": BLOCKS, "width": WIDTH, "batch": BATCH, "lengths": LENGTHS, **rows}
    result["each_over_all"] = round(sum(rows["each"]["seconds"]) / sum(rows["all"]["seconds"]), 2)
    result["each_over_all_from_the_third"] = round(sum(rows["each"]["seconds"][2:]) / sum(rows["all"]["seconds"][2:]), 1)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    print(json.dumps(result), flush=True)
    Path(__file__).with_name("lengths.json").write_text(json.dumps({"machine": machine, "lengths": result}, indent=1) + "\n")


def measure(stage: Stage, inputs: list[Tensor]) -> list[float]:
    """CPU seconds of F, B and W of each of these inputs."""
    found = []
    for x in inputs:
        stage.begin(None)
        begin = time.process_time()
        (y,) = stage.forward(0, (x.clone().requires_grad_(),))
        stage.backward(0, (torch.ones_like(y),))
        stage.weight(0)
        found.append(round(time.process_time() - begin, 3))
        del y
    return found


if __name__ == "__main__":
    main()
