"""Measures what an integration adds to a step of `zb.Pipeline` alone, with passes that sleep 10 ms.

`.venv-integrations/bin/python -m benchmarks.frameworks.run`

Two ranks train a Llama of two layers by 1F1B, in turns in a loop of their own, in Trainer and in Lightning. Each takes the same batches.
The same on one device, without zerobubble, shows what the framework itself adds.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import zerobubble as zb
from benchmarks.ranks import machine, show
from zerobubble.integrations.lightning import PipelineStrategy
from zerobubble.integrations.transformers import PipelineTrainer

RESULTS = Path(__file__).with_name("results.json")
PASS_S, MICROBATCHES, STEPS, TURNS = 0.01, 8, 20, 2
SCHEDULE = "1f1b"


class Pause(torch.autograd.Function):
    """Identity that sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(PASS_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        time.sleep(PASS_S)
        return dx


class Paused(nn.Module):
    """A module with a pause after it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return Pause.apply(self.module(x))


def model() -> LlamaForCausalLM:
    """A Llama whose layers take the time of a pass."""
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False)
    )
    for layer in made.model.layers:
        layer.mlp = Paused(layer.mlp)
    return made


def data() -> list[dict[str, Tensor]]:
    """Samples for all steps."""
    ids = torch.randint(0, 64, (MICROBATCHES * STEPS, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def cross_entropy(output: Any, targets: Any) -> Tensor:
    """The loss of the next token."""
    return functional.cross_entropy(output["logits"][:, :-1].flatten(0, 1), targets["labels"][:, 1:].flatten())


def alone() -> list[float]:
    """The seconds of each step of a plain loop."""
    if not dist.is_initialized():
        return alone_on_one_device()
    with zb.Pipeline(zb.split(model()), SCHEDULE, MICROBATCHES, cross_entropy) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        times = [time.perf_counter()]
        for batch in DataLoader(data(), batch_size=MICROBATCHES):
            pipe.step({"input_ids": batch["input_ids"]}, batch)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
    return differences(times)


def alone_on_one_device() -> list[float]:
    """The seconds of each step of a plain loop without zerobubble."""
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    times = [time.perf_counter()]
    for batch in DataLoader(data(), batch_size=MICROBATCHES):
        cross_entropy(whole(input_ids=batch["input_ids"]), batch).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    return differences(times)


def in_trainer() -> list[float]:
    """The seconds of each step of Trainer."""
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=MICROBATCHES,
            max_steps=STEPS,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        given = {"model": model(), "args": settings, "train_dataset": data(), "callbacks": [Clock()]}
        if not dist.is_initialized():
            Trainer(**given).train()
            return differences(times)
        trainer = PipelineTrainer(**given, schedule=SCHEDULE, num_microbatches=MICROBATCHES)
        trainer.train()
        trainer.close()
    return differences(times)


class Module(lightning.LightningModule):
    """The same in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.model(input_ids=batch["input_ids"]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def in_lightning() -> list[float]:
    """The seconds of each step of Lightning's Trainer."""
    times: list[float] = []

    class Clock(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            times.append(time.perf_counter())

    ranks: dict[str, Any] = {"devices": 1}
    if dist.is_initialized():
        ranks = {"devices": dist.get_world_size(), "strategy": PipelineStrategy(schedule=SCHEDULE, num_microbatches=MICROBATCHES)}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[Clock()],
        **ranks,
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=MICROBATCHES))
    return differences(times)


def differences(times: list[float]) -> list[float]:
    """The seconds between times, without the first steps."""
    return [after - before for before, after in itertools.pairwise(times)]


def measure(name: str) -> tuple[float, float]:
    """The median milliseconds of a step alone and in a framework, in turns, on this rank."""
    torch.set_num_threads(1)
    ours, theirs = [], []
    for _ in range(TURNS):
        if "RANK" in os.environ and not dist.is_initialized():
            dist.init_process_group("gloo")
        ours += alone()
        theirs += JOBS[name]()
    return 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs)


JOBS: dict[str, Callable[[], list[float]]] = {"Trainer": in_trainer, "Lightning": in_lightning}


def main() -> None:
    """Measure each framework on two ranks and on one device, and write the results."""
    rows = []
    for name in JOBS:
        found = []
        for launcher in (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], []):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, *launcher, "-m", "benchmarks.frameworks.run", name, f"{folder}/times.json"]
                subprocess.run(command, check=True, cwd=RESULTS.parents[2])
                found.append(json.loads(Path(folder, "times.json").read_text()))
        (ours, theirs), (alone_there, in_framework_there) = found
        own = in_framework_there - alone_there
        row = {"alone_ms": ours, "in_framework_ms": theirs, "framework_own_ms": own}
        row |= {"ratio": theirs / ours, "ratio_of_integration": (theirs - own) / ours}
        rows.append(show({"framework": name, **{key: round(value, 4) for key, value in row.items()}}))
    results = {"machine": machine(), "schedule": SCHEDULE, "pass_ms": 1e3 * PASS_S, "microbatches": MICROBATCHES, "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        times = measure(sys.argv[1])
        if os.environ.get("RANK", "0") == "0":
            Path(sys.argv[2]).write_text(json.dumps(times))
    else:
        main()
