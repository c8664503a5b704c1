"""Fabric's loop around a small GPT: a sampler of its own, clipping, a checkpoint in the middle that a second process would resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.scripts.corpus import sentences, tokenizer, write_results
from tests.integrations.scripts.nano_gpt import BLOCK, GPT


class Logits(GPT):
    """A GPT that returns logits only."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)[0]


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(folder: Path, pipelined: bool) -> None:
    """Train an epoch, save, train another, load what was saved, and train it again: both times end alike."""
    options: dict[str, Any] = {"devices": 1}
    if pipelined:
        from zerobubble.integrations.lightning.fabric import PipelineStrategy

        options = {"devices": 2, "strategy": PipelineStrategy("zb-h1", 4, loss_fn)}
    fabric = lightning.Fabric(accelerator="cpu", **options)
    fabric.launch()
    fabric.seed_everything(5)
    ids = torch.tensor(tokenizer()(" ".join(sentences(150, 7)))["input_ids"])
    rows = ids[: 64 * (BLOCK + 1)].view(64, BLOCK + 1)
    model = Logits().double()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=8))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    losses: list[float] = []
    for epoch in (0, 1, 1):
        if len(losses) == 16:
            fabric.load(folder / "epoch-1.ckpt", state)
        for x, y in loader:
            optimizer.zero_grad()
            if pipelined:
                loss = fabric.strategy.step(x, y)
            else:
                loss = loss_fn(model(x), y)
                fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            losses.append(loss.item())
        state["epoch"] = epoch + 1
        if epoch == 0:
            fabric.save(folder / "epoch-1.ckpt", state)
    with torch.no_grad():
        figures = {"losses": losses, "epoch": state["epoch"], "logits": model(rows[:4, :-1])[:, -1, :4].tolist()}
    fabric.save(folder / "final.ckpt", {"model": model})
    if fabric.is_global_zero:
        write_results(folder, figures, torch.load(folder / "final.ckpt", weights_only=False)["model"])
    if pipelined:
        fabric.strategy.teardown()
