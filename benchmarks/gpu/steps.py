"""Steps on several ranks: gradients compared with one device's, and step times compared with simulated ones and with PyTorch's runtime.

With several GPUs, each rank has one, and messages go over NCCL: at most eight ranks. Four ranks share a single GPU, and their messages are
staged. Such ranks wait for each other's kernels, so only their gradients are checked. `--device cpu` rehearses with two ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from blocks import DTYPES, Sizes, model
from float8 import has_float8
from peers import pytorch
from ranks import in_ranks, machine, show

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
"""Schedules that PyTorch's runtime plays, too."""


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def measured(kind: str, is_shared: bool, schedule: str, precision: str, steps: int) -> dict[str, Any]:
    """Returns one row: the largest error of a gradient of all ranks and, if each rank has a device, times of steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(kind, 0 if is_shared else rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    sizes = Sizes(device)

    def build(stage: int = 0, num_stages: int = 1) -> nn.Module:
        return model(sizes, device, precision, blocks=1, seed=stage)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * ranks * sizes.batch, sizes.length, sizes.width, generator=generator).to(device, DTYPES[precision])
    row: dict[str, Any] = {"schedule": schedule, "ranks": ranks, "precision": precision}
    with zb.Pipeline(build, schedule, 2 * ranks, mse) as pipe:
        row["transport"] = pipe.transport.name
        pipe.step(x, x)
        row["gradient_error"] = worst(gradient_error(pipe, build, x))
        if is_shared:
            return rounded(row)
        simulated = zb.simulate(pipe.schedule, pipe.profile(x, x)).makespan / 1e6
        theirs, _ = pytorch(build, pipe.schedule, str(device), mse)
        ours_ms, theirs_ms = in_turns([lambda: pipe.step(x, x), lambda: theirs(x, x)], steps)
    row |= {"step_ms": ours_ms, "simulated_over_measured": simulated / ours_ms, "ours_over_pytorch": ours_ms / theirs_ms}
    return rounded(row)


def gradient_error(pipe: zb.Pipeline, build: Callable[[int], nn.Module], x: Tensor) -> float:
    """Returns the largest error of a gradient on this rank, relative to the norm of the gradient on one device."""
    stages = nn.ModuleList(build(stage) for stage in range(pipe.schedule.num_stages))
    microbatches = pipe.schedule.num_microbatches
    for part in x.chunk(microbatches):
        (mse(nn.Sequential(*stages)(part), part) / microbatches).backward()
    errors = [0.0]
    for stage, module in pipe.modules.items():
        expected = [parameter.grad for parameter in stages[stage].parameters()]
        least = 1e-3 * max(gradient.norm().item() for gradient in expected if gradient is not None)
        for mine, other in zip(module.parameters(), expected, strict=True):
            assert mine.grad is not None
            assert other is not None
            errors.append(((mine.grad - other).norm() / other.norm().clamp_min(least)).item())
    return max(errors)


def worst(value: float) -> float:
    """Returns the largest value of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return float(max(values))


def in_turns(ways: list[Callable[[], object]], steps: int) -> list[float]:
    """Returns the median milliseconds of a step of each of these ways, whose steps alternate, until the last rank has finished."""
    took: list[list[float]] = [[] for _ in ways]
    for turn in range(steps + 3):
        for step, times in zip(ways, took, strict=True):
            synchronize()
            dist.barrier()
            begin = time.perf_counter()
            step()
            synchronize()
            longest = worst((time.perf_counter() - begin) * 1e3)
            if turn >= 3:
                times.append(longest)
    return [statistics.median(times) for times in took]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    """Run each schedule in fresh ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu rehearses with small sizes and two ranks")
    parser.add_argument("--steps", type=int, default=10, help="steps of each runtime (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=SCHEDULES, default=SCHEDULES, help="some of the schedules")
    parser.add_argument("--out", type=Path, help="where the results go; by default steps.json next to this file, from a GPU")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here, so nothing was measured; --device cpu rehearses the same code.")
        return
    devices = torch.cuda.device_count() if options.device == "cuda" else 2
    is_shared = devices == 1
    ranks, backend = (4, "gloo") if is_shared else (min(devices, 8), "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")
    out = options.out or (Path(__file__).with_name("steps.json") if options.device == "cuda" else None)
    results: dict[str, Any] = {"machine": machine() | {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu"}}
    results["steps"] = []
    for schedule in options.only:
        for precision in DTYPES:
            if precision == "float8" and not has_float8(torch.device(options.device)):
                continue
            row = in_ranks(measured, ranks, options.device, is_shared, schedule, precision, options.steps, backend=backend)
            results["steps"].append(show(row))
            if out is not None:
                out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
