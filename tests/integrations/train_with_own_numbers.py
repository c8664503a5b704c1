"""Trains networks that return numbers without dimensions, such as their own loss, with Lightning and Fabric, and writes what a user sees.

`train_with_own_numbers.py FOLDER CASE SCHEDULE` on one device, or on the ranks of a pipeline.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import zerobubble as zb
from zerobubble.integrations.lightning import PipelineStrategy
from zerobubble.integrations.lightning.fabric import PipelineStrategy as FabricStrategy

IGNORED = -100


class Network(nn.Module):
    """Returns the loss over labels that count, logits, and a mean over samples."""

    def __init__(self, reduction: str = "mean", dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.head, self.dropout, self.reduction = nn.Linear(8, 3), nn.Dropout(dropout), reduction

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        logits = self.head(self.dropout(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=self.reduction)
        return loss, logits, x.square().mean()


class Module(lightning.LightningModule):
    """Trains with one of these numbers or both, and logs them as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.network, self.scale = Network(**options), 0.1 if options.get("reduction") == "sum" else 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _, size = self.network(batch["x"], labels=batch["y"])
        assert loss.shape == size.shape == ()
        self.log_dict({"loss": loss, "size": size}, on_step=False, on_epoch=True, batch_size=len(batch["x"]))
        return self.scale * loss.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, _, size = self.network(batch["x"], labels=batch["y"])
        self.log_dict({"val_loss": loss, "val_mean": loss.mean(), "val_size": size.sum()}, batch_size=len(batch["x"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Both(Module):
    """A loss from logits, and the number of the network as a penalty."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, logits, size = self.network(batch["x"], labels=batch["y"])
        return functional.cross_entropy(logits[:, 0], batch["y"][:, 0]) + 0.1 * size


class ByHand(Module):
    """Manual optimization, where every rank gets the numbers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def count(batch: Any) -> Tensor:
    """The labels that count."""
    return (batch["y"] != IGNORED).sum()


CASES: dict[str, tuple[type[Module], dict[str, Any], Any]] = {
    "a mean over labels": (Module, {}, count),
    "a sum": (Module, {"reduction": "sum"}, "sum"),
    "a mean over samples": (Both, {}, None),
    "by hand": (ByHand, {}, count),
    "dropout": (Module, {"dropout": 0.5}, count),
    "without loss_weight": (Module, {}, None),
    "dropout without loss_weight": (Module, {"dropout": 0.5}, None),
    "a mean instead of a sum": (Module, {"reduction": "sum"}, None),
}
FABRIC = {"fabric": count, "fabric without loss_weight": None}


class Losses(Callback):
    """The losses that `on_train_batch_end` gets."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def data(samples: int = 16) -> DataLoader[Any]:
    """Batches of 8 samples, with 1 to 5 labels that count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, 8, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (samples, 6), generator=generator)
    for row in range(samples):
        y[row, 1 + row % 5 :] = IGNORED
    return DataLoader([{"x": a, "y": b} for a, b in zip(x, y, strict=True)], 8)


def with_trainer(folder: Path, case: str, schedule: str, *, pipelined: bool) -> dict[str, Any]:
    kind, options, weight = CASES[case]
    strategy = {"strategy": PipelineStrategy(schedule, 4, loss_weight=weight)} if pipelined else {}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.seed_everything(0, verbose=False)
    losses, module = Losses(), kind(**options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2 if pipelined else 1,
        precision="64-true",
        max_epochs=3,
        default_root_dir=folder,
        callbacks=[losses],
        num_sanity_val_steps=0,
        **strategy,
        **quiet,
    )
    trainer.fit(module, data(), data(13))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": losses.losses, "metrics": metrics, "weights": [float(p.sum()) for p in module.parameters()]}


def with_fabric(case: str, schedule: str, *, pipelined: bool) -> dict[str, Any]:
    weight = FABRIC[case] and (lambda targets: FABRIC[case]({"y": targets}))

    def own_loss(output: Any, targets: Tensor) -> Tensor:
        return output[0].mean()

    strategy = {"strategy": FabricStrategy(schedule, 4, own_loss, loss_weight=weight)} if pipelined else {}
    fabric = lightning.Fabric(accelerator="cpu", devices=2 if pipelined else 1, **strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    network = Network().double()
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
    losses, evaluated = [], []
    for batch in list(data()) * 3:
        inputs = {"x": batch["x"], "labels": batch["y"]}
        optimizer.zero_grad()
        if pipelined:
            losses.append(float(fabric.strategy.step(inputs, batch["y"])))
        else:
            loss = own_loss(model(**inputs), batch["y"])
            fabric.backward(loss)
            losses.append(float(loss))
        optimizer.step()
        with torch.no_grad():
            loss, _, size = model(**inputs)
            assert loss.shape == size.shape == ()
            evaluated += [float(loss), float(size.mean())]
    with zb.gathered(network) if pipelined else torch.no_grad():
        weights = [float(p.sum()) for p in network.parameters()]
    if pipelined:
        fabric.strategy.teardown()
    return {"losses": losses, "evaluated": evaluated, "weights": weights}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, case, schedule = Path(sys.argv[1]), *sys.argv[2:]
    given = {"pipelined": "RANK" in os.environ}
    found = with_fabric(case, schedule, **given) if case in FABRIC else with_trainer(folder, case, schedule, **given)
    (folder / f"{os.environ.get('RANK', 'alone')}.json").write_text(json.dumps(found))
