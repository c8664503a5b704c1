"""Trains small networks with Lightning's Trainer on one device, or in a pipeline with `PipelineStrategy`, and writes logs and weights.

`python train_with_lightning.py FOLDER` is the reference. Under torchrun, all ranks form one pipeline, or with `--replicas 2` two.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MaxMetric, Metric, MetricCollection, RunningMean, SumMetric

import zerobubble as zb

STEPS, BATCH, WIDTH, CLASSES, SAMPLES = 30, 8, 16, 5, 72


def network() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


class Accuracy(Metric):
    """The share of right answers."""

    full_state_update = False
    right: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.tensor(0.0), "sum")
        self.add_state("count", torch.tensor(0.0), "sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.right += (logits.argmax(-1) == labels).sum()
        self.count += len(labels)

    def compute(self) -> Tensor:
        return self.right / self.count


def log_on_first_rank(module: lightning.LightningModule, loss: Tensor) -> None:
    """Logs numbers on the first rank alone, in both ways that Lightning offers."""
    if module.trainer.is_global_zero:
        module.log("first_rank", loss)
    log_alone(module, loss)


@rank_zero_only
def log_alone(module: lightning.LightningModule, loss: Tensor) -> None:
    """Logs a number on the first rank."""
    module.log("alone", 2 * loss)


class Classifier(lightning.LightningModule):
    """A network with automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = functional.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, sync_dist=True)
        log_on_first_rank(self, loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def two_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss of two views of each sample, which the network gets one after another."""
    first, second = model(torch.cat((x, x.flip(1)))).chunk(2)
    return functional.cross_entropy(first, y) + functional.mse_loss(first, second)


class TwoViews(Classifier):
    """Two views of each sample."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = two_views(self.model, *batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Evaluated(Classifier):
    """Metrics, a scheduler, validation, and values that `training_step` returns with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy, self.accuracy = Accuracy(), Accuracy()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        logits = self.model(x)
        loss = functional.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log_dict({"train_loss": loss, "mean": logits.detach().mean()})
        self.log("largest", logits.max().detach(), reduce_fx="max")
        self.log("train_accuracy", self.train_accuracy, on_epoch=True)
        right = logits.argmax(-1) == y
        found = {"share": right.double().mean(), "rights": right.sum(), "count": len(x), "number": loss.item(), "labels": y.tolist()}
        return {"loss": loss, "answers": logits.argmax(-1), "found": found}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("answers", outputs["answers"].float().mean())
        found = outputs["found"]
        self.log_dict({name: float(found[name]) for name in ("share", "rights", "count", "number")})
        self.log("labels", float(sum(place * label for place, label in enumerate(found["labels"]))))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", functional.cross_entropy(logits, y), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Classifier):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = two_views(self.model, *batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        self.log("train_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)]


class Layers(lightning.LightningModule):
    """Layers and a metric without a module around them, cut by the forward of the LightningModule. Its step takes the batch apart."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = Accuracy()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x).tanh()).relu()).tanh())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        y = batch.pop()
        logits = self(*batch)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return functional.cross_entropy(logits, y)

    configure_optimizers = Classifier.configure_optimizers

    def model(self, x: Tensor) -> Tensor:
        return self(x)


class Tuned(lightning.LightningModule):
    """A frozen backbone, which a callback unfreezes later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = network()[:5], nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    training_step = Classifier.training_step
    model = Layers.model

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.1, momentum=0.9)


class Tempered(Evaluated):
    """A parameter outside the network, which the loss and the evaluation use."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = functional.cross_entropy(self.model(x) / self.temperature, y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) / self.temperature


class Averaged(Tempered):
    """Its callback finds the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Drawn(Classifier):
    """Draws noise, times and scalars of all generators before it calls the network."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn_like(x) * np.random.beta(2, 2) + random.random()
        times = torch.randint(10, (len(x), 1), generator=self.generator) / 10
        return functional.cross_entropy(self.model(x + noise * times * torch.rand(1, dtype=x.dtype)), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class DrawnByHand(Drawn):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss, optimizer = self.loss(*batch), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss)


class LateByHand(Classifier):
    """Draws a factor for each sample and each step after it calls the network, and compares them with the gradients on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, _ = batch
        output, optimizer = self.model(x), self.optimizers()
        factors = torch.randn(len(x), 1) * random.random() + np.random.rand() * torch.rand(())
        optimizer.zero_grad()
        self.manual_backward((output * factors).mean())
        numbers = [float(factors.mean())]
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            numbers.append(float(self.model[-1].bias.grad.sum()))
        optimizer.step()
        if dist.is_initialized():
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, numbers)
            numbers = [number for of_one in of_ranks for number in of_one]
        self.log("spread", max(numbers) - min(numbers))


class Denoiser(Classifier):
    """Draws noise before it calls the network, named by its argument, and uses it after."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, _ = batch
        noise = torch.randn_like(x) + random.random()
        loss = functional.mse_loss(self.model(input=x + noise), noise[:, :CLASSES])
        self.log("noise", noise.mean())
        return loss


class Skipping(Classifier):
    """Counts all samples, and skips batches: before it calls the network those with a large input, after it those with a loss of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.accuracy, self.num_skipped = SumMetric(), Accuracy(), 0
        self.losses = MetricCollection({"sum": SumMetric(), "max": MaxMetric(), "running": RunningMean(3)})

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        self.seen.update(float(len(x)))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        x = x + 0.1 * torch.rand_like(x)
        if self.global_step == 0 or x.abs().max() > 3.3:
            self.num_skipped += 1
            self.log("skipped", float(self.num_skipped))
            return None
        logits = self.model(x)
        loss = torch.where(x[:, 0] > 2.3, math.nan, functional.cross_entropy(logits, y, reduction="none")).mean()
        self.log("is_finite", loss.isfinite().double(), reduce_fx="min")
        if not loss.isfinite():
            return None
        self.log("train_loss", loss)
        self.losses(loss)
        self.log_dict(self.losses, on_step=True, on_epoch=True)
        self.accuracy.update(logits, y)
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss


class SkippingByHand(Skipping):
    """Skips batches with a large input before the call, and after it those with a loss of NaN, without `manual_backward`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        (x, y), optimizer = batch, self.optimizers()
        self.seen.update(float(len(x)))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        optimizer.zero_grad()
        if batch_idx == 0 or x.abs().max() > 3.3:
            self.num_skipped += 1
            self.log("skipped", float(self.num_skipped))
            return
        loss = torch.where(x[:, 0] > 2.3, math.nan, functional.cross_entropy(self.model(x), y, reduction="none")).mean()
        self.log("is_finite", loss.isfinite().double(), reduce_fx="min")
        if loss.isfinite():
            self.manual_backward(loss)
            optimizer.step()
            self.log("train_loss", loss)


class SkippingAlone(Classifier):
    """Skips batches on the first rank."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return None if dist.get_rank() == 0 and batch_idx == 1 else super().training_step(batch, batch_idx)


class Case(NamedTuple):
    """A training run: its module, arguments of Trainer, and the order of the data."""

    module: type[lightning.LightningModule]
    arguments: Callable[[Path], dict[str, Any]] = lambda folder: {}
    order: str = "random"
    validates: bool = False


def evaluated(folder: Path) -> dict[str, Any]:
    saving = ModelCheckpoint(folder / "checkpoints", "{step}", monitor="val_loss", save_top_k=-1)
    return {
        "val_check_interval": 6,
        "check_val_every_n_epoch": None,
        "enable_checkpointing": True,
        "logger": CSVLogger(folder, name="csv", version="0"),
        "log_every_n_steps": 1,
        "callbacks": [saving, LearningRateMonitor("step"), EarlyStopping("val_loss", patience=50)],
    }


def saved(folder: Path) -> dict[str, Any]:
    return {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(folder, "{step}", every_n_train_steps=9, save_top_k=-1)]}


def tuned(folder: Path) -> dict[str, Any]:
    callbacks = [
        BackboneFinetuning(1, lambda epoch: 1.5),
        StochasticWeightAveraging(0.05, 2, 1),
        GradientAccumulationScheduler({0: 1, 2: 2}),
    ]
    return {"precision": "64-true", "callbacks": callbacks, "max_epochs": 4}


def averaged(folder: Path) -> dict[str, Any]:
    saving = ModelCheckpoint(folder / "checkpoints", monitor="val_loss", save_weights_only=True)
    watching = [LearningRateFinder(num_training_steps=10), Timer("00:01:00:00"), DeviceStatsMonitor(), ModelSummary()]
    callbacks = [*watching, EMAWeightAveraging(decay=0.9, update_every_n_steps=2), saving]
    return {**evaluated(folder), "precision": "64-true", "callbacks": callbacks}


CASES = {
    "plain": Case(Classifier),
    "accumulation": Case(TwoViews, lambda folder: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, order="distributed"),
    "manual": Case(Manual, order="distributed"),
    "evaluation": Case(Evaluated, evaluated, validates=True),
    "layers": Case(Layers, lambda folder: {"precision": "64-true"}),
    "outside": Case(Tempered, evaluated, validates=True),
    "bf16": Case(Classifier, lambda folder: {"precision": "bf16-mixed"}),
    "saved": Case(Classifier, saved, order="distributed"),
    "drawn": Case(Drawn, lambda folder: {"precision": "64-true"}),
    "drawn by hand": Case(DrawnByHand, lambda folder: {"precision": "64-true"}),
    "skipping": Case(Skipping, lambda folder: {"precision": "64-true"}),
    "skipping accumulated": Case(Skipping, lambda folder: {"precision": "64-true", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "skipping by hand": Case(SkippingByHand, lambda folder: {"precision": "64-true"}),
    "tuned": Case(Tuned, tuned),
    "averaged": Case(Averaged, averaged, validates=True),
}


OTHERS = {"late by hand": Case(LateByHand), "skipping alone": Case(SkippingAlone)}
"""Cases that draw other numbers than one device, or are errors."""


class Writer(BasePredictionWriter):
    """Writes predictions as in Lightning's documentation: a file for each rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        torch.save(prediction, self.folder / f"predicted-{batch_idx}-{trainer.global_rank}.pt")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        trainer.strategy.barrier()
        torch.save(torch.cat(predictions), self.folder / f"predicted-{trainer.global_rank}.pt")


class WeightsInUse(Callback):
    """Uses the weights of the module before training, in the middle, and at its end on the first rank alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_refused = False

    def on_fit_start(self, trainer: lightning.Trainer, module: Any) -> None:
        with zb.gathered(module):
            copy.deepcopy(module.state_dict())

    on_sanity_check_start = on_train_start = on_fit_start

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 12 or trainer.fit_loop.epoch_loop._should_accumulate():
            return
        try:
            module.state_dict()
        except zb.InputError:
            self.is_refused = True
        with zb.gathered(module, rank=0) if "WORLD_SIZE" in os.environ else nullcontext():
            if trainer.is_global_zero:
                torch.save(copy.deepcopy(module.state_dict()), self.folder / "step12.pt")
        trainer.save_checkpoint(self.folder / "step12.ckpt")

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            torch.save(module.state_dict(), self.folder / "end.pt")


SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}


class Rows(Callback):
    """Keeps what each step has logged. With the fault "kill" or "terminate", the last rank gets this signal in the third step."""

    def __init__(self, fault: str | None) -> None:
        self.rows: list[dict[str, float]] = []
        self.fault = fault
        self.signal = SIGNALS.get(fault or "")

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if outputs else torch.tensor(0.0)
        if trainer.global_step == 3 and (self.fault == "raise everywhere" or (trainer.is_global_zero and self.fault == "raise")):
            raise OSError("no space left")
        if trainer.global_step == 3 and trainer.is_global_zero and self.fault == "stop":
            trainer.should_stop = True
        self.rows.append({"loss": float(loss), **{name: float(value) for name, value in trainer.callback_metrics.items()}})

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.signal is not None and trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), self.signal)

    def on_exception(self, trainer: lightning.Trainer, module: Any, exception: BaseException) -> None:
        print(f"{type(exception).__name__} after {trainer.global_step} steps", flush=True)


def loader(count: int, seed: int, replicas: int, order: str) -> DataLoader[Any]:
    """Data in an order of `torch.utils.data`: "random", "sequential", or that of the sampler that Lightning makes for replicas."""
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(count, WIDTH, generator=generator), torch.randint(CLASSES, (count,), generator=generator))
    sampler = DistributedSampler(data, 1, 0) if order == "distributed" and replicas == 1 else None
    return DataLoader(data, BATCH // replicas, shuffle=order == "random", sampler=sampler)


def train(folder: Path, name: str, replicas: int = 1, resume: str | None = None, fault: str | None = None) -> None:
    """Trains a case: in a pipeline under torchrun, else on one device."""
    case, ranks = {**CASES, **OTHERS}[name], int(os.environ.get("WORLD_SIZE", 0))
    lightning.seed_everything(0, verbose=False)
    strategy: dict[str, Any] = {"devices": 1}
    if ranks:
        from zerobubble.integrations.lightning import PipelineStrategy

        strategy = {"devices": ranks, "strategy": PipelineStrategy("zb-h1", 4, data_parallel_size=replicas)}
    rows = Rows(fault)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    settings = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", **quiet, **case.arguments(folder)}
    uses = WeightsInUse(folder)
    settings["callbacks"] = [*settings.get("callbacks", []), rows, uses, Writer(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    trainer = lightning.Trainer(max_steps=STEPS, default_root_dir=folder, **settings, **strategy)
    module, train_data = case.module(), loader(SAMPLES, trainer.global_rank if fault == "data" else 0, replicas, case.order)
    val_data = loader(20, 1, replicas, "sequential")
    trainer.fit(module, train_data, val_data if case.validates else None, ckpt_path=resume)
    found: dict[str, Any] = {"rows": rows.rows, "refused": uses.is_refused}
    if case.validates:
        found["validated"] = trainer.validate(module, val_data, verbose=False)
        found["predicted"] = torch.cat(trainer.predict(module, val_data)).flatten().tolist()
    if trainer.is_global_zero:
        (folder / "log.json").write_text(json.dumps(found))
        torch.save(module.state_dict(), folder / "weights.pt")


def main() -> None:
    """Train each case and write its log and weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--resume", help="a checkpoint from which the cases go on")
    faults = [*SIGNALS, "data", "raise", "raise everywhere", "stop"]
    parser.add_argument("--fault", choices=faults, help="a fault of one rank in the third step")
    parser.add_argument("--retry", action="store_true", help="train first with the errors of one rank, of all, and of one again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    errors: list[Exception] = []
    for name in options.cases:
        for fault in ("raise", "raise everywhere", "raise") if options.retry else ():
            try:
                train(options.folder / name, name, options.replicas, fault=fault)
            except (OSError, zb.PipelineError) as error:
                errors.append(error)  # which keeps the groups of torch
        train(options.folder / name, name, options.replicas, options.resume, options.fault)
    assert len(errors) == 3 * options.retry * len(options.cases)


if __name__ == "__main__":
    main()
