"""Trains a small network in a loop of Lightning Fabric, on one device or in a pipeline, and writes losses, norms and weights.

`python train_with_fabric.py FOLDER` is the reference. Under torchrun, all ranks form one pipeline, or with `--replicas 2` two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import zerobubble as zb
from tests.integrations.train_with_lightning import CLASSES, SAMPLES, STEPS, WIDTH, network
from tests.refusals import raises

BATCH = 8


def train(folder: Path, replicas: int, resume: str | None, fault: str | None, precision: str, accumulated: int) -> None:
    """Trains in a pipeline under torchrun, else on one device, with SGD, clipping and a checkpoint after 9 steps."""
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    arguments: dict[str, Any] = {"devices": 1}
    if ranks:
        from zerobubble.integrations.lightning.fabric import PipelineStrategy

        microbatches = min(4, BATCH // replicas // accumulated)
        strategy = PipelineStrategy("zb-h1", microbatches, functional.cross_entropy, data_parallel_size=replicas)
        arguments = {"devices": ranks, "strategy": strategy}
    fabric = lightning.Fabric(accelerator="cpu", precision=precision, **arguments)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model: nn.Module = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator))
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH // replicas))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        fabric.load(resume, state)
    rows = []
    while state["step"] < STEPS:
        x, y = list(loader)[state["step"] % len(loader)]
        if fault == "kill" and state["step"] == 2 and fabric.global_rank == fabric.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        for part, (some, labels) in enumerate(zip(x.chunk(accumulated), y.chunk(accumulated), strict=True)):
            if ranks:
                with fabric.no_backward_sync(model, enabled=part + 1 < accumulated), fabric.autocast():
                    loss = fabric.strategy.step(some, labels)
            else:
                with fabric.autocast():
                    loss = functional.cross_entropy(model(some), labels)
                fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        fabric.clip_gradients(model, optimizer, clip_val=0.1)
        optimizer.step()
        state["step"] += 1
        rows.append({"loss": loss.item(), "norm": float(norm)})
        if state["step"] == 9:
            fabric.save(folder / "step9.ckpt", state)
            use_weights(model, folder, fabric)
    model.eval()
    with torch.no_grad():
        answers = model(data.tensors[0][:BATCH])
    replica = torch.tensor(float(fabric.global_rank * replicas // fabric.world_size))
    mean, gathered = fabric.all_reduce(replica.clone()), fabric.all_gather(replica)
    fabric.save(folder / "end.ckpt", state)
    if fabric.is_global_zero:
        found = {"rows": rows, "answers": answers.flatten().tolist(), "mean": float(mean), "gathered": gathered.flatten().tolist()}
        (folder / "log.json").write_text(json.dumps(found))
    if ranks:
        fabric.strategy.teardown()


def use_weights(model: nn.Module, folder: Path, fabric: lightning.Fabric) -> None:
    """Writes the weights of all stages from the first rank."""
    with zb.gathered(model, rank=0) if "WORLD_SIZE" in os.environ else nullcontext():
        if fabric.is_global_zero:
            torch.save(model.state_dict(), folder / "step9.pt")
    if "WORLD_SIZE" in os.environ:
        with raises(zb.InputError, rank=fabric.global_rank):
            model.state_dict()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--resume", help="a checkpoint from which the training goes on")
    parser.add_argument("--fault", choices=["kill"], help="kill the last rank in the third step")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--accumulated", type=int, default=1, help="the number of parts of a batch whose gradients are added")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    options.folder.mkdir(parents=True, exist_ok=True)
    train(options.folder, options.replicas, options.resume, options.fault, options.precision, options.accumulated)
