"""The cost of splitting the backward pass: (T_B + T_W) / T_fused, and the bytes held between B and W, for our split and PyTorch's.

Four GPT blocks, one thread, one process. Writes `results.json` next to this file. Fused backward, our split and PyTorch's take turns;
a ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.stage.stage import make_stage

SHAPES = [(512, 2, 256), (512, 4, 256), (128, 1, 64)]


class Block(nn.Module):
    """A pre-norm transformer block: causal attention with 64-wide heads and a 4x GELU MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


KEEP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
"""Lets glibc keep freed memory, as a GPU's caching allocator does: page faults are not what is measured."""


def main() -> None:
    """Measure every shape and write the table."""
    if not KEEP.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="turns measured per shape")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for width, sequences, length in SHAPES:
        row = {"width": width, "batch": sequences, "length": length} | measure(width, sequences, length, options.repeats)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    Path(__file__).with_name("results.json").write_text(json.dumps({"machine": machine, "split": rows}, indent=1) + "\n")


def measure(width: int, sequences: int, length: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds of each way, their ratios, and the memory between B and W as a share of what the forward holds."""
    torch.manual_seed(0)
    module = nn.Sequential(*[Block(width) for _ in range(4)])
    x, dy = torch.randn(sequences, length, width), torch.randn(sequences, length, width)
    times: dict[str, list[float]] = {name: [] for name in ("forward", "fused", "ours_b", "ours_w", "pytorch_b", "pytorch_w")}
    gradients: dict[str, list[Tensor]] = {}
    for turn in range(repeats + 2):
        found: dict[str, float] = {}
        for name, way in (("fused", fused), ("ours", ours), ("pytorch", pytorch)):
            module.zero_grad()
            found |= way(module, x.clone().requires_grad_(), dy)
            gradients[name] = [p.grad for p in module.parameters() if p.grad is not None]
        for name, value in found.items():
            if turn >= 2:
                times[name].append(value)
    assert all(torch.equal(a, b) for a, b in zip(gradients["fused"], gradients["ours"], strict=True)), "the split changed a gradient"
    ms = {name: statistics.median(values) * 1000 for name, values in times.items()}
    ratios = {who: over_fused(times, who) for who in ("ours", "pytorch")}
    row = {f"{name}_ms": round(value, 2) for name, value in ms.items()}
    row |= {f"{who}_over_fused": round(ratio, 4) for who, ratio in ratios.items()}
    return row | held_between(module, x, dy)


def over_fused(times: dict[str, list[float]], who: str) -> float:
    """Median over the turns of (T_B + T_W) / T_fused of the same turn, which cancels the machine's moods."""
    turns = zip(times[f"{who}_b"], times[f"{who}_w"], times["fused"], strict=True)
    return statistics.median((b + w) / fused for b, w, fused in turns)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def fused(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, float]:
    forward, y = timed(lambda: module(x))
    return {"forward": forward, "fused": timed(lambda: y.backward(dy))[0]}


def ours(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, float]:
    stage = make_stage("deferred", module, 1)
    with stage.stepping():
        stage.forward(0, (x,))
        backward, _ = timed(lambda: stage.backward(0, (dy,)))
        weight, _ = timed(lambda: stage.weight(0))
    return {"ours_b": backward, "ours_w": weight}


def pytorch(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, float]:
    y = module(x).clone()
    backward, (_, groups) = timed(lambda: stage_backward_input([y], [dy], [x], module.parameters()))
    weight, _ = timed(lambda: stage_backward_weight(module.parameters(), groups))
    return {"pytorch_b": backward, "pytorch_w": weight}


def held_between(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Any]:
    """Bytes held between B and W over the bytes held between F and B, each counted as distinct storages."""
    module.zero_grad()
    meter = Meter(module.parameters())
    stage = make_stage("deferred", module, 1)
    with stage.stepping(meter):
        stage.forward(0, (x.clone().requires_grad_(),))
        after_f = meter.bytes
        stage.backward(0, (dy,))
        after_b = meter.bytes
        stage.weight(0)
    module.zero_grad()
    peer = Meter(module.parameters())
    leaf = x.clone().requires_grad_()
    with peer.counting():
        y = module(leaf).clone()
    _, groups = stage_backward_input([y], [dy], [leaf], module.parameters())
    kept = [peer.hold(g) for group in groups for grads in group["grads"] or () for g in grads or () if g is not None]
    row = {"held_after_f_bytes": after_f, "ours_between": round(after_b / after_f, 4), "pytorch_between": round(peer.bytes / after_f, 4)}
    del kept
    stage_backward_weight(module.parameters(), groups)
    return row


if __name__ == "__main__":
    main()
