"""The cost of the graph split: (T_B + T_W) / T_fused in process CPU time, and bytes between B and W, compared with PyTorch's split.

Transformer blocks, one thread, one process, all ways in turns; a ratio is the median over the turns. "compiled" is compared with the
backward of `torch.compile` of the same blocks, and with eager autograd. Prints progress on stderr, and takes some minutes including
compilation. Writes `results.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))
from run import KEEP, Block

from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.stage.stage import Stage, make_stage

SHAPES = [(512, 2, 256)]
BLOCKS = 2


def main() -> None:
    """Measure every shape and write the table."""
    if not KEEP.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=11, help="turns measured per shape")
    parser.add_argument("--eager", action="store_true", help="leave out what has to be compiled, which takes a minute or two")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for width, sequences, length in SHAPES:
        row = {
            "blocks": BLOCKS,
            "width": width,
            "batch": sequences,
            "length": length,
            **measure(width, sequences, length, options.turns, options.eager),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    Path(__file__).with_name("results.json").write_text(json.dumps({"machine": machine, "graph_split": rows}, indent=1) + "\n")


def measure(width: int, sequences: int, length: int, turns: int, eager: bool) -> dict[str, Any]:
    """Median CPU milliseconds of each part, the ratios, and the bytes between B and W over x and dy of every Linear."""
    torch.manual_seed(0)
    module = nn.Sequential(*[Block(width) for _ in range(BLOCKS)])
    x, dy = torch.randn(sequences, length, width), torch.randn(sequences, length, width)
    ways: dict[str, Callable[[Tensor], tuple[float, ...]]] = {
        "eager": lambda leaf: fused(module, leaf, dy),
        "graph": split(make_stage("graph", module, 1), dy),
        "pytorch": lambda leaf: pytorch(module, leaf, dy),
    }
    if not eager:
        compiled = torch.compile(module)
        ways |= {"compile": lambda leaf: fused(compiled, leaf, dy), "compiled": split(make_stage("compiled", module, 1), dy)}
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    gradients: dict[str, list[Tensor]] = {}
    for turn in range(turns + 2):
        for name, way in ways.items():
            print(f"turn {turn + 1} of {turns + 2}: {name}" + ("" if turn else ", made ready"), file=sys.stderr, flush=True)
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            taken = way(x.clone().requires_grad_())
            gradients[name] = [p.grad.clone() for p in module.parameters() if p.grad is not None]
            if turn >= 2:
                times[name].append(taken)
    assert all(torch.equal(a, b) for a, b in zip(gradients["eager"], gradients["graph"], strict=True)), "the graph changed a gradient"
    for name, found in gradients.items():
        worst = max(((a - b).norm() / a.norm()).item() for a, b in zip(gradients["eager"], found, strict=True))
        assert worst < 1e-4, f"the gradients of {name} are off by {worst}"
    row: dict[str, Any] = {
        f"{name}_cpu_ms": [round(1000 * statistics.median(t), 2) for t in zip(*v, strict=True)] for name, v in times.items()
    }
    pairs = (("graph", "eager"), ("pytorch", "eager"), ("compiled", "compile"), ("compiled", "eager"))
    row |= {f"{a}_over_{b}": round(ratio(times[a], times[b]), 4) for a, b in pairs if a in times}
    return row | {"between_over_x_and_dy": round(kept_between(module, x, dy), 4)}


def ratio(mine: list[tuple[float, ...]], theirs: list[tuple[float, ...]]) -> float:
    """Median over the turns of the backward of one way over the other's in the same turn."""
    return statistics.median(sum(a[1:]) / sum(b[1:]) for a, b in zip(mine, theirs, strict=True))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


def fused(module: Callable[..., Any], x: Tensor, dy: Tensor) -> tuple[float, ...]:
    forward, y = timed(lambda: module(x))
    return forward, timed(lambda: y.backward(dy))[0]


def split(stage: Stage, dy: Tensor) -> Callable[[Tensor], tuple[float, ...]]:
    def way(x: Tensor) -> tuple[float, ...]:
        forward, _ = timed(lambda: stage.forward(0, (x,)))
        backward, _ = timed(lambda: stage.backward(0, (dy,)))
        return forward, backward, timed(lambda: stage.weight(0))[0]

    return way


def pytorch(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[float, ...]:
    forward, y = timed(lambda: module(x).clone())
    backward, (_, groups) = timed(lambda: stage_backward_input([y], [dy], [x], module.parameters()))
    return forward, backward, timed(lambda: stage_backward_weight(module.parameters(), groups))[0]


def kept_between(module: nn.Module, x: Tensor, dy: Tensor) -> float:
    stage = make_stage("graph", module, 1)
    stage.begin(Meter(module.parameters()))
    assert stage.meter is not None
    stage.forward(0, (x.clone().requires_grad_(),))
    stage.backward(0, (dy,))
    features = sum(part.in_features + part.out_features for part in module.modules() if isinstance(part, nn.Linear))
    between = stage.meter.bytes / (features * x[..., 0].numel() * x.element_size())
    stage.weight(0)
    return between


if __name__ == "__main__":
    main()
