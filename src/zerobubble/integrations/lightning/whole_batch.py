"""Compares what `training_step` computes for a whole batch with what follows from its microbatches.

In steps 1, 2, 4, 8 and so on, and for each new size of batch, the rank of the last stage runs `training_step` once more, for the whole
batch, with the outputs that the pipeline has computed. So a loss or a logged value that is not what one device has, and state that changes
for each microbatch, are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from zerobubble.errors import InputError
from zerobubble.integrations.batches import with_new_containers
from zerobubble.integrations.lightning.comparison import ComparedSteps, Fault, loss_fault, tolerance_of
from zerobubble.integrations.lightning.extras import joined, learn_rules
from zerobubble.integrations.lightning.isolation import BackwardCalledError, isolated
from zerobubble.integrations.lightning.logs import RULES, Entry, Parts, entries_of, likely_rule, merged
from zerobubble.integrations.lightning.metrics import Updates, make_updates, metrics_copied
from zerobubble.integrations.lightning.network_numbers import NetworkNumbers
from zerobubble.integrations.lightning.step import Step
from zerobubble.integrations.lightning.watched_state import WatchedState
from zerobubble.integrations.loss_rules import are_near
from zerobubble.integrations.whole_model import replaced
from zerobubble.runtime.frameworks import join_outputs, states_restored


class Run(NamedTuple):
    """What one call of `training_step` for the whole batch does.

    Attributes:
        loss: Its loss; None if it returns None.
        extras: What it returns in addition to the loss.
        entries: What it logs; without a loss, with the states of metrics.
        updates: The updates of metrics with numbers, which are held back.
        changed: The names of the attributes and buffers that it changes.
        has_inputs: Whether it calls the network with the arguments of the microbatches.
    """

    loss: Tensor | None
    extras: dict[str, Any]
    entries: list[Entry]
    updates: Updates
    changed: list[str]
    has_inputs: bool

    @property
    def has_plain_floats(self) -> bool:
        """Whether it logs or returns numbers of Python, which may be times."""
        return any(
            isinstance(leaf, float) for leaf in pytree.tree_leaves([self.extras, self.updates, [entry.value for entry in self.entries]])
        )


@dataclass
class WholeBatch:
    """Runs `training_step` of `module`, whose network is cut, for whole batches.

    `rules` have how logs and extras follow from parts, and `numbers` how those do that the network returns. `compared` are the numbers
    that have been compared.
    """

    module: pl.LightningModule
    device: torch.device
    rules: dict[str, str]
    numbers: NetworkNumbers
    steps: ComparedSteps = field(default_factory=ComparedSteps)
    rules_of_extras: dict[str, str] = field(default_factory=dict)
    rules_of_updates: dict[str, str] = field(default_factory=dict)
    compared: set[Any] = field(default_factory=set)

    def fault(self, network: nn.Module, step: Step, outputs: Sequence[Any], parts: Parts, called: Callable[..., int]) -> Fault | None:
        """Returns what of a step differs from one call of `training_step`, or None. Sets `step.skipped`.

        Args:
            network: The module whose calls return the outputs.
            step: The step.
            outputs: The outputs of the network, for each microbatch.
            parts: The losses and logs of microbatches.
            called: Returns in how many views the arguments of the network are those of the microbatches, 0 if they are others.
        """
        outputs = [pytree.tree_map_only(Tensor, _leaf, output) for output in self.numbers.marked(outputs, parts)]
        whole = self._run(network, step, outputs, called)
        if whole.changed:
            buffers = {f"self.{name}" for name, _ in self.module.named_buffers()}
            return Fault(whole.changed[0], kind="buffer" if whole.changed[0] in buffers else "state")
        if not self.module.automatic_optimization and (whole.loss is None or step.without_loss):
            return None  # the run that follows on all ranks decides
        if whole.loss is None or step.without_loss:
            step.skipped = whole.entries
            is_whole_only, is_part_only = not step.without_loss, whole.loss is not None
            return Fault("a microbatch" if is_part_only else "the whole batch", kind="skipped") if is_whole_only or is_part_only else None
        if len(parts.losses) == 1:
            return None
        if not whole.has_inputs:
            return Fault(self.name_of(network), kind="inputs")
        if step.draws.fault:
            return Fault(step.draws.fault, kind="draws")
        again = self._run(network, step, outputs, called) if whole.has_plain_floats else whole
        tolerance = max(tolerance_of(outputs), tolerance_of(whole.loss))  # models of Transformers compute their losses in float32
        is_random = any(step.draws.parts.values()) or step.states is not None
        fault = (
            loss_fault(float(whole.loss), parts, tolerance, draws=is_random)
            or self._log_fault(whole.entries, again.entries, parts, tolerance)
            or learn_rules(step.extras, (whole.extras, again.extras), parts, self.rules_of_extras, tolerance)
            or self._update_fault(step, (whole.updates, again.updates), parts, tolerance)
        )
        self.compared |= set() if fault else _numbers_of(step)
        return fault

    def has_compared(self, step: Step) -> bool:
        """Returns whether what a step logs, returns and updates metrics with has been compared, in this step or before."""
        return len(step.sizes) == 1 or not self.module.automatic_optimization or _numbers_of(step) <= self.compared

    def updates(self, step: Step, parts: Parts) -> Updates | Fault:
        """Returns the updates of metrics with the numbers of the batch, or the fault of one that does not follow from the microbatches."""
        calls = step.updates[0].keys()
        for other in step.updates:
            if other.keys() != calls:
                return Fault(f"self.{next(iter(other.keys() ^ calls))[0]}", kind="metric")
        updates = joined(step.updates, parts, self.rules_of_updates)
        for key, arguments in updates.items():
            if any(isinstance(value, list) for value in arguments.values()):
                return Fault(f"self.{key[0]}", kind="metric")
        return updates

    def _update_fault(self, step: Step, runs: Sequence[Updates], parts: Parts, tolerance: float) -> Fault | None:
        if not self.module.automatic_optimization:
            return None
        found = self.updates(step, parts)
        if isinstance(found, Fault):
            return found
        calls = [*found, *(key for key in runs[0] if key not in found)]
        for key in calls:
            values, wholes = ([{key: of_one[key]} for of_one in each if key in of_one] for each in (step.updates, runs))
            if not (values and wholes) or learn_rules(values, wholes, parts, self.rules_of_updates, tolerance):
                return Fault(f"self.{key[0]}", kind="metric")
        return None

    def name_of(self, network: nn.Module) -> str:
        """Returns how `training_step` calls the network."""
        return "self." + (next(name for name, child in self.module.named_modules() if child is network) or "forward")

    def _run(self, network: nn.Module, step: Step, outputs: Sequence[Any], called: Callable[..., int]) -> Run:
        """Runs `training_step` once for the batch, where the call of the network returns the joined `outputs`."""
        entries: list[Entry] = []
        updates: Updates = {}
        views = 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal views
            views = called(*args, **kwargs)
            return self.numbers.placed(joined_in_views(outputs, step.sizes, views), self.name_of(network), self.device)

        with ExitStack() as stack:
            stack.enter_context(states_restored(step.states, self.device))
            stack.enter_context(metrics_copied(self.module))
            changed = stack.enter_context(WatchedState(self.module).changes())
            stack.enter_context(replaced(network, forward=forward))
            stack.enter_context(step.draws.joined())
            with isolated(self.module, entries, updates, is_whole=True):
                loss, extras = loss_of(self.module, step.batch, step.rest)
            if loss is None:
                make_updates(self.module, updates)
                alone = Parts([entries], [sum(step.sizes)], [1.0], [0.0], is_sum=False)
                entries = entries_of(alone, self.module, {}, step.counts)
        loss = None if loss is None else loss.detach()
        return Run(loss, pytree.tree_map_only(Tensor, Tensor.detach, extras), entries, updates, changed, has_inputs=views > 0)

    def _log_fault(self, entries: Sequence[Entry], again: Sequence[Entry], parts: Parts, tolerance: float) -> Fault | None:
        """Returns the first logged number that follows by no rule. A number of Python that another run logs differently is none."""
        of_outputs = tolerance
        for entry, other in zip(entries, again, strict=False):
            tolerance = max(of_outputs, tolerance_of(entry.value)) if isinstance(entry.value, Tensor) else of_outputs
            if sum(others.name == entry.name for others in entries) > 1:
                continue
            if isinstance(entry.value, Metric):
                if fault := self._metric_fault(entry, parts, tolerance):
                    return fault
                continue
            whole = float(entry.value)
            values = {rule: self._by(rule, entry.name, parts) for rule in (self._rule(entry.name, parts), *RULES)}
            fitting = [rule for rule, value in values.items() if value is not None and are_near(value, whole, tolerance, [value])]
            if fitting:
                self.rules[entry.name] = fitting[0]
            elif isinstance(entry.value, Tensor) or entry.value == other.value:
                return Fault(f"the logged value {entry.name!r}", values[""] or 0.0, whole)
        return None

    def _metric_fault(self, entry: Entry, parts: Parts, tolerance: float) -> Fault | None:
        """Returns the fault of a Metric whose value in the step, if it is logged, is not the mean over microbatches."""
        found = self._merged("", entry.name, parts)
        mean = found.value.state.get("_forward_cache") if found else None
        if mean is None or entry.cache is None or entry.options.get("on_step") is False:
            return None
        whole, value = float(entry.cache), float(mean)
        return None if are_near(value, whole, tolerance, [value]) else Fault(f"the logged value {entry.name!r}", value, whole)

    def _by(self, rule: str, name: str, parts: Parts) -> float | None:
        found = self._merged(rule, name, parts)
        return float(found.value) if found else None

    def _rule(self, name: str, parts: Parts) -> str:
        values = [entry.value for of_one in parts.logs for entry in of_one if entry.name == name]
        return self.rules.get(name) or likely_rule(values, parts)

    def _merged(self, rule: str, name: str, parts: Parts) -> Entry | None:
        logs = [[entry for entry in of_one if entry.name == name] for of_one in parts.logs]
        found = merged(parts._replace(logs=logs), self.module, {name: rule})
        return found[0] if found else None


def _numbers_of(step: Step) -> set[Any]:
    """Returns the names that a step logs, what it returns, and the updates of metrics with its numbers."""
    logged = {("self.log", entry.name) for of_one in step.logs for entry in of_one}
    return logged.union(*step.updates, *(_places(extras) for extras in step.extras))


def _places(extras: Mapping[Any, Any], place: tuple[Any, ...] = ("returned",)) -> Iterator[tuple[Any, ...]]:
    for name, value in extras.items():
        yield from _places(value, (*place, name)) if isinstance(value, Mapping) else [(*place, name)]


def joined_in_views(values: Sequence[Any], sizes: Sequence[int], views: int) -> Any:
    """Returns arguments or outputs of microbatches for the batch: with several `views`, as torch.cat joins them, one after another."""
    if views <= 1:
        return join_outputs(values, sizes, takes_first=True)

    def part(value: Any, size: int, view: int) -> Any:
        rows = slice(view * size, (view + 1) * size)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor[rows] if tensor.ndim and len(tensor) == views * size else tensor, value)

    parts = [part(value, size, view) for view in range(views) for value, size in zip(values, sizes, strict=True)]
    return join_outputs(parts, [*sizes] * views, takes_first=True)


def num_views(values: Sequence[Any], sizes: Sequence[int], whole: Any, are_equal: Callable[[Any, Any], bool]) -> int:
    """Returns the number of views with which the joined arguments of microbatches equal those of the batch, 0 if they differ."""
    if are_equal(joined_in_views(values, sizes, 1), whole):
        return 1
    rows = max((len(leaf) for leaf in pytree.tree_leaves(whole) if isinstance(leaf, Tensor) and leaf.ndim), default=0)
    views = rows // sum(sizes)
    return views if views > 1 and are_equal(joined_in_views(values, sizes, views), whole) else 0


def loss_of(module: pl.LightningModule, batch: Any, rest: tuple[Any, ...]) -> tuple[Tensor | None, dict[str, Any]]:
    """Returns the loss that `training_step` returns, or passes to `manual_backward`, and what else it returns. None skips the batch."""
    name = f"{type(module).__name__}.training_step"
    try:
        returned = module.training_step(with_new_containers(batch), *rest)
    except BackwardCalledError as error:
        return error.loss, {}
    if returned is None or not module.automatic_optimization:
        return None, {}
    extras = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    loss = extras.pop("loss", None)
    if not isinstance(loss, Tensor):
        message = "{name} must return a loss, a tensor or a dict with one as 'loss', or None to skip the batch, got {loss_type}"
        raise InputError(message, name=name, loss_type=type(loss).__name__)
    return loss, extras


def _leaf(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor
