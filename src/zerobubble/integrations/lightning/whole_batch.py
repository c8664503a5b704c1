"""Compares what `training_step` computes for a whole batch with what follows from its microbatches.

In steps 1, 2, 4, 8 and so on, the rank of the last stage runs `training_step` once more, for the whole batch, with the outputs that the
pipeline has computed. So a loss or a logged value that is not what one device has, and state that changes for each microbatch, are errors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from zerobubble.errors import InputError
from zerobubble.integrations.lightning.isolation import BackwardCalledError, isolated
from zerobubble.integrations.lightning.logs import RULES, Entry, Parts, merged
from zerobubble.integrations.lone_calls import numbers_of, unchanged
from zerobubble.integrations.whole_model import replaced
from zerobubble.runtime.step.batch import join_outputs
from zerobubble.runtime.values.random_state import RandomStates, states_restored

TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-5}
"""The relative differences that rounding explains, by the dtype of the outputs; 1e-2 for others."""


class Fault(NamedTuple):
    """A difference: what differs, its value from microbatches, its value for the batch, and whether that is a sum; or state that changes,
    without values."""

    what: str
    parts: float | None = None
    whole: float | None = None
    is_sum: bool = False

    def error(self, module: pl.LightningModule) -> InputError:
        name = f"{type(module).__name__}.training_step"
        if self.whole is None or self.parts is None:
            return InputError(
                "{name} changes {what}, and a pipeline runs it several times for each batch",
                name=name,
                what=self.what,
                remedy="change it in on_train_batch_start or on_train_batch_end, whose outputs['loss'] is the loss of the batch",
            )
        if self.what != "the loss":
            remedy = "log it in validation_step, or log a torchmetrics Metric with on_step=False, on_epoch=True"
        elif self.is_sum:
            remedy = 'give PipelineStrategy(loss_weight="sum")'
        else:
            remedy = (
                "give PipelineStrategy(loss_weight=...) a function of a microbatch that returns what its loss divides by, such as "
                "lambda batch: class_weights[batch[1]].sum(); a loss that compares samples needs num_microbatches=1"
            )
        return InputError(
            "{what} in {name} is {expected} for the whole batch and {got} over its microbatches: it is not the mean over samples",
            what=self.what,
            name=name,
            expected=f"{self.whole:.6g}",
            got=f"{self.parts:.6g}",
            remedy=remedy,
        )


@dataclass
class WholeBatch:
    """Runs `training_step` of `module`, whose `network` is cut, for whole batches. `rules` has how each logged value follows from parts."""

    module: pl.LightningModule
    device: torch.device
    rules: dict[str, str]
    num_steps: int = 0

    def is_due(self) -> bool:
        """Counts a step, and returns whether to compare it."""
        self.num_steps += 1
        return self.num_steps & (self.num_steps - 1) == 0

    def fault(self, network: nn.Module, batch: Any, rest: tuple[Any, ...], outputs: Sequence[Any], parts: Parts) -> Fault | None:
        """Returns what of a step differs from one call of `training_step`, or None.

        Args:
            network: The module whose calls return the outputs.
            batch: The whole batch.
            rest: The other arguments of `training_step`.
            outputs: The outputs of the network, for each microbatch.
            parts: The losses and logs of microbatches.
        """
        output = join_outputs([pytree.tree_map_only(Tensor, _leaf, output) for output in outputs])
        entries: list[Entry] = []
        with ExitStack() as stack:
            stack.enter_context(states_restored(None, self.device))
            stack.enter_context(metrics_copied(self.module))
            changed = stack.enter_context(_changes(self.module))
            stack.enter_context(isolated(self.module, entries))
            stack.enter_context(replaced(network, forward=lambda *args, **kwargs: output))
            before = RandomStates.now(self.device)
            loss, _ = loss_of(self.module, batch, rest)
            draws = not RandomStates.now(self.device).is_same_as(before)
        if changed:
            return Fault(changed[0])
        if draws or len(parts.losses) == 1:
            return None  # the numbers of the batch are not those of its microbatches
        tolerance = min((TOLERANCES.get(leaf.dtype, 1e-2) for leaf in pytree.tree_leaves(output) if _is_float(leaf)), default=2e-5)
        return self._loss_fault(float(loss), parts, tolerance) or self._log_fault(entries, parts, tolerance)

    def _loss_fault(self, whole: float, parts: Parts, tolerance: float) -> Fault | None:
        terms = [weight * loss for weight, loss in zip(parts.weights, parts.losses, strict=True) if weight]
        total = sum(terms) / (1 if parts.is_sum else sum(parts.weights) or 1)
        if _are_near(total, whole, tolerance, parts.losses):
            return None
        return Fault("the loss", total, whole, is_sum=_are_near(sum(parts.losses), whole, tolerance, parts.losses))

    def _log_fault(self, entries: Sequence[Entry], parts: Parts, tolerance: float) -> Fault | None:
        for entry in entries:
            if isinstance(entry.value, Metric) or sum(other.name == entry.name for other in entries) > 1:
                continue
            whole = float(entry.value)
            values = {rule: self._by(rule, entry.name, parts) for rule in (self.rules.get(entry.name, ""), *RULES)}
            fitting = [rule for rule, value in values.items() if value is not None and _are_near(value, whole, tolerance, [value])]
            if fitting:
                self.rules[entry.name] = fitting[0]
            elif isinstance(entry.value, Tensor):
                return Fault(f"the logged value {entry.name!r}", values[""], whole)
        return None

    def _by(self, rule: str, name: str, parts: Parts) -> float | None:
        logs = [[entry for entry in of_one if entry.name == name] for of_one in parts.logs]
        found = merged(parts._replace(logs=logs), self.module, {name: rule})
        return float(found[0].value) if found else None


def loss_of(module: pl.LightningModule, batch: Any, rest: tuple[Any, ...]) -> tuple[Tensor, dict[str, Any]]:
    """Returns the loss that `training_step` returns, or passes to `manual_backward`, and what else it returns."""
    name = f"{type(module).__name__}.training_step"
    try:
        returned = module.training_step(batch, *rest)
    except BackwardCalledError as error:
        return error.loss, {}
    if not module.automatic_optimization:
        raise InputError("{name} does not call self.manual_backward(loss), once, after it has called the network", name=name)
    extras = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    loss = extras.pop("loss", None)
    if not isinstance(loss, Tensor):
        message = "{name} must return a loss for every batch, a tensor or a dict with one as 'loss', got {loss_type}"
        raise InputError(message, name=name, loss_type=type(loss).__name__)
    return loss, extras


@contextmanager
def metrics_copied(module: nn.Module) -> Iterator[None]:
    """A context in which updates of the metrics of a module are lost at the end."""
    found = [child for child in module.modules() if isinstance(child, (Metric, MetricCollection))]
    before = [dict(vars(child)) for child in found]
    copies: dict[int, Any] = {}  # metrics of one group share states
    for child in found:
        names = child._defaults if isinstance(child, Metric) else ("_groups",)
        vars(child).update({name: copy.deepcopy(vars(child)[name], copies) for name in names if name in vars(child)})
    try:
        yield
    finally:
        for child, attributes in zip(found, before, strict=True):
            vars(child).clear()
            vars(child).update(attributes)


@contextmanager
def _changes(module: pl.LightningModule) -> Iterator[list[str]]:
    """A context that undoes changes of attributes of a module and its children. At its end, the list has the names of what changed."""
    changed: list[str] = []
    owners = {name: owner for name, owner in module.named_modules() if not isinstance(owner, (Metric, MetricCollection))}
    buffers = {name: (buffer, buffer._version) for name, buffer in _buffers(module).items()}
    with ExitStack() as stack:
        ends: list[Callable[[], list[str]]] = []
        for name, owner in owners.items():
            prefix = f"self.{name}." if name else "self."
            containers = stack.enter_context(unchanged(owner, ()))
            ends.append(lambda prefix=prefix, names=containers: [prefix + item for item in names if not item.startswith("_")])  # type: ignore[misc]
        before = {name: numbers_of(owner) for name, owner in owners.items()}
        yield changed
        for name, owner in owners.items():
            prefix = f"self.{name}." if name else "self."
            now = numbers_of(owner)
            changed += [prefix + item for item in now if not item.startswith("_") and now[item] != before[name].get(item)]
    changed += [item for end in ends for item in end()]
    changed += [f"self.{name}" for name, buffer in _buffers(module).items() if (buffer, buffer._version) != buffers.get(name)]


def _buffers(module: nn.Module) -> dict[str, Any]:
    return {name: _Same(buffer) for name, buffer in module.named_buffers()}


class _Same:
    """A tensor that equals only itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def _version(self) -> int:
        return self.tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.tensor is self.tensor

    __hash__ = None  # type: ignore[assignment]


def _leaf(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _are_near(value: float, whole: float, tolerance: float, sizes: Sequence[float]) -> bool:
    if value != value or whole != whole:
        return value != value and whole != whole
    return abs(value - whole) <= tolerance * max(abs(whole), *map(abs, sizes))
