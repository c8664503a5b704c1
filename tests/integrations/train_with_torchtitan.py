"""Trains small models of torchtitan with its real `Trainer`, on one CPU rank or in a pipeline under torchrun, and writes what it logs.

Each of `CASES` is one run. All of them start with the same weights, given by name, and read the same texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.integrations import titan_on_cpu

titan_on_cpu.prepare()

from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from zerobubble.integrations.torchtitan import pipelined  # noqa: E402

STEPS, SAVED_AT = 20, 10
SEQUENCE, BATCH = 16, 8
CASES: dict[str, dict[str, Any]] = {
    "zb-v": {},
    "zb-h1": {"schedule": "zb-h1"},
    "interleaved": {"schedule": "interleaved-1f1b"},
    "whole loss": {"whole_loss": True, "describe": True, "steps": 6},
    "accumulation": {"global_batch": 2 * BATCH, "steps": 6},
    "checkpointed": {"checkpointed": True, "steps": 6},
    "compiled": {"compiled": True, "whole_loss": True, "steps": 3},
    "bf16": {"precision": "bfloat16", "steps": 6},
    "validated": {"validate": True, "steps": 10},
    "saved": {"save": SAVED_AT},
    "resumed": {"save": 1000, "load": SAVED_AT, "folder": "saved"},
    "all layers": {"layers": None, "steps": 3},
    "qwen3": {"config": "qwen3_moe_debug", "steps": 3},
    "deepseek_v3": {"config": "deepseek_v3_debugmodel", "steps": 3},
    "sharded": {"steps": 30, "eps": 1e-3, "weights": True},
    "tensor parallel": {"steps": 6, "sizes": {"tensor": 2}},
    "context parallel": {"schedule": "zb-h1", "steps": 3, "sequence": 256, "sizes": {"context": 2}},
    "experts": {"config": "qwen3_moe_debug", "steps": 3, "sizes": {"expert": 2}},
    "experts of deepseek_v3": {"config": "deepseek_v3_debugmodel", "steps": 3, "sizes": {"expert": 2}},
    "killed": {"schedule": "zb-h1", "killed": True},
}
"""Settings of each run by its name; see `config_of`."""
MODELS = ("llama3", "qwen3", "deepseek_v3")
LAYERS, EXPERT_WIDTH = 2, 32
"""Those of torchtitan's debug models, six layers and experts of width 768, take 30 s of CPU for three steps."""


def set_weights(trainer: Trainer) -> None:
    """Gives every parameter values that follow from its name, whatever rank holds it."""
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            own = name.replace("_checkpoint_wrapped_module.", "")
            generator = torch.Generator().manual_seed(zlib.crc32(own.encode()))
            values = torch.randn(parameter.shape, generator=generator) * 0.02 + (parameter.ndim == 1)
            with torch.no_grad():
                divided = isinstance(parameter, DTensor)
                parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements) if divided else values)


