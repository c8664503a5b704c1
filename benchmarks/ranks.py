"""Helpers of benchmarks with several ranks: run a job on fresh gloo ranks, train there, print rows, and name the machine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import zerobubble as zb


def in_ranks(job: Callable[..., Any], ranks: int, *args: Any, backend: str = "gloo") -> Any:
    """What rank 0 of `ranks` fresh ranks, one thread each, found by `job(*args)`."""
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (ranks, 20000 + os.getpid() % 20000, backend, queue, job, args), nprocs=ranks)
    return queue.get()


def _rank(rank: int, ranks: int, port: int, backend: str, queue: Any, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    found = job(*args)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def trained(pipe: zb.Pipeline, steps: int, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """The losses of so many steps of AdamW, and the parameters and gradients that they leave."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(inputs, targets).detach())
        optimizer.step()
    parts = [part for parameter in pipe.parameters() for part in (parameter, parameter.grad)]
    return [*losses, *(part.detach().clone() for part in parts if part is not None)]


def equal_on_all_ranks(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists are the same to the bit on every rank, each of which asks."""
    equal = [False] * dist.get_world_size()
    dist.all_gather_object(equal, all(torch.equal(mine, others) for mine, others in zip(one, other, strict=True)))
    return all(equal)


def show(row: dict[str, Any]) -> dict[str, Any]:
    """The row, printed."""
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
