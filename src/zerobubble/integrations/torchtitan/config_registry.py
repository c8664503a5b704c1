"""Every configuration of torchtitan's models, with a zero-bubble schedule: `--module zerobubble.integrations.torchtitan --config NAME`.

torchtitan looks a configuration up by its name in this module. The schedule is `--parallelism.pipeline_parallel_schedule`, by torchtitan's
name or ours, or the plan in `--parallelism.pipeline_parallel_schedule_csv`; without either it is ZB-V.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

from torchtitan.models import _supported_models

from zerobubble.integrations.torchtitan.front import ENDS_ON_FIRST_RANK, pipelining_fn, with_pipeline

_REGISTRY = "torchtitan.models.{}.config_registry"


def _registries(name: str) -> Iterator[Any]:
    """Yields the modules with configurations.

    First come those of the models with whose name `name` begins, longest first, then the others that can be imported.
    """
    for model in sorted(_supported_models, key=lambda model: (not name.startswith(model), -len(model), model)):
        with suppress(ImportError) if not name.startswith(model) else nullcontext():  # some models need further packages
            yield importlib.import_module(_REGISTRY.format(model))


def _pipelined(make: Callable[[], Any]) -> Callable[[], Any]:
    def config() -> Any:
        return with_pipeline(make(), pipelining_fn(), ENDS_ON_FIRST_RANK)

    return config


def __getattr__(name: str) -> Callable[[], Any]:
    if not name.startswith("_"):
        for registry in _registries(name):
            make = vars(registry).get(name)
            if callable(make) and getattr(make, "__module__", "") == registry.__name__:
                return _pipelined(make)
    raise AttributeError(f"torchtitan has no configuration {name!r}")