def config_of(folder: Path, dump: Path, replicas: int, settings: dict[str, Any]) -> Any:
    """The configuration of a run."""
    replace = dataclasses.replace
    name = settings.get("config", "llama3_debugmodel")
    (model,) = (each for each in MODELS if name.startswith(each))
    config = getattr(import_module(f"torchtitan.models.{model}.config_registry"), name)()
    sizes: dict[str, int] = settings.get("sizes", {}) if int(os.environ["WORLD_SIZE"]) > 1 else {}
    ranks = int(os.environ["WORLD_SIZE"]) // replicas // sizes.get("tensor", 1) // sizes.get("context", 1)
    save = settings.get("save", 0)
    config = replace(
        config,
        hf_assets_path=titan_on_cpu.write_tokenizer(folder / f"tokenizer-{os.environ['RANK']}"),
        dump_folder=str(dump),
        metrics=replace(config.metrics, log_freq=1),
        optimizer=default_adamw(eps=settings.get("eps", 1e-8)),
        training=replace(
            config.training,
            local_batch_size=BATCH // replicas,
            global_batch_size=settings.get("global_batch", BATCH),
            seq_len=settings.get("sequence", SEQUENCE),
            steps=settings.get("steps", STEPS),
            mixed_precision_param=settings.get("precision", "float32"),
            disable_cuda_graphs=True,
        ),
        parallelism=replace(
            config.parallelism,
            pipeline_parallel_degree=ranks,
            data_parallel_shard_degree=replicas,
            **{f"{name}_parallel_degree": size for name, size in sizes.items()},
            # FSDP2 of torch 2.13 does not support spmd_types with more ranks than those of a pipeline.
            spmd_backend="partial_dtensor" if replicas > 1 or sizes else "spmd_types",
        ),
        compile=replace(config.compile, enable=settings.get("compiled", False), backend="aot_eager"),
        checkpoint=replace(config.checkpoint, enable=save > 0, interval=max(save, 1), load_step=settings.get("load", -1)),
        activation_checkpoint=config.activation_checkpoint if settings.get("checkpointed") else None,
        validator=replace(config.validator, enable=settings.get("validate", False), freq=5, steps=2),
        debug=replace(config.debug, enable_structured_logging=False, seed=1),
    )
    if layers := settings.get("layers", LAYERS):
        del config.model_spec.model.layers[layers:]
    for layer in config.model_spec.model.layers:
        if getattr(layer, "moe", None) is not None:
            layer.moe.routed_experts.inner_experts.hidden_dim = EXPERT_WIDTH
    if settings.get("whole_loss"):
        config = replace(config, loss=config.loss.loss_fn)
    return pipelined(config, settings.get("schedule", "zb-v"), **settings.get("options", {})) if ranks > 1 else config


def run(folder: Path, name: str, replicas: int, dump: Path) -> None:
    """Runs a case, and writes the rows of its log on a rank that knows the loss."""
    settings = CASES[name]
    trainer = config_of(folder, dump / settings.get("folder", name), replicas, settings).build()
    set_weights(trainer)
    rows: list[dict[str, float]] = []
    metrics = trainer.metrics_processor
    log, log_validation = metrics.log, metrics.log_validation

    def keep(step: int, loss: float, most: float, norm: float, **more: Any) -> None:
        rows.append({"step": step, "loss": loss, "norm": norm})
        log(step, loss, most, norm, **more)
        if settings.get("killed") and step == 2 and trainer.parallel_dims.world_size - 1 == int(os.environ["RANK"]):
            os._exit(3)

    def keep_validation(loss: float, step: int, **more: Any) -> None:
        rows.append({"step": step, "eval": loss})
        log_validation(loss, step, **more)

    metrics.log, metrics.log_validation = keep, keep_validation
    given: dict[str, Any] = {}
    if settings.get("describe") and trainer.parallel_dims.pp_enabled:
        step = trainer.pp_schedule.step
        trainer.pp_schedule.step = lambda **arguments: (given.update(arguments), step(**arguments))[1]
    trainer.train()
    if given:
        reports = trainer.pp_schedule.pipeline.describe(given["arg_mbs"], given["target_mbs"], kwargs=given["kwarg_mbs"])
        (folder / f"{name} split.json").write_text(json.dumps([report.share for report in reports]))
    if settings.get("weights"):
        weights = {key: value for part in trainer.model_parts for key, value in part.named_parameters()}
        whole = {key: value.full_tensor() if isinstance(value, DTensor) else value.detach() for key, value in weights.items()}
        torch.save(whole, folder / f"{name} {os.environ['RANK']}.pt")
    if not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage:
        (folder / f"{name}.json").write_text(json.dumps(rows))
    trainer.close()


def main() -> None:
    """Run the cases one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--dump", type=Path, help="where checkpoints are, if not in the folder")
    options = parser.parse_args()
    titan_on_cpu.use_texts()
    for name in options.cases:
        run(options.folder, name, options.replicas, options.dump or options.folder)
        gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
