"""Survive a failure: if a rank is killed, torchrun restarts all ranks, and they resume from the last checkpoint.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/survive.py

Kill any of the printed ranks: the losses continue as if nothing had happened. Unless the variable is set, torch reuses its store after a
restart and waits in `init_process_group` for ranks that have ended.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb

WIDTH, BATCH, MICROBATCHES = 16, 16, 4


def build(stage: int, num_stages: int) -> nn.Module:
    """Returns a stage, the same in every attempt."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Returns the batch of a step, the same in every attempt."""
    x = torch.rand(BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, torch.sin(3 * x)


def say(line: str) -> None:
    """Prints a line in one write. Under torchrun output is unbuffered: `print` would write twice, and lines of ranks would mix."""
    print(line + "\n", end="", flush=True)


def train(checkpoint: Path, steps: int, pause_s: float) -> None:
    """Trains from the last checkpoint on, and saves one after each step."""
    attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), dist.get_rank()
    say(f"attempt {attempt}: rank {rank} is process {os.getpid()}")
    with zb.Pipeline(build, "zb-h1", MICROBATCHES, nn.functional.mse_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        first = zb.load(checkpoint, pipe, optimizer)["next"] if checkpoint.exists() else 0
        for step in range(first, steps):
            loss = pipe.step(*batch(step))
            optimizer.step()
            optimizer.zero_grad()
            zb.save(checkpoint, pipe, optimizer, extra={"next": step + 1})
            if rank == 0:
                say(f"step {step} loss {loss.item():.17g}")
            time.sleep(pause_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two steps, in which you can kill a rank")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(given.checkpoint, given.steps, given.pause)
    dist.destroy_process_group()
