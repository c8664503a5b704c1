"""Measures this machine: `python -m zerobubble.runtime.speeds PORT RANK` for ranks 0 and 1, as `zerobubble doctor --measure` runs it.

Each rank prints one line of JSON, with figures in FLOP/s, bytes per second, seconds and bytes. On CPUs, both ranks compute at the same
time, as in training, with one thread each. If they share an accelerator, rank 0 alone computes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobubble.runtime.device import accelerators, backend_of, interface, is_host

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_S = 0.2
"""Seconds over which repeated calls of one operation are timed."""
LONG_CALL_S = 0.02
"""Products grow until one takes this long."""
MOST_ROWS = 8192
COPIED = {True: 1 << 27, False: 1 << 30}
"""Bytes of the memory that is copied: far more than caches hold."""
SENT = {True: 1 << 24, False: 1 << 28}
"""Bytes of a message and of a sum over ranks."""
ATTENDED = {True: 1024, False: 8192}
"""The length in tokens of the sequence for which attention is timed."""
HEADS, HEAD_WIDTH = 8, 128
TIMEOUT_S = 60.0


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a call of `run`, the least of three means over repeated calls."""
    settle = interface(device).synchronize

    def repeated(times: int) -> float:
        settle()
        began = time.perf_counter()
        for _ in range(times):
            run()
        settle()
        return time.perf_counter() - began

    repeated(2)
    times = max(1, round(LEAST_S / max(repeated(1), 1e-6)))
    return min(repeated(times) / times for _ in range(3))


def product_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the FLOP/s of products of square matrices, which are large enough to take long."""
    rows, seconds = 128, 0.0
    while rows < MOST_ROWS and seconds < LONG_CALL_S:
        rows *= 2
        left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
        settle = interface(device).synchronize
        settle()
        began = time.perf_counter()
        left @ right
        settle()
        seconds = time.perf_counter() - began
    return 2 * rows**3 / seconds_of(lambda: left @ right, device)


def attention_flops(device: torch.device) -> tuple[float, float]:
    """Returns the FLOP/s of causal attention in bf16, in F and in B. B recomputes the scores, so it has 2.5 times the products of F."""
    tokens = ATTENDED[is_host(device)]
    shape = (1, HEADS, tokens, HEAD_WIDTH)
    queries, keys, values = (torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3))

    def forward() -> Tensor:
        return nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)

    def both() -> None:
        forward().sum().backward()  # type: ignore[no-untyped-call]

    flops = 2 * HEADS * tokens**2 * HEAD_WIDTH
    alone = seconds_of(forward, device)
    return flops / alone, 2.5 * flops / max(seconds_of(both, device) - alone, 1e-9)


def copied_per_second(device: torch.device) -> float:
    """Returns the bytes read and written per second by a copy within the memory of the device."""
    source = torch.zeros(COPIED[is_host(device)], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), device)


def computing(device: torch.device) -> dict[str, Any]:
    """Returns the speeds of one rank by itself."""
    products = {name: product_flops(dtype, device) for name, dtype in DTYPES.items()}
    speeds = {"products": products, "attention": attention_flops(device), "attended": ATTENDED[is_host(device)]}
    return speeds | {"copied": copied_per_second(device)}


def exchanging(rank: int, device: torch.device) -> dict[str, Any]:
    """Returns the bytes per second of a message and of a sum over both ranks, and the seconds of a small message."""
    large = torch.zeros(SENT[is_host(device)], dtype=torch.uint8, device=device)
    small = large[:8]

    def there_and_back(part: Tensor) -> None:
        (dist.send if rank == 0 else dist.recv)(part, 1 - rank)
        (dist.recv if rank == 0 else dist.send)(part, 1 - rank)

    def trips(part: Tensor, times: int) -> float:
        """The least seconds of a message in one direction."""
        seconds = []
        for _ in range(times):
            interface(device).synchronize()
            began = time.perf_counter()
            there_and_back(part)
            interface(device).synchronize()
            seconds.append((time.perf_counter() - began) / 2)
        return min(seconds)

    def summed(times: int) -> float:
        values = large.view(torch.float32)
        seconds = []
        for _ in range(times):
            interface(device).synchronize()
            began = time.perf_counter()
            dist.all_reduce(values)
            interface(device).synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    size = large.numel()
    return {"sent": size / trips(large, 10), "summed": size / summed(10), "latency": trips(small, 50)}


def main(port: int, rank: int) -> None:
    """Measures with the other rank, and prints what this one found."""
    torch.set_num_threads(1)
    devices = accelerators()
    about = devices[rank % len(devices)] if devices else None
    device = torch.device("cpu") if about is None else torch.device(about["type"], about["index"])
    free = interface(device).free_bytes()
    # Ranks that share an accelerator exchange messages through the host.
    host_or_device = device if len(devices) > 1 else torch.device("cpu")
    dist.init_process_group(
        backend_of(host_or_device), init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    shares = len(devices) == 1
    speeds = computing(device) if rank == 0 or not shares else {}
    dist.all_reduce(torch.zeros(1, device=host_or_device))  # a barrier would have to guess the device of each rank
    speeds |= exchanging(rank, host_or_device)
    speeds |= {"backend": dist.get_backend(), "name": about["name"] if about else "CPU", "processors": about["processors"] if about else 1}
    speeds |= {"bytes": about["bytes"] if about else free // 2, "domain": max(2, len(devices))}
    sys.stdout.write(json.dumps(speeds) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[-2:]))
