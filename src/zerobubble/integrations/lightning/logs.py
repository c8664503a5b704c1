"""What `training_step` logs for each microbatch, on the rank of the last stage, as one value of the batch on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric


class Entry(NamedTuple):
    """One call of `self.log`.

    Attributes:
        name: The name that is logged.
        value: A number, a tensor or a Metric.
        options: The other arguments.
        cache: The value of a Metric for the microbatch.
    """

    name: str
    value: Any
    options: dict[str, Any]
    cache: Tensor | None = None


class MetricState(NamedTuple):
    """The state of a Metric on the rank of the last stage.

    Attributes:
        attribute: The name of the Metric in the LightningModule.
        state: Its attributes, by name.
    """

    attribute: str
    state: dict[str, Any]


def merged(logs: Sequence[Sequence[Entry]], sizes: Sequence[int], module: pl.LightningModule) -> list[Entry]:
    """Returns one entry for each name, from the entries of the microbatches, which have so many samples."""
    by_name: dict[str, list[tuple[Entry, int]]] = {}
    for entries, size in zip(logs, sizes, strict=True):
        for entry in entries:
            by_name.setdefault(entry.name, []).append((entry, size))
    names = {id(metric): name for name, metric in module.named_modules() if isinstance(metric, Metric)}
    return [_merged(name, found, names) for name, found in by_name.items()]


def _merged(name: str, found: list[tuple[Entry, int]], metrics: dict[int, str]) -> Entry:
    last = found[-1][0]
    options = dict(last.options)
    weights = [size for _, size in found]
    if options.get("batch_size") is not None:
        weights = [entry.options["batch_size"] for entry, _ in found]
        options["batch_size"] = sum(weights)
    if isinstance(last.value, Metric):
        return Entry(name, _state_of(last.value, metrics.get(id(last.value), ""), found, weights), options)
    values = [torch.as_tensor(entry.value) for entry, _ in found]
    return Entry(name, _reduced(values, weights, options.get("reduce_fx", "mean")).cpu(), options)


def _reduced(values: list[Tensor], weights: list[int], reduce_fx: str | Callable[..., Any]) -> Tensor:
    stacked = torch.stack(values)
    known: dict[Any, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.max, "min": torch.min}
    if callable(reduce_fx) and reduce_fx is not torch.mean:
        return torch.as_tensor(reduce_fx(stacked))
    if reduce_fx in known:
        return known[reduce_fx](stacked)
    stacked = stacked if stacked.is_floating_point() else stacked.float()
    return (stacked * stacked.new_tensor(weights)).sum() / sum(weights)


def _state_of(metric: Metric, attribute: str, found: list[tuple[Entry, int]], weights: list[int]) -> MetricState:
    """The state of a metric that was updated by every microbatch. Its value of the batch is the mean of theirs."""
    caches = [entry.cache for entry, _ in found if isinstance(entry.cache, Tensor) and not entry.cache.ndim]
    state = {name: getattr(metric, name) for name in (*metric._defaults, "_update_count")}
    if len(caches) == len(found):
        state["_forward_cache"] = _reduced(caches, weights, "mean")
    return MetricState(attribute, state)


def take_over(found: MetricState, module: pl.LightningModule) -> Metric:
    """Gives this rank's Metric the state on the rank of the last stage, and returns it."""
    metric = module.get_submodule(found.attribute)
    assert isinstance(metric, Metric)
    for name, value in found.state.items():
        setattr(metric, name, value.to(metric.device) if isinstance(value, Tensor) else value)
    metric._computed = None
    return metric
