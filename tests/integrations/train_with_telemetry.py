"""Trains three steps with telemetry in a folder: events of TensorBoard, offline runs of W&B, and the reports of each rank as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerobubble as zb


def main(folder: Path) -> None:
    """Train on this rank."""
    reports: list[zb.hooks.StepReport] = []
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    dist.init_process_group("gloo")
    hook = zb.hooks.Telemetry(reports.append, costs=zb.Costs.uniform(2), tensorboard=folder, wandb="project", detail_every=2)
    data = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    with zb.Pipeline(lambda stage, count: nn.Linear(8, 8), "zb-h1", 4, nn.functional.mse_loss, hooks=[hook]) as pipe:
        for _ in range(3):
            pipe.step(data, data)
    (folder / f"reports-{dist.get_rank()}.json").write_text(json.dumps([report.to_dict() for report in reports]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
