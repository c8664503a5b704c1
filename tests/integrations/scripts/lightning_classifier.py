"""A LightningModule as in its tutorials: hyperparameters, torchmetrics, a one-cycle schedule, early stopping, the best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from tests.integrations.scripts.corpus import write_results


class Classifier(lightning.LightningModule):
    def __init__(self, width: int = 24, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )
        self.accuracy = MulticlassAccuracy(num_classes=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y, label_smoothing=0.1)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder: Path, pipelined: bool) -> None:
    """Train four epochs, test the best checkpoint, and predict."""
    lightning.seed_everything(42, workers=True)
    x = torch.rand(160, 12, dtype=torch.float64)
    y = (x[:, :4].sum(-1) * 1.99).long().clamp(max=3)
    train, held_out = random_split(TensorDataset(x, y), [128, 32])
    options: dict[str, Any] = {"devices": 1}
    if pipelined:
        from zerobubble.integrations.lightning import PipelineStrategy

        options = {"devices": 2, "strategy": PipelineStrategy(schedule="zb-v", num_microbatches=4)}
    best = ModelCheckpoint(folder / "checkpoints", monitor="val_loss", save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=4,
        gradient_clip_val=0.5,
        callbacks=[best, EarlyStopping("val_loss", patience=3), LearningRateMonitor()],
        logger=CSVLogger(folder, name="log"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Classifier()
    loaders = DataLoader(train, batch_size=16, shuffle=True), DataLoader(held_out, batch_size=16)
    trainer.fit(module, *loaders)
    figures: dict[str, Any] = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    figures["best"] = float(best.best_model_score)
    figures["validated"] = trainer.validate(module, loaders[1], verbose=False)
    figures["predicted"] = torch.cat(trainer.predict(module, DataLoader(TensorDataset(x[:32]), batch_size=16, collate_fn=stacked))).tolist()
    if trainer.is_global_zero:
        write_results(
            folder, figures, Classifier.load_from_checkpoint(best.best_model_path, map_location="cpu", weights_only=False).state_dict()
        )


def stacked(rows: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([row for (row,) in rows])
