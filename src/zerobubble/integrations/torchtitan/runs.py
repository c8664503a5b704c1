"""Reads the run that a configuration of torchtitan describes, by its name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zerobubble.errors import InputError
from zerobubble.integrations.described_run import DescribedRun
from zerobubble.integrations.torchtitan import config_registry
from zerobubble.integrations.torchtitan.shape import run_of


def read_run(name: str, ranks: int | None, microbatches: int | None) -> DescribedRun:
    """Returns the run of a configuration: one of torchtitan, such as `llama3_8b`, or of another module, such as `my.package:llama3_8b`.

    `ranks` and `microbatches` replace those of the configuration.
    """
    module, _, config = name.rpartition(":")
    try:
        registry = _registry_of(module) if module else config_registry
        make = getattr(registry, config)
    except (ImportError, AttributeError) as error:
        raise InputError("torchtitan has no configuration {got!r}: {reason}", got=name, reason=str(error)) from error
    configuration = make()
    sizes, training = configuration.parallelism, configuration.training
    dp_shard = max(1, sizes.data_parallel_shard_degree)
    run = run_of(
        configuration.model_spec.model,
        f"{configuration.model_spec.name} {configuration.model_spec.flavor}",
        training,
        sizes,
        configuration.activation_checkpoint,
        dp=sizes.data_parallel_replicate_degree * dp_shard,
        dp_shard=dp_shard,
    )
    if run.pp == 1 and ranks is None:
        raise InputError("the configuration {got} has parallelism.pipeline_parallel_degree=1: give --ranks", got=name, argument="--ranks")
    return replace(run, pp=ranks or run.pp, num_microbatches=microbatches or run.num_microbatches)


def _registry_of(module: str) -> Any:
    """Returns the module with configurations, looked up as torchtitan's --module is."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `torchrun -m` finds modules there, unlike an installed command
    names: Sequence[str] = (f"torchtitan.models.{module}.config_registry", f"{module}.config_registry", module)
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):  # an import inside the module failed
                raise
    raise ImportError(f"there is no module {module!r}")
