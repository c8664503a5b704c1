"""Measures what an integration adds to a step of `zb.Pipeline` alone, with passes that sleep 10 ms.

`.venv-integrations/bin/python -m benchmarks.frameworks.run`, or `... run torchtitan` to measure one framework.

Two ranks train a Llama of two layers by 1F1B, in turns in a loop of their own and in a framework. Both take the same kind of batches.
The same without zerobubble shows what the framework itself adds: with two replicas, and in torchtitan on one device.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import zerobubble as zb
from benchmarks.frameworks.titan import in_torchtitan
from benchmarks.frameworks.turns import MICROBATCHES, PASS_S, SCHEDULE, STEPS, Job, Pause, Turns
from benchmarks.ranks import machine, show
from zerobubble.integrations.lightning import PipelineStrategy
from zerobubble.integrations.transformers import PipelineTrainer

RESULTS = Path(__file__).with_name("results.json")
PIPELINED = "--plain" not in sys.argv
"""Whether this process is a rank of a pipeline."""


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


def alone() -> Iterator[None]:
    """Runs a step of a plain loop each time."""
    batches = itertools.cycle(DataLoader(data(), batch_size=MICROBATCHES))
    if not PIPELINED:
        yield from alone_in_replicas(batches)
    with zb.Pipeline(zb.split(model()), SCHEDULE, MICROBATCHES, cross_entropy) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        for batch in batches:
            pipe.step({"input_ids": batch["input_ids"]}, batch)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def alone_in_replicas(batches: Iterator[Any]) -> Iterator[None]:
    """Runs a step of a plain loop without zerobubble each time."""
    whole = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    for batch in batches:
        cross_entropy(whole(input_ids=batch["input_ids"]), batch).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def in_trainer() -> Turns:
    """Trains with Trainer."""
    turns = Turns(alone())

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.end_step()

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
        if not PIPELINED:
            Trainer(**given).train()
            return turns
        trainer = PipelineTrainer(**given, schedule=SCHEDULE, num_microbatches=MICROBATCHES)
        trainer.train()
        trainer.close()
    return turns


class Module(lightning.LightningModule):
    """The same in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.model(input_ids=batch["input_ids"]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def in_lightning() -> Turns:
    """Trains with Lightning's Trainer."""
    turns = Turns(alone())

    class Clock(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            turns.end_step()

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[Clock()],
        devices=dist.get_world_size(),
        strategy=PipelineStrategy(schedule=SCHEDULE, num_microbatches=MICROBATCHES) if PIPELINED else "ddp",
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=MICROBATCHES))
    return turns


JOBS: dict[str, Job] = {"Trainer": in_trainer, "Lightning": in_lightning, "torchtitan": in_torchtitan}


def measured(name: str, *, pipelined: bool) -> dict[str, float]:
    """The figures of a framework on its first rank, with or without zerobubble."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    if name == "torchtitan" and not pipelined:
        launcher = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, "-m", "benchmarks.frameworks.run", name, *(["--plain"] * (not pipelined))]
        command.append(f"{folder}/figures.json")
        subprocess.run(command, check=True, cwd=RESULTS.parents[2])
        found: dict[str, float] = json.loads(Path(folder, "figures.json").read_text())
    return found


def row(name: str) -> dict[str, Any]:
    """The figures of a framework."""
    found, own = measured(name, pipelined=True), measured(name, pipelined=False)
    alone, added = found["alone_ms"], found["added_ms"]
    values = {
        "alone_ms": alone,
        "in_framework_ms": alone + added,
        "framework_own_ms": own["added_ms"],
        "ratio": 1 + added / alone,
        "ratio_low": 1 + found["low_ms"] / alone,
        "ratio_high": 1 + found["high_ms"] / alone,
        "ratio_of_integration": 1 + (added - own["added_ms"]) / alone,
        "added_cpu_ms": found["added_cpu_ms"],
        "framework_own_cpu_ms": own["added_cpu_ms"],
    }
    return show({"framework": name, **{key: round(value, 4) for key, value in values.items()}})


def main(names: list[str]) -> None:
    """Measure these frameworks, and write their rows of the results."""
    rows = {old["framework"]: old for old in json.loads(RESULTS.read_text())["rows"]} | {name: row(name) for name in names}
    settings = {"machine": machine(), "schedule": SCHEDULE, "pass_ms": 1e3 * PASS_S, "microbatches": MICROBATCHES}
    results = settings | {"rows": list(rows.values())}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[-1].endswith(".json"):
        torch.set_num_threads(1)
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        figures = JOBS[sys.argv[1]]().figures()
        if os.environ.get("RANK", "0") == "0":
            Path(sys.argv[-1]).write_text(json.dumps(figures))
        if dist.is_initialized():
            dist.destroy_process_group()  # gloo aborts the process, now and then, if a group is still open at its end
    else:
        main(sys.argv[1:] or list(JOBS))
