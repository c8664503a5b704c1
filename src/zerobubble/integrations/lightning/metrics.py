"""The Metrics of a LightningModule in its training step: their states, and updates that wait for the last microbatch.

An update with the samples of a microbatch is made at once. An update with numbers only, such as the loss, is held back, and made once for
the batch, with the numbers of the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, SumMetric

from zerobubble.errors import InputError
from zerobubble.integrations.whole_model import replaced

Updates = dict[tuple[str, str, int], dict[Any, Any]]
"""Updates that are held back: their arguments by place or name, by the name of the Metric, the method and the count of its calls."""
Counts = Mapping[str, tuple[int, ...]]
_OF_EVERY_METRIC = frozenset(vars(SumMetric()))


class MetricState(NamedTuple):
    """The state of a Metric on the rank of the last stage.

    Attributes:
        attribute: The name of the Metric in the LightningModule.
        state: Its attributes, by name.
    """

    attribute: str
    state: dict[str, Any]


def names_of_metrics(module: nn.Module) -> dict[int, str]:
    """Returns the names of the Metrics of a module by their ids."""
    return {id(metric): name for name, metric in module.named_modules() if isinstance(metric, Metric)}


def keep_apart(module: nn.Module) -> None:
    """Makes each Metric of a MetricCollection compute alone, as with `compute_groups=False`.

    A collection groups Metrics whose states are equal after its first update. That is the update of a microbatch, in whose few samples they
    may be equal by chance.
    """
    for collection in module.modules():
        if isinstance(collection, MetricCollection) and not collection._groups_checked:
            collection._enable_compute_groups = False


def counts_of(module: nn.Module) -> Counts:
    """Returns how often each Metric of a module was updated, by name."""
    return {name: _counts(metric) for name, metric in module.named_modules() if isinstance(metric, Metric)}


def _counts(metric: Metric) -> tuple[int, ...]:
    """Returns the number of updates, and the numbers of attributes in which wrappers such as `Running` count theirs."""
    own = [vars(metric)[name] for name in _own_numbers(metric)]
    return metric._update_count, *(value for value in own if isinstance(value, int))


def _own_numbers(metric: Metric) -> list[str]:
    """Returns the attributes of a Metric, other than its states, that hold numbers."""
    return [name for name, value in vars(metric).items() if name not in _OF_EVERY_METRIC and isinstance(value, (int, float, Tensor))]


def updated(module: nn.Module, counts: Counts) -> list[MetricState]:
    """Returns the states of the Metrics whose numbers of updates are not `counts`."""
    for collection in module.modules():
        if isinstance(collection, MetricCollection):
            collection.values()  # which gives the metrics of a group their common state
    return [
        MetricState(name, state_of(metric))
        for name, metric in module.named_modules()
        if isinstance(metric, Metric) and _counts(metric) != counts.get(name)
    ]


def state_of(metric: Metric) -> dict[str, Any]:
    """Returns what has changed in a Metric since it was made or reset."""
    return {name: getattr(metric, name) for name in (*metric._defaults, *_own_numbers(metric), "_update_count")}


def take_over(found: MetricState, module: nn.Module) -> Metric:
    """Copies the state from the rank of the last stage to this rank's Metric, and returns the Metric."""
    metric = module.get_submodule(found.attribute)
    assert isinstance(metric, Metric)
    for name, value in found.state.items():
        setattr(metric, name, value.to(metric.device) if isinstance(value, Tensor) else value)
    metric._computed = None
    return metric


class MetricCopies:
    """The metrics of a module, which go on with copies of their states until `undo`. Tensors in lists are not copied."""

    def __init__(self, module: nn.Module) -> None:
        metrics = [child for child in module.modules() if isinstance(child, (Metric, MetricCollection))]
        self._before = [(child, dict(vars(child))) for child in metrics]
        copies: dict[int, Any] = {}  # metrics of one group share states
        for child in metrics:
            names = child._defaults if isinstance(child, Metric) else ("_groups",)
            states = {name: vars(child)[name] for name in names if name in vars(child)}
            copies |= {id(item): item for state in states.values() if isinstance(state, list) for item in state}
            vars(child).update({name: copy.deepcopy(state, copies) for name, state in states.items()})

    def undo(self) -> None:
        """Forgets all updates since this object was made."""
        for child, attributes in self._before:
            vars(child).clear()
            vars(child).update(attributes)


@contextmanager
def metrics_copied(module: nn.Module) -> Iterator[None]:
    """A context in which updates of the metrics of a module are lost at the end."""
    copies = MetricCopies(module)
    try:
        yield
    finally:
        copies.undo()


@contextmanager
def updates_held(module: nn.Module, held: Updates, refuse: Callable[[InputError], object], *, is_whole: bool = False) -> Iterator[None]:
    """A context in which `held` gets the updates with numbers of a microbatch, and `refuse` what needs the Metric after the last one.

    A call of a Metric returns its value for the numbers of the microbatch. Metrics inside of another one are updated with it. A tensor of
    one element with dimensions, such as `loss[None]`, may be a sample of a microbatch: it is a number only of a batch that `is_whole`.
    """
    held.clear()
    active: list[Metric] = []

    def alone(metric: Metric, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        active.append(metric)
        try:
            return call(*args, **kwargs)
        finally:
            active.pop()

    def holding(name: str, metric: Metric, method: str) -> Callable[..., Any]:
        own = getattr(metric, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(enumerate(args)) | kwargs
            if active or not all(_is_number(value, is_whole=is_whole) for value in arguments.values()):
                return alone(metric, own, *args, **kwargs)
            count = sum(key[:2] == (name, method) for key in held)
            held[name, method, count] = {key: value.detach() if isinstance(value, Tensor) else value for key, value in arguments.items()}
            vars(metric)["_forward_cache"] = None
            if method == "update":
                return None
            with metrics_copied(metric):
                return alone(metric, own, *args, **kwargs)

        return call

    def refusing(name: str, metric: Metric, method: str) -> Callable[..., Any]:
        own = getattr(metric, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not active and (method == "reset" or any(key[0] == name for key in held)):
                refuse(_early(name, method))
            return alone(metric, own, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, metric in module.named_modules():
            if isinstance(metric, Metric):
                methods = {method: holding(name, metric, method) for method in ("update", "forward")}
                methods |= {method: refusing(name, metric, method) for method in ("compute", "reset")}
                stack.enter_context(replaced(metric, **methods))
        yield


def _is_number(value: Any, *, is_whole: bool) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 if is_whole else not value.ndim
    return value is None or isinstance(value, (int, float))


def _early(name: str, method: str) -> InputError:
    return InputError(
        "training_step calls self.{name}.{method}(), and a pipeline updates this Metric after the last microbatch",
        name=name,
        method=method,
        remedy=f"call it in on_train_batch_end or on_train_epoch_end; to log the value, give the Metric itself: self.log(..., self.{name})",
    )


def make_updates(module: nn.Module, updates: Updates) -> None:
    """Makes updates that were held back, with the numbers of the batch."""
    for (name, method, _), arguments in updates.items():
        by_name = {key: value for key, value in arguments.items() if isinstance(key, str)}
        getattr(module.get_submodule(name), method)(*(arguments[place] for place in range(len(arguments) - len(by_name))), **by_name)
