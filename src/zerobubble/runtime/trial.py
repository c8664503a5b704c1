"""A trial of this machine: `python -m zerobubble.runtime.trial [--gpu] PORT RANK` for ranks 0 and 1, as `zerobubble doctor` runs it.

Each rank prints one line of JSON with what its PyTorch can use, before it does anything that may fail. Then both train a step together,
and print a second line: by how much their gradients differ from those of one device, and how far apart their clocks are.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobubble.runtime.device import accelerator_facts, accelerators
from zerobubble.runtime.pipeline import Pipeline

SCHEDULE, MICROBATCHES, WIDTH, PINGS = "zb-h1", 4, 16, 20
TIMEOUT_S = 30.0


def can_use() -> dict[str, Any]:
    """Returns the backends of torch.distributed and the devices that this process can use."""
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    backends = [name for name, is_available in checks.items() if dist.is_available() and is_available()]
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "backends": backends, "devices": accelerators()}


def train(rank: int) -> dict[str, Any]:
    """Trains one step with the other rank. Returns the largest relative difference of a gradient of this rank from that of one device."""
    data = torch.Generator().manual_seed(0)
    inputs, targets = (torch.rand(MICROBATCHES, WIDTH, generator=data, dtype=torch.float64) for _ in range(2))
    with Pipeline(build, SCHEDULE, MICROBATCHES, nn.functional.mse_loss, timeout=TIMEOUT_S) as pipe:
        before = time.perf_counter()
        loss = pipe.step(inputs, targets)
        seconds = time.perf_counter() - before
        mine, transport = [parameter.grad for parameter in pipe.parameters()], pipe.transport.name
    expected_loss, expected = of_one_device(rank, inputs, targets)
    pairs = [(loss, expected_loss), *zip(mine, expected, strict=True)]
    return {"difference": max(map(_difference, *zip(*pairs, strict=True))), "transport": transport, "seconds": seconds}


def build(stage: int, num_stages: int) -> nn.Module:
    """Returns a stage with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stage)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())


def of_one_device(rank: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the loss, and the gradients of the stage of `rank`, of one process that accumulates the microbatches."""
    model = nn.Sequential(build(0, 2), build(1, 2))
    cut = [slice(row, row + 1) for row in range(MICROBATCHES)]
    losses = [nn.functional.mse_loss(model(inputs[rows]), targets[rows]) / MICROBATCHES for rows in cut]
    total = torch.stack(losses).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return total.detach(), [parameter.grad for parameter in model[rank].parameters()]


def _difference(mine: Tensor | None, expected: Tensor | None) -> float:
    if mine is None or expected is None:
        return float("inf")
    return float((mine - expected).abs().max() / expected.abs().max())


def clock_skew(rank: int) -> dict[str, float]:
    """Returns the difference between the monotonic clocks of the two ranks, and its error: half of the fastest round trip, in seconds."""
    answer = torch.zeros(1, dtype=torch.int64)
    best: tuple[int, int] = (2**62, 0)
    for _ in range(PINGS):
        sent = time.monotonic_ns()
        if rank == 0:
            dist.send(answer, 1)
            dist.recv(answer, 1)
            received = time.monotonic_ns()
            best = min(best, (received - sent, int(answer) - (sent + received) // 2))
        else:
            dist.recv(answer, 0)
            dist.send(torch.tensor([time.monotonic_ns()]), 0)
    return {"skew": best[1] / 1e9, "skew_error": best[0] / 2e9} if rank == 0 else {}


def main(port: int, rank: int, *, asks_gpu: bool) -> None:
    """Runs the trial of one rank."""
    torch.set_num_threads(1)
    _print(can_use() | (accelerator_facts() if asks_gpu else {}))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    _print(train(rank) | clock_skew(rank))
    dist.destroy_process_group()


def _print(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[-2:]), asks_gpu="--gpu" in sys.argv)
