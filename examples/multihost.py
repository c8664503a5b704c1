"""A pipeline over all ranks of all hosts, on GPUs if there are any. `examples/multihost.sh` starts it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import zerobubble as zb

device = zb.init_distributed()


def build(stage: int, num_stages: int) -> nn.Module:
    """Returns one block per stage, with the same weights on any number of ranks."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh()).to(device)


microbatches = 2 * dist.get_world_size()
with zb.Pipeline(build, "zb-h1", microbatches, nn.functional.mse_loss, timeout=60) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(20):
        x = torch.rand(4 * microbatches, 64, generator=torch.Generator().manual_seed(step)).to(device)
        loss = pipe.step(x, torch.sin(x)).item()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, messages over {pipe.transport.name}: {pipe.transport.why}", flush=True)
dist.destroy_process_group()
