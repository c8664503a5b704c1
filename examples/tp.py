"""Train a GPT with tensor parallelism: two pipeline stages, each divided over two ranks.

torchrun --nproc-per-node 4 examples/tp.py

Ranks that share a stage get the same data. The MLP of each block is divided by columns, then by rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import Block, GPTConfig, build_stage, loss_fn
from text import batch, standard_library
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerobubble as zb

CONFIG = GPTConfig(layers=4, width=64, heads=4, context=64)


def main() -> None:
    """Trains, in one process per rank."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def build(stage: int, num_stages: int) -> nn.Module:
        module = build_stage(CONFIG, stage, num_stages)
        for part in module:
            if isinstance(part, Block):
                parallelize_module(part, mesh["tp"], {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
        return module

    pipe = zb.Pipeline(build, "zb-h1", 4, loss_fn, mesh=mesh)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    text = standard_library()
    for step in range(12):
        loss = pipe.step(*batch(text.train, sequences=16, length=CONFIG.context, seed=step))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
