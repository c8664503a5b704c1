"""On one GPU: the cost of splitting the backward pass in float32, bfloat16 and FP8, eager and compiled; host time per action; predicted and
allocated memory; and a step in half the memory, with offload.

Writes `results.json` next to this file, or what `--out` names. It takes some minutes and 16 GB of the GPU. Without a GPU it prints so and
writes nothing; `--device cpu` rehearses the same code with small sizes, and writes only what `--out` names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from allocator import peak_of
from blocks import DTYPES, Sizes, model
from float8 import has_float8
from ranks import machine, show

WAYS, WHOLE = ("deferred", "graph", "compiled", "replayed-graph", "replayed-compiled"), ("eager", "compiled")
"""What is replayed is so by CUDA graphs."""
FLOAT8_WAYS = ("deferred", "graph")


def mean(output: Tensor, target: Tensor) -> Tensor:
    """A loss that costs nothing."""
    return output.float().mean()


def pipeline(stage: nn.Module, schedule: str, microbatches: int, **options: Any) -> zb.Pipeline:
    """A pipeline of one stage, on this one rank."""
    return zb.Pipeline(stage, schedule, microbatches, mean, **options)


def passes(pipe: zb.Pipeline, x: Tensor, steps: int) -> dict[str, float]:
    """Median milliseconds of each kind of pass over the steps, two to warm up left out."""
    times: dict[str, list[float]] = {}
    for step in range(steps + 2):
        pipe.step(x, x)
        for _, span in pipe.timeline().spans():
            if step >= 2:
                times.setdefault(str(span.op.kind), []).append(span.duration / 1e6)
        for parameter in pipe.parameters():
            parameter.grad = None
    return {kind: statistics.median(values) for kind, values in times.items()}


def split_ratios(sizes: Sizes, device: torch.device, compiling: bool) -> list[dict[str, Any]]:
    """(T_B + T_W) / T_fused for each way and precision, of the model as it is and, when `compiling`, of the compiled one."""
    left_out = {way for way in WAYS if ("compiled" in way and not compiling) or ("replayed" in way and device.type != "cuda")}
    rows = []
    for name, dtype in DTYPES.items():
        if name == "float8" and not has_float8(device):
            continue
        ways = [way for way in (FLOAT8_WAYS if name == "float8" else WAYS) if way not in left_out]
        x = torch.randn(sizes.batch * sizes.microbatches, sizes.length, sizes.width, device=device, dtype=dtype)
        fused = {}
        for whole in WHOLE if compiling and name != "float8" else WHOLE[:1]:
            torch._dynamo.reset()
            stack = model(sizes, device, name)
            if whole == "compiled":
                stack.compile()
            with pipeline(stack, "1f1b", sizes.microbatches) as pipe:
                fused[whole] = passes(pipe, x, sizes.steps)
        for way in ways:
            torch._dynamo.reset()
            options = {"split": way.removeprefix("replayed-"), "cuda_graphs": way.startswith("replayed-")}
            with pipeline(model(sizes, device, name), "zb-h1", sizes.microbatches, **options) as pipe:
                took = passes(pipe, x, sizes.steps)
            row = {"precision": name, "way": way, **{f"{kind}_ms": round(ms, 3) for kind, ms in took.items()}}
            row |= {f"over_{whole}_fused": round((took["B"] + took["W"]) / times["BW"], 3) for whole, times in fused.items()}
            rows.append(show(row))
    return rows


PEERS = {"1f1b": Schedule1F1B, "zb-h1": ScheduleInterleavedZeroBubble}
"""What of torch's runtime plays the same passes on one rank."""


