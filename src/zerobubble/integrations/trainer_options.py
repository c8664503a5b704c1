"""Lists the options of Trainer that a pipeline does not support."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerobubble.runtime.frameworks import ALIKE


def wrong_options(args: Any, model: nn.Module, mesh: DeviceMesh | None) -> list[str]:
    """Returns each option with what to set instead, for the arguments, the model and the mesh of a trainer."""
    faults = []
    if not dist.is_initialized():
        faults.append("one process: start the script with `torchrun --nproc-per-node 2`, a process for each rank")
    wrong = {
        "auto_find_batch_size": (args.auto_find_batch_size, "choose per_device_train_batch_size"),
        "fsdp": (args.fsdp, 'give a mesh with "dp" in pipeline_options'),
        "deepspeed": (args.deepspeed, "leave it out; the pipeline needs no engine"),
        "fp16": (args.fp16, "use bf16=True"),
        "torch_compile": (
            args.torch_compile,
            'give pipeline_options={"split": "compiled", "timeout": 1800}, above the seconds of a compilation',
        ),
        "parallelism_config": (args.parallelism_config, "give a mesh in pipeline_options"),
        "dispatch_batches": (args.accelerator_config.dispatch_batches, "leave it out; every rank loads its own batches"),
        "split_batches": (args.accelerator_config.split_batches, "leave it out; per_device_train_batch_size is that of a replica"),
    }
    faults += [f"{name}={value!r}: {remedy}" for name, (value, remedy) in wrong.items() if value]
    if args.n_gpu > 1:
        faults.append(f"{args.n_gpu} GPUs in one process: start one process per GPU with torchrun")
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        faults.append(f"a model with a device_map of {len(devices)} devices: load it on one, or without a device_map")
    return faults if mesh is None else faults + _wrong_with_mesh(args, mesh)


def _wrong_with_mesh(args: Any, mesh: DeviceMesh) -> list[str]:
    faults, names = [], mesh.mesh_dim_names or ()
    if not args.accelerator_config.even_batches and math.prod(mesh[name].size() for name in names if name in ALIKE) > 1:
        faults.append("even_batches=False: leave it out; all replicas train and evaluate equally many batches")
    if unknown := [name for name in names if name not in ("pp", *ALIKE)]:
        faults.append(f"a mesh along {', '.join(unknown)}: Trainer's models are only replicated, along {', '.join(sorted(ALIKE))}")
    return faults
