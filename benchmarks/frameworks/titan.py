"""Steps of torchtitan's `Trainer`, in turns with those of a plain loop over the same model, batches and optimizer.

On two ranks the model is in a pipeline. On one device, without zerobubble, both accumulate the gradients of as many microbatches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import zerobubble as zb
from benchmarks.frameworks.turns import MICROBATCHES, SCHEDULE, STEPS, WARMUP, Pause, Turns
from tests.integrations import titan_on_cpu

SEQUENCE = 16


def in_torchtitan() -> Turns:
    """Trains with `Trainer`."""
    with TemporaryDirectory() as folder:
        turns = Turns(alone(trainer_in(folder)))
        trainer = trainer_in(folder)
        step = trainer.train_step

        def timed(batches: Any) -> None:
            step(batches)
            turns.end_step()

        trainer.train_step = timed
        trainer.train()
        trainer.close()
    return turns


def trainer_in(folder: str) -> Any:
    """A `Trainer` of torchtitan whose layers take the time of a pass."""
    titan_on_cpu.prepare()
    titan_on_cpu.use_texts()
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from zerobubble.integrations.torchtitan import pipelined

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)  # torchtitan makes a process group on one device, too
    ranks = int(os.environ["WORLD_SIZE"])
    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    config = replace(
        config,
        hf_assets_path=titan_on_cpu.write_tokenizer(Path(folder, os.environ["RANK"])),
        dump_folder=folder,
        loss=config.loss.loss_fn,
        metrics=replace(config.metrics, log_freq=STEPS + 1),
        training=replace(
            config.training,
            local_batch_size=MICROBATCHES if ranks > 1 else 1,
            global_batch_size=MICROBATCHES,
            seq_len=SEQUENCE,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=replace(config.parallelism, pipeline_parallel_degree=ranks),
        checkpoint=replace(config.checkpoint, enable=False),
        activation_checkpoint=None,
        debug=replace(config.debug, enable_structured_logging=False),
    )
    trainer = (pipelined(config, SCHEDULE) if ranks > 1 else config).build()
    for part in trainer.model_parts:
        for layer in part.layers.values():
            layer.feed_forward.register_forward_hook(lambda module, arguments, output: Pause.apply(output))
    return trainer


def alone(trainer: Any) -> Iterator[None]:
    """Runs a step of a plain loop over the model of a `Trainer` each time, with one of a few batches."""
    source = trainer.batch_generator(trainer.dataloader)
    batches = []
    for _ in range(WARMUP):
        found = [trainer.post_dataloading_process(*next(source)) for _ in range(MICROBATCHES)]
        batches.append((found, torch.tensor(sum(labels.numel() for _, labels, _ in found))))
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-3, fused=True
    )  # as in torchtitan: without it, each operation on each DTensor is dispatched alone
    backward = in_pipeline if trainer.parallel_dims.pp_enabled else on_one_device
    with ExitStack() as pipes:
        train = backward(trainer, pipes)
        while True:
            for found, count in batches:
                with trainer.train_context():
                    train(found, count)
                optimizer.step()
                optimizer.zero_grad()
                yield


def in_pipeline(trainer: Any, pipes: ExitStack) -> Any:
    """The forward and backward passes of a batch, and clipping, by `zb.Pipeline`."""
    given: dict[str, Tensor] = {}

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return trainer.loss_fn(output, labels, given["count"])[0]

    pipe = pipes.enter_context(zb.Pipeline(trainer.model_parts, SCHEDULE, MICROBATCHES, loss_fn, scale="none"))

    def train(found: list[Any], count: Tensor) -> None:
        given["count"] = count
        inputs = [(tokens,) for tokens, _, _ in found] if trainer.pp_has_first_stage else None
        labels = [labels for _, labels, _ in found] if trainer.pp_has_last_stage else None
        pipe.step(inputs, labels, kwargs=[more for _, _, more in found])
        pipe.clip_grad_norm_(1.0)

    return train


def on_one_device(trainer: Any, pipes: ExitStack) -> Any:
    """The same without zerobubble."""
    (model,) = trainer.model_parts

    def train(found: list[Any], count: Tensor) -> None:
        for tokens, labels, more in found:
            trainer.loss_fn(model(tokens, **more), labels, count)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)

    return train