def host_overhead(schedule: str, device: torch.device, microbatches: int = 64, steps: int = 60) -> dict[str, Any]:
    """Returns the host's microseconds per action with a stage too small to matter, for this runtime, torch's and a bare loop.

    Their steps alternate, because the speed of a host drifts. `overhead_us` and `torch_overhead_us` are what a runtime adds to the loop.
    """
    linear = nn.Linear(16, 16).to(device)
    x = torch.zeros(microbatches, 16, device=device)
    with pipeline(linear, schedule, microbatches) as pipe:
        actions = sum(len(row) for row in pipe.schedule.rows)
        ways = (lambda: pipe.step(x, x), lambda: bare_loop(linear, x, microbatches), torchs_step(linear, schedule, x, microbatches))
        ours, bare, peer = in_turns(ways, steps, device)
    row: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    took = {"ours_us": ours, "bare_us": bare, "overhead_us": ours - bare, "torch_us": peer, "torch_overhead_us": peer - bare}
    return show(row | {key: round(value / actions * 1e6, 1) for key, value in took.items()})


def torchs_step(module: nn.Module, schedule: str, x: Tensor, microbatches: int) -> Callable[[], object]:
    """A step of torch.distributed.pipelining with one stage on this rank."""
    stage = PipelineStage(module, 0, 1, x.device)
    many = schedule != "1f1b"
    runtime = PEERS[schedule]([stage] if many else stage, microbatches, loss_fn=mean)  # type: ignore[arg-type]
    return lambda: runtime.step(x, target=x)


def bare_loop(module: nn.Module, x: Tensor, microbatches: int) -> None:
    """Forward and backward of every microbatch with nothing around them."""
    for part in x.split(1):
        (mean(module(part), part) / microbatches).backward()


def seconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Returns the median seconds of a step, the device's work included."""
    return in_turns([step], steps, device)[0]


def in_turns(ways: Sequence[Callable[[], object]], steps: int, device: torch.device) -> list[float]:
    """Returns the median seconds of a step of each of these ways, whose steps alternate; the device's work is included."""
    took: list[list[float]] = [[] for _ in ways]
    for turn in range(steps + 3):
        for step, times in zip(ways, took, strict=True):
            wait(device)
            begin = time.perf_counter()
            step()
            wait(device)
            if turn >= 3:
                times.append(time.perf_counter() - begin)
    return [statistics.median(times) for times in took]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory(sizes: Sizes, device: torch.device, microbatches: int = 4) -> list[dict[str, Any]]:
    """The peak of activations that the simulation of the profiled costs predicts, and what the allocator says, between and in passes."""
    rows = []
    x = torch.randn(microbatches, sizes.length, sizes.width, device=device)
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        with pipeline(model(sizes, device, "float32"), schedule, microbatches) as pipe:
            predicted = zb.simulation.peak_memory(pipe.schedule, pipe.profile(x, x))[0]
            for _ in range(2):  # they keep outputs in host memory, which is the device's on a CPU, to see whether the loss is a mean
                pipe.step(x, x)
            peak = peak_of(pipe, lambda pipe=pipe: pipe.step(x, x))
        row = {"schedule": schedule, "predicted_mb": predicted / 2**20, "allocated_mb": peak.between / 2**20}
        row |= {"within_passes_mb": peak.within / 2**20, "predicted_over_allocated": predicted / peak.between}
        rows.append(show({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}))
    return rows


