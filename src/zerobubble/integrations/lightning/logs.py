"""Merges what `training_step` logs per microbatch on the rank of the last stage into one value per batch, and shares it with all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from zerobubble.integrations.lightning.metrics import Counts, MetricState, names_of_metrics, state_of, take_over, updated


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


Found = tuple[list[Entry], Any]
"""What a step logs, and what `training_step` returns besides the loss: None for a batch that it skips, a `Fault` for an error."""
REPEATED = "repeated"
"""What is found in a step that is repeated to be compared."""


class Parts(NamedTuple):
    """What `training_step` computes for each microbatch.

    Attributes:
        logs: The entries.
        sizes: The numbers of samples.
        weights: The weights of the losses.
        losses: The losses.
        is_sum: Whether the loss of the batch is the sum of the losses.
    """

    logs: Sequence[Sequence[Entry]]
    sizes: Sequence[int]
    weights: Sequence[float]
    losses: Sequence[float]
    is_sum: bool


RULES = ("", "samples", "weights", "sum")
"""How the logged value of a batch follows from those of microbatches: by `reduce_fx`, as a mean over samples, like the loss, as a sum."""


class StepMessages:
    """Shares the entries and other values of training steps with all ranks of a pipeline.

    In most steps, names and options are those of the previous step. Then only one small tensor of values is sent.
    """

    def __init__(self, module: pl.LightningModule, group: dist.ProcessGroup, device: torch.device) -> None:
        self._module, self._group, self._device = module, group, device
        self._form: list[tuple[str, dict[str, Any], torch.dtype]] | None = None

    def shared(self, found: Found | None, rank: int) -> Found:
        """Returns, on every rank, the entries and other values that `rank` of the pipeline has found."""
        source = dist.get_global_rank(self._group, rank)
        count = 0 if self._form is None else len(self._form)
        values = torch.zeros(1 + count, dtype=torch.float64, device="cpu")
        form = None
        if found is not None and found[1] == {} and not any(isinstance(entry.value, MetricState) for entry in found[0]):
            form = _form_of(found[0])
        if found is not None and form == self._form and form is not None:
            values = torch.stack([torch.ones((), dtype=torch.float64, device="cpu"), *(entry.value.double() for entry in found[0])])
        values = values.to(self._device)
        dist.broadcast(values, src=source, group=self._group)
        is_known, *numbers = values.tolist()  # values[0] is 1 if names and options are known from the previous step
        if is_known and self._form is not None:
            rows = zip(numbers, self._form, strict=True)
            entries = [Entry(name, torch.tensor(number, dtype=dtype), options) for number, (name, options, dtype) in rows]
            return [entry._replace(value=entry.value.to(self._device)) for entry in entries], {}
        message = [(found, form)]
        dist.broadcast_object_list(message, src=source, group=self._group, device=self._device)
        sent, self._form = message[0]
        assert sent is not None
        return [self._on_this_rank(entry) for entry in sent[0]], sent[1]

    def _on_this_rank(self, entry: Entry) -> Entry:
        """Returns the entry with its value on this rank's device, or in this rank's Metric."""
        is_state = isinstance(entry.value, MetricState)
        return entry._replace(value=take_over(entry.value, self._module) if is_state else entry.value.to(self._device))


def _form_of(entries: list[Entry]) -> list[tuple[str, dict[str, Any], torch.dtype]]:
    return [(entry.name, entry.options, entry.value.dtype) for entry in entries]


def merged(parts: Parts, module: pl.LightningModule, rules: Mapping[str, str]) -> list[Entry]:
    """Returns one entry for each name. `rules` has those of `RULES` that are not the first."""
    by_name: dict[str, list[tuple[Entry, int]]] = {}
    for place, entries in enumerate(parts.logs):
        for entry in entries:
            by_name.setdefault(entry.name, []).append((entry, place))
    names = names_of_metrics(module) if any(isinstance(entry.value, Metric) for entries in parts.logs for entry in entries) else {}
    rows = []
    for name, found in by_name.items():
        rule = rules.get(name) or likely_rule([entry.value for entry, _ in found], parts)
        weights = parts.weights if rule == "weights" else parts.sizes
        rows.append(_merged(name, [(entry, weights[place]) for entry, place in found], names, rule))
    return rows


def likely_rule(values: Sequence[Any], parts: Parts) -> str:
    """Returns the rule of the loss for values that are the losses of all microbatches, else the first of `RULES`."""
    is_loss = len(values) == len(parts.losses) and all(map(_is_equal, values, parts.losses))
    return "" if not is_loss else "sum" if parts.is_sum else "weights"


def _is_equal(value: Any, loss: float) -> bool:
    is_number = not value.ndim if isinstance(value, Tensor) else isinstance(value, (int, float))
    return is_number and float(value) == loss


def entries_of(parts: Parts, module: pl.LightningModule, rules: Mapping[str, str], counts: Counts) -> list[Entry]:
    """Returns what a batch logs, and without names the metrics that it updates and does not log. `counts` has their updates before."""
    entries = merged(parts, module, rules)
    logged = {entry.value.attribute for entry in entries if isinstance(entry.value, MetricState)}
    return entries + [Entry("", state, {}) for state in updated(module, counts) if state.attribute not in logged]


def _merged(name: str, found: list[tuple[Entry, float]], metrics: dict[int, str], rule: str) -> Entry:
    last = found[-1][0]
    options = dict(last.options)
    weights = [size for _, size in found]
    if options.get("batch_size") is not None:
        sizes = [entry.options["batch_size"] for entry, _ in found]
        weights = weights if rule == "weights" else sizes
        options["batch_size"] = sum(sizes)
    if isinstance(last.value, Metric):
        return Entry(name, _state_of(last.value, metrics.get(id(last.value), ""), found, weights), options)
    values = [torch.as_tensor(entry.value) for entry, _ in found]
    reduce_fx = {"": options.get("reduce_fx", "mean"), "sum": "sum"}.get(rule, "mean")
    return Entry(name, reduced(values, weights, reduce_fx).cpu(), options)


def reduced(values: list[Tensor], weights: list[float], reduce_fx: str | Callable[..., Any]) -> Tensor:
    """Returns the number that `reduce_fx` makes of those of microbatches; "mean" weights them."""
    stacked = torch.stack(values)
    known: dict[Any, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.max, "min": torch.min}
    if callable(reduce_fx) and reduce_fx is not torch.mean:
        return torch.as_tensor(reduce_fx(stacked))
    if reduce_fx in known:
        return known[reduce_fx](stacked)
    stacked = stacked if stacked.is_floating_point() else stacked.float()
    factors = stacked.new_tensor(weights)
    return torch.where(factors == 0, 0, stacked * factors).sum() / (sum(weights) or 1)


def _state_of(metric: Metric, attribute: str, found: list[tuple[Entry, float]], weights: list[float]) -> MetricState:
    """Returns the state of a metric that every microbatch has updated. Its value for the batch is the mean over microbatches."""
    caches = [entry.cache for entry, _ in found if isinstance(entry.cache, Tensor) and not entry.cache.ndim]
    state = state_of(metric)
    if all(entry.cache is None for entry, _ in found):
        state["_forward_cache"] = metric._forward_cache  # of an update that was held back
    elif len(caches) == len(found):
        state["_forward_cache"] = reduced(caches, weights, "mean")
    return MetricState(attribute, state)
