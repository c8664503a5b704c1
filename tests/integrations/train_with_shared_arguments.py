"""Trains networks with arguments that all samples share, with Lightning and Fabric, and writes what a user sees.

`train_with_shared_arguments.py FOLDER FRAMEWORK CASE` on one device, or on the ranks of a pipeline.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
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

SAMPLES, BATCH, LENGTH, WIDTH = 24, 8, 8, 6


class Network(nn.Module):
    """Attends to the rows of a table of any length, then among the positions of a sequence that a mask allows."""

    def __init__(self, head: Callable[[Tensor], object] = lambda weight: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            head(self.head.weight)

    def forward(self, x: Tensor, table: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        if table is not None:
            x = x + (x @ table.T).softmax(-1) @ table
        if mask is not None:
            x = x + (x @ x.mT + mask).softmax(-1) @ x
        return self.head(x)


def table_of(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def causal(length: int) -> Tensor:
    return torch.full((length, length), -1e9, dtype=torch.float64).triu(1)


def own_masks(x: Tensor) -> Tensor:
    """A mask for each sample, from its values."""
    return torch.where(x[:, :1, 0, None] > 0, causal(x.shape[1]), torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype))


CASES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "table": lambda x: (x, table_of(BATCH)),
    "other table": lambda x: (x, table_of(5)),
    "mask": lambda x: (x, table_of(3), causal(LENGTH)),
    "masks of samples": lambda x: (x, table_of(BATCH), own_masks(x)),
}
"""The arguments of the network for a batch."""


class Module(lightning.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.network, self.arguments, self.rows = Network(), CASES[case], []

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.network(*self.arguments(batch["x"])), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch["x"]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=len(batch["x"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(*self.arguments(batch["x"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validated(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def data(samples: int = SAMPLES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return DataLoader([{"x": a, "y": b} for a, b in zip(x, y, strict=True)], BATCH)


def with_trainer(folder: Path, case: str, *, pipelined: bool) -> dict[str, Any]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}

    def trainer(**options: Any) -> lightning.Trainer:
        given = {"strategy": PipelineStrategy("zb-h1", 4)} if pipelined else {}
        return lightning.Trainer(
            accelerator="cpu", devices=2 if pipelined else 1, precision="64-true", default_root_dir=folder, **options, **given, **quiet
        )

    lightning.seed_everything(0, verbose=False)
    module, validated = Module(case), Validated()
    (before,) = trainer().validate(module, data(), verbose=False)
    fitting = trainer(max_epochs=2, callbacks=[validated])
    fitting.fit(module, data(), data())
    (tested,) = fitting.test(module, data(12), verbose=False)
    predicted = [float(part.abs().sum()) for part in fitting.predict(module, data(12))]
    weights = [float(p.sum()) for p in module.parameters()]
    return {"before": list(before.values()), "losses": module.rows, "validated": validated.losses, "tested": list(tested.values()),
            "predicted": predicted, "weights": weights}  # fmt: skip


def with_fabric(folder: Path, case: str, *, pipelined: bool) -> dict[str, Any]:
    given = {"strategy": FabricStrategy("zb-h1", 4, functional.mse_loss)} if pipelined else {}
    fabric = lightning.Fabric(accelerator="cpu", devices=2 if pipelined else 1, **given)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    network = Network().double()
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))

    def evaluated() -> list[float]:
        with torch.no_grad():
            return [float(model(*CASES[case](batch["x"])).abs().sum()) for batch in data(12)]

    before, losses = evaluated(), []
    for batch in list(data()) * 2:
        optimizer.zero_grad()
        if pipelined:
            loss = fabric.strategy.step(CASES[case](batch["x"]), batch["y"])
        else:
            loss = functional.mse_loss(model(*CASES[case](batch["x"])), batch["y"])
            fabric.backward(loss)
        losses.append(float(loss))
        optimizer.step()
    after = evaluated()
    with zb.gathered(network) if pipelined else torch.no_grad():
        weights = [float(p.sum()) for p in network.parameters()]
    if pipelined:
        fabric.strategy.teardown()
    return {"before": before, "losses": losses, "after": after, "weights": weights}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, framework, case = Path(sys.argv[1]), *sys.argv[2:]
    run = {"lightning": with_trainer, "fabric": with_fabric}[framework]
    found = run(folder, case, pipelined="RANK" in os.environ)
    (folder / f"{os.environ.get('RANK', 'alone')}.json").write_text(json.dumps(found))
