"""Refuses what a pipeline cannot train. Each function raises one `InputError` with all faults and their remedies."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DistributedSampler

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.integrations.lightning.runner import TWO_DIRECTIONS
from zerobubble.integrations.lightning.settings import Settings
from zerobubble.ir import Schedule
from zerobubble.planning import Plan
from zerobubble.runtime.frameworks import PipelineOptions, dependency_faults, faults_in, schedule_for, takes_rank_for_replica
from zerobubble.units import counted

OWN = {
    "build_or_modules": "the strategy cuts the network; name it as network=",
    "loss_fn": "training_step returns the loss",
    "device": "the accelerator of the Trainer or of Fabric says where stages are",
    "mesh": "give data_parallel_size=",
    "group": "all ranks of the Trainer train together",
    "main_grad": "optimizers of Lightning read .grad",
    "survive": "Lightning's loops need all of their ranks",
    "order_by": "batches are cut in the order of their samples",
    "tied": "tied parameters of the network are found automatically",
}
"""Options of `zb.Pipeline` that the strategy sets itself or does not support, and why."""
FABRIC_PRECISIONS = ("32-true", "bf16-mixed")
PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


def refuse(faults: list[str]) -> None:
    """Raises `InputError` with all `faults`, if there are any."""
    if faults:
        raise InputError("PipelineStrategy cannot train with {faults}", faults="; ".join(faults))


def refuse_options(settings: Settings, data_parallel_size: int) -> None:
    """Refuses wrong options of the strategy itself."""
    options = settings.pipeline
    known = {name: parameter for name, parameter in _defaults().items() if name not in OWN}
    found = [f"{name}: {OWN[name]}" for name in options if name in OWN]
    unknown = [name for name in options if name not in OWN and name not in known]
    if unknown:
        others = sorted(known.keys() - {"schedule", "num_microbatches", "loss_weight"})
        found.append(f"{', '.join(unknown)}: options are {', '.join(others)}, and cuts, inside_blocks and memory")
    if not isinstance(settings.num_microbatches, int) or settings.num_microbatches < 1:
        found.append(f"num_microbatches={settings.num_microbatches!r}: give an integer of at least 1")
    if not isinstance(data_parallel_size, int) or data_parallel_size < 1:
        found.append(f"data_parallel_size={data_parallel_size!r}: give the number of replicas, at least 1")
    given = {name: options.get(name, default) for name, default in known.items()}
    given |= {
        "schedule": settings.schedule,
        "num_microbatches": settings.num_microbatches,
        "loss_weight": None if settings.loss_weight == "sum" else settings.loss_weight,
    }
    # Placeholders of the right types: the strategy sets both.
    arguments = {**_defaults(), **given, "build_or_modules": [], "loss_fn": refuse_options}
    made = PipelineOptions(**arguments)
    found += [fault for fault in (faults_in(made), dependency_faults(made)) if fault]
    refuse(found)


def _defaults() -> dict[str, Any]:
    """Returns the options of `zb.Pipeline` with their defaults; None for options without a default."""
    parameters = list(inspect.signature(zb.Pipeline.__init__).parameters.values())[1:]
    return {each.name: None if each.default is each.empty else each.default for each in parameters}


def refuse_trainer(strategy: Any, settings: Settings, data_parallel_size: int) -> None:
    """Refuses unsuitable arguments of `Trainer`."""
    found = _rank_faults(strategy, settings, data_parallel_size)
    precision = strategy.precision_plugin
    if type(precision) not in PRECISIONS:
        found.append(f"the precision plugin {type(precision).__name__}: use precision='32-true', '64-true', 'bf16-true' or 'bf16-mixed'")
    elif getattr(precision, "precision", "") in ("16-mixed", "16-true"):
        found.append(f"precision={precision.precision!r}: use 'bf16-mixed' or 'bf16-true'")
    if strategy._layer_sync is not None:
        found.append("sync_batchnorm: leave it out; in a pipeline, batch norm uses the statistics of each microbatch")
    refuse(found)


def refuse_fabric(strategy: Any, settings: Settings, data_parallel_size: int) -> None:
    """Refuses unsuitable arguments of `Fabric`."""
    found = _rank_faults(strategy, settings, data_parallel_size)
    if strategy.precision.precision not in FABRIC_PRECISIONS:
        found.append(f"precision={strategy.precision.precision!r} of Fabric: use {' or '.join(map(repr, FABRIC_PRECISIONS))}")
    refuse(found)


def _rank_faults(strategy: Any, settings: Settings, data_parallel_size: int) -> list[str]:
    """Returns what is wrong with the number of ranks, and with the schedule on them."""
    world = strategy.num_nodes * strategy.num_processes
    ranks, rest = divmod(world, data_parallel_size)
    if rest:
        return [f"data_parallel_size={data_parallel_size} on {world} ranks: give a divisor"]
    return _schedule_faults(settings, ranks)


def _schedule_faults(settings: Settings, ranks: int) -> list[str]:
    """Returns what is wrong with the schedule on this number of ranks."""
    given = settings.schedule
    if given == "auto" or not isinstance(given, (str, Schedule, Plan)):  # made later
        return []
    try:
        schedule = schedule_for(given, ranks, settings.num_microbatches)
    except InputError as error:
        return [str(error)]
    if len(schedule.placement.routes) > 1:
        return [TWO_DIRECTIONS.format(name=schedule.name)]
    return []


def refuse_module(module: pl.LightningModule, settings: Settings) -> None:
    """Refuses modules that a pipeline cannot train."""
    found = wrapping_faults(module)
    if settings.network is not None and settings.network not in dict(module.named_modules()):
        found.append(f"network={settings.network!r}: {type(module).__name__} has {', '.join(name for name, _ in module.named_children())}")
    if is_overridden("backward", module):
        found.append(f"{type(module).__name__}.backward: the pipeline runs backward passes; leave the hook out")
    if is_overridden("training_step", module) and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        found.append("training_step(dataloader_iter): take a batch instead")
    refuse(found)


def refuse_callbacks(callbacks: list[pl.Callback]) -> None:
    """Refuses callbacks that change the modules which the stages use, or need one process."""
    faults = {
        ModelPruning: "ModelPruning, which replaces parameters of stages: prune the module before fit",
        BatchSizeFinder: "BatchSizeFinder, which tries batches in one process: give the batch size to the data loader",
    }
    refuse([fault for kind, fault in faults.items() if any(isinstance(callback, kind) for callback in callbacks)])


def wrapping_faults(module: nn.Module) -> list[str]:
    """Returns the submodules that another tool has wrapped."""
    found = []
    for name, child in module.named_modules():
        if isinstance(child, (DistributedDataParallel, DataParallel)) or type(child).__name__ == "FullyShardedDataParallel":
            found.append(f"self.{name} wrapped in {type(child).__name__}: leave it unwrapped, and give data_parallel_size= for replicas")
        elif type(child).__name__ == "OptimizedModule" or _is_compiled(child):
            place = f"self.{name}" if name else type(module).__name__
            found.append(f"{place} compiled by torch.compile: leave it uncompiled, and give PipelineStrategy(split='compiled')")
    return found


def _is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` has compiled the module, or `torch.compile(module)`, whose wrapper Fabric takes off before `setup_module`.

    The wrapper sets Lightning's note of its arguments on the module inside.
    """
    return module._compiled_call_impl is not None or "_compile_kwargs" in vars(module)


def refuse_optimizers(optimizers: list[Any]) -> None:
    """Refuses optimizers that need the gradients of all parameters at once: each rank has only those of its own parameters."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        refuse(["LBFGS, which needs the gradients of all stages on one rank: use AdamW or SGD"])


def refuse_loader(loader: Any, world_size: int, rank: int, num_replicas: int) -> None:
    """Refuses a sampler that gives the ranks of a pipeline different batches."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, DistributedSampler) and takes_rank_for_replica(sampler, world_size, rank, world_size // num_replicas):
        raise InputError(
            "a DistributedSampler over all {got} ranks gives the ranks of a pipeline different batches: leave it out, so that Lightning "
            "makes one for {expected}, or make it with **trainer.distributed_sampler_kwargs",
            argument="sampler",
            got=sampler.num_replicas,
            expected=counted(num_replicas, "replica"),
        )
