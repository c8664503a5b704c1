"""A GPT with stages sharded by FSDP2: two pipelines of two ranks each, which shard the weights and share the batch.

torchrun --nproc-per-node 4 examples/fsdp.py

Each rank holds two stages and has memory for the gathered weights of one. The schedule gathers weights as seldom as that allows, reduces
gradients once a step, and defers W.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import GPTConfig, build_stage, loss_fn
from text import batch, standard_library
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerobubble as zb

CONFIG = GPTConfig(layers=4, width=64, heads=4, context=64)
SEQUENCES = 16


def gathered_bytes() -> int:
    """Returns the bytes of the largest stage's weights."""
    return max(sum(weight.nbytes for weight in build_stage(CONFIG, stage, 4).parameters()) for stage in range(4))


def main() -> None:
    """Trains, in one process per rank."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))

    def build(stage: int, num_stages: int) -> nn.Module:
        module = build_stage(CONFIG, stage, num_stages)
        for block in module:  # what is divided together is gathered in one message
            fully_shard(block, mesh=mesh["dp_shard"])
        return fully_shard(module, mesh=mesh["dp_shard"])

    pipe = zb.Pipeline(build, "zb-v", 4, loss_fn, mesh=mesh, gathered_bytes=gathered_bytes())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    text = standard_library()
    share = mesh.get_local_rank("dp_shard")
    for step in range(12):
        loss = pipe.step(*batch(text.train, SEQUENCES, CONFIG.context, seed=2 * step + share))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(f"rank 0 gathers {len(pipe.gathers.gathers)} times a step; none of {pipe.gathers.bound - 1} would do")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