def offload(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """All microbatches forward and then back, in half the memory: the bytes planned and held, the time of a step over one without offload.

    The first plan is for a link of 20 GB/s, the second for the link that the first run measures. On a CPU the copies lie in the device's
    memory, too, so there is nothing to see in `allocated_over_without`.
    """
    schedule, x = zb.make("gpipe", 1, 2 * sizes.microbatches), torch.randn(2 * sizes.microbatches, sizes.length, sizes.width, device=device)
    with pipeline(model(sizes, device, "float32"), schedule, schedule.num_microbatches) as pipe:
        costs = pipe.profile(x, x)
        plain_s = seconds(lambda: pipe.step(x, x), sizes.steps, device)
        peak = peak_of(pipe, lambda: pipe.step(x, x))
    held = zb.simulation.peak_memory(schedule, costs)[0]
    guess = zb.offload.HostLink(to_host=20e9, from_host=20e9)
    for _ in range(2):
        ranks = zb.offload.plan_offloads(schedule, costs, zb.Limits((held // 2,)), guess)
        with pipeline(model(sizes, device, "float32"), schedule, schedule.num_microbatches, offload=ranks) as pipe:
            offloaded_s = seconds(lambda pipe=pipe: pipe.step(x, x), sizes.steps, device)
            guess = zb.offload.fit_link(pipe.timeline(), costs)
            with_offload = peak_of(pipe, lambda pipe=pipe: pipe.step(x, x))
    row = {"offloads": len(ranks[0].offloads), "to_host_gb_s": guess.to_host / 1e9, "from_host_gb_s": guess.from_host / 1e9}
    row |= {"planned_over_held": ranks[0].peak_bytes / held, "allocated_over_without": with_offload.between / peak.between}
    row |= {"step_over_without": offloaded_s / plain_s, "planned_mb": ranks[0].peak_bytes / 2**20}
    row |= {"allocated_mb": with_offload.between / 2**20, "within_passes_mb": with_offload.within / 2**20}
    return show({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})


def determinism(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Whether a step repeats its gradients to the bit, and whether offload changes any, with torch's deterministic kernels and without."""
    schedule = zb.make("gpipe", 1, sizes.microbatches)
    x = torch.randn(2 * sizes.microbatches, sizes.length // 8, sizes.width, device=device)

    def gradients(**options: Any) -> list[Tensor]:
        with pipeline(model(sizes, device, "float32"), schedule, schedule.num_microbatches, **options) as pipe:
            pipe.step(x, x)
            return [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]

    with pipeline(model(sizes, device, "float32"), schedule, schedule.num_microbatches) as pipe:
        costs = pipe.profile(x, x)
    limits = zb.Limits((zb.simulation.peak_memory(schedule, costs)[0] // 2,))
    ranks = zb.offload.plan_offloads(schedule, costs, limits, zb.offload.HostLink(to_host=20e9, from_host=20e9))
    rows = []
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        first, again, offloaded = gradients(), gradients(), gradients(offload=ranks)
        row: dict[str, Any] = {"deterministic_kernels": is_deterministic}
        for name, other in (("repeated", again), ("offloaded", offloaded)):
            apart = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(first, other, strict=True))
            row |= {f"{name}_equal": all(map(torch.equal, first, other)), f"{name}_apart": float(f"{apart:.2g}")}
        rows.append(show(row))
    torch.use_deterministic_algorithms(False)
    return rows


def main() -> None:
    """Measure on the GPU, or rehearse."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu rehearses with small sizes")
    parser.add_argument("--out", type=Path, help="where the results go; by default results.json next to this file, from a GPU")
    parser.add_argument("--eager", action="store_true", help="leave out what is compiled, which takes most of the time")
    parser.add_argument("--only", choices=["host", "memory", "offload", "determinism", "split"], help="one part, printed")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here, so nothing was measured; --device cpu rehearses the same code.")
        return
    device = torch.device(options.device)
    kept = device.type == "cuda" and options.only is None
    out = options.out or (Path(__file__).with_name("results.json") if kept else None)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products need
    if device.type == "cpu":
        torch.set_num_threads(1)
    sizes = Sizes(device)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=store, rank=0, world_size=1)
        results: dict[str, Any] = {"machine": machine() | {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}}
        parts: dict[str, Callable[[], Any]] = {
            "host": lambda: [host_overhead(s, device) for s in ("1f1b", "zb-h1")],
            "memory": lambda: memory(sizes, device),
            "offload": lambda: offload(sizes, device),
            "determinism": lambda: determinism(sizes, device),
            "split": lambda: split_ratios(sizes, device, not options.eager),
        }
        for name, measure in parts.items():
            if options.only not in (None, name):
                continue
            results[name] = measure()
            if out is not None:
                out.write_text(json.dumps(results, indent=1) + "\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
