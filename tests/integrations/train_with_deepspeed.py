"""Trains a small model in DeepSpeed's pipeline engine, and writes the losses of each schedule to a file.

Under torchrun: `train_with_deepspeed.py LOSSES.json`. The schedule "" is DeepSpeed's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

STEPS, MICROBATCHES, WIDTH = 4, 6, 16
SCHEDULES = ("", "1f1b", "eager-1f1b")


def losses(schedule: str) -> list[float]:
    """The losses of some steps on one batch."""
    from zerobubble.integrations.deepspeed import use_schedule

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = PipelineModule(layers=layers, num_stages=dist.get_world_size(), loss_fn=nn.functional.mse_loss, partition_method="uniform")
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    if schedule:
        use_schedule(engine, schedule)
    torch.manual_seed(1)
    data = iter(STEPS * [(torch.randn(2, WIDTH), torch.randn(2, WIDTH)) for _ in range(MICROBATCHES)])
    return [float(engine.train_batch(data)) for _ in range(STEPS)]


def main() -> None:
    """Train with each schedule."""
    torch.set_num_threads(1)
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None  # it would compile collectives for CPUs
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found = {schedule: losses(schedule) for schedule in SCHEDULES}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
