"""Train a ResNet of torchvision over pipeline ranks. Its batch norms see one microbatch at a time, as in gradient accumulation.

torchrun --nproc-per-node 2 examples/split_resnet.py

It needs torchvision from the same index as torch: pip install torchvision.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torchvision.models import resnet18

import zerobubble as zb


def main() -> None:
    """Trains, in one process per rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and images on every rank
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    model = resnet18(num_classes=10)
    pipe = zb.Pipeline(zb.split(model, example=images[:2]), "1f1b", num_microbatches=4, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.02, momentum=0.9)
    for step in range(8):
        loss = pipe.step(images, labels)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
