"""Finds out whether `loss_fn` is a mean over samples, from what it returns for two microbatches together.

The weighted mean over microbatches that a step computes is the loss of the whole batch only then. In a few steps, the rank of the last
stage keeps the outputs of two microbatches in host memory, and at the end calls `loss_fn` for both together, without gradients. If the
result is not the mean of the two, it calls `loss_fn` for each alone as well, so that all results come from the same state, and warns if
they still differ.

One of the two is the microbatch of the largest weight. The other has the smallest weight in the first of these steps, and different weights
in the next, so up to five microbatches are all compared. A microbatch of weight 0 is compared like others: its loss is NaN if it is a mean
over no token, and then nothing is compared.

The user's run does not notice these calls: random and Python state, parameters and buffers of the loss are put back. Nothing is compared if
a call draws random numbers, communicates or changes what cannot be put back, if outputs or targets cannot be joined, and if the user has
cut the batch. `label_comparison` finds losses that the model itself computes, and that ignore labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zerobubble.error_reports.user_code import warn_user
from zerobubble.errors import LossWarning
from zerobubble.runtime.device import is_host
from zerobubble.runtime.measure.profile import values_restored
from zerobubble.runtime.split.stage_with_loss import loss_module
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.step.label_comparison import IgnoredLabels, LabelComparison
from zerobubble.runtime.values.added_losses import collecting_losses
from zerobubble.runtime.values.memory import in_host_memory, local_part
from zerobubble.runtime.values.payload import Tensors, flatten_pytree, unflatten_pytree
from zerobubble.runtime.values.python_places import Elements, Place, Position, generator_place
from zerobubble.runtime.values.python_state import PythonState, Snapshot, changed
from zerobubble.runtime.values.random_state import RandomStates, states_restored
from zerobubble.runtime.values.stateful import tensors_inside

_STEPS = {1: 0.0, 2: 1.0, 4: 1 / 3, 8: 2 / 3}
"""The steps that are compared. A number says which microbatch is the second, from the smallest weight (0) to the second largest (1)."""
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative differences that rounding explains, by dtype; `_MOST_ROUNDING` for others and under autocast."""
_MOST_ROUNDING = 1e-2
_OF_TENSOR_CORES = 2e-3
"""The same for float32 on accelerators, whose matrix products may have fewer bits."""
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


class _IncomparableError(Exception):
    """Two microbatches cannot be compared with both together."""


class _Part(NamedTuple):
    """A microbatch of `size` samples and this weight, with its number, its output in host memory without a graph, and its loss."""

    microbatch: int
    output: Any
    target: Any
    loss: Tensor
    weight: float
    size: int


class LossComparison:
    """Compares the losses of two microbatches of a training step with the loss of both, until it has warned.

    Calls that are not between `begin` and `finish` are of other steps, and are ignored.
    """

    def __init__(self, loss_fn: Any, device: torch.device, *, is_on: bool) -> None:
        self.is_on = is_on
        self._loss_fn = loss_fn
        self._device = device
        self._num_steps = 0
        self._weights: Mapping[int, float] = {}
        self._chosen: tuple[int, ...] = ()
        self._parts: list[_Part] = []
        self._before: Snapshot | None = None
        self._stage: Stage | None = None
        self._inputs: Tensors = ()
        self._labels = LabelComparison(self._loss_of_stage, self._stage_alone)

    @property
    def is_next(self) -> bool:
        """Whether the next training step is compared."""
        return self.is_on and self._num_steps + 1 in _STEPS

    def begin(self, weights: Mapping[int, float]) -> None:
        """Begins a training step with the weights of the microbatches that can be compared."""
        self.clear()
        is_compared = self.is_next
        self._num_steps += 1
        if is_compared:
            self._weights, self._chosen = weights, _chosen(weights, _STEPS[self._num_steps])

    def arrive(self, stage: Stage, inputs: Tensors) -> None:
        """Notes what arrives at the last stage for the microbatch whose loss comes next."""
        if self._chosen and stage.shards is None:
            self._stage, self._inputs = stage, inputs

    def before_loss(self) -> None:
        """Notes the state before a loss is computed, if it is the first one of the step."""
        if self._chosen and self._before is None:
            self._before = PythonState(self._loss_fn).snapshot()

    def note(self, microbatch: int, output: Any, target: Any, loss: Tensor, *, size: int) -> None:
        """Notes what `loss_fn` has returned for a microbatch."""
        if not self._chosen:
            return
        weight = self._weights[microbatch]
        if microbatch in self._chosen:
            kept = _mapped(output, lambda tensor: in_host_memory(tensor.detach()))
            self._parts.append(_Part(microbatch, kept, _mapped(target, Tensor.detach), loss.detach(), weight, size))
        if weight and self._stage is not None:
            self._labels.note(microbatch, self._inputs, target, weight=weight, size=size)

    def clear(self) -> None:
        """Drops what is noted."""
        self._weights, self._chosen, self._before = {}, (), None
        self._parts.clear()
        self._labels.clear()
        self._stage, self._inputs = None, ()

    def finish(self) -> None:
        """Ends a step, and warns if the loss is no mean."""
        text = (self._fault() or self._fault_in_labels()) if len(self._parts) == 2 and self._before is not None else ""
        self.clear()
        if text:
            self.is_on = False
            warn_user(text, LossWarning)

    def _fault(self) -> str:
        """Returns why the loss is no mean over samples, empty if it is or cannot be compared."""
        assert self._before is not None
        with suppress(Exception):  # a loss may raise anything when it is called once more
            parts = [part._replace(output=_mapped(part.output, lambda tensor: tensor.to(self._device))) for part in self._parts]
            difference = _Calls(self._loss_fn, self._device, self._before).compare(parts)
            return "" if difference is None else _text(*difference, self._parts)
        return ""

    def _fault_in_labels(self) -> str:
        """Returns which weights a mean over labels that are not ignored needs, empty if it has them or cannot be compared."""
        with suppress(Exception):  # so may a stage
            unequal = self._labels.found()
            return "" if unequal is None else _text_of_labels(unequal)
        return ""

    @contextmanager
    def _stage_alone(self) -> Iterator[None]:
        """A context of calls of the last stage without effects on the run."""
        assert self._stage is not None
        module = self._stage.module
        with ExitStack() as stack:
            stack.enter_context(values_restored(list(module.modules()), ()))
            stack.enter_context(PythonState(module, self._loss_fn).restored())
            stack.enter_context(torch.no_grad())
            stack.enter_context(_Alone())  # type: ignore[no-untyped-call]
            yield

    def _loss_of_stage(self, inputs: Tensors, target: Any) -> Tensor:
        """Returns the loss of the last stage for these inputs, with the same random numbers in each call."""
        assert self._stage is not None
        with states_restored(None, self._device):
            (loss,) = self._stage.infer(inputs, lambda output: self._loss_fn(output, target))
        return loss


class _Calls:
    """Calls `loss_fn` without effects on the run. The state `before` is the one before the step called it."""

    def __init__(self, loss_fn: Any, device: torch.device, before: Snapshot) -> None:
        self._loss_fn = loss_fn
        self._device = device
        module = loss_module(loss_fn)
        self._modules = [] if module is None else list(module.modules())
        self._parameters = [] if module is None else list(module.parameters())
        places = list(changed(before).values())
        self._changes_state = bool(places)
        if any(map(_is_lost, places)) or any(local_part(parameter) is not parameter for parameter in self._parameters):
            raise _IncomparableError

    def compare(self, parts: Sequence[_Part]) -> tuple[float, float] | None:
        """Returns the loss of the `parts` together and the mean of their losses, None if both are equal."""
        rounding = _rounding_of([(part.output, part.loss) for part in parts], self._device)
        mean = _mean(parts, [float(part.loss) for part in parts])
        wholes = []
        for whole in self._losses_of_both(parts):
            if _are_near(whole, mean, rounding):
                return None
            wholes.append(whole)
        mean = _mean(parts, [self._loss(_mapped(part.output, Tensor.clone), _mapped(part.target, Tensor.clone)) for part in parts])
        return (wholes[0], mean[0]) if wholes and not any(_are_near(whole, mean, rounding) for whole in wholes) else None

    def _losses_of_both(self, parts: Sequence[_Part]) -> Iterator[float]:
        """Yields the loss of two parts together, for each way to join them that works."""
        for by_views, keeps_equal in product((False, True), repeat=2):
            with suppress(Exception):  # a loss may raise anything for samples that it does not expect
                yield self._loss(*_joined(parts, by_views=by_views, keeps_equal=keeps_equal))

    def _loss(self, output: Any, target: Any) -> float:
        with ExitStack() as stack:
            stack.enter_context(values_restored(self._modules, self._parameters))
            if self._changes_state:
                stack.enter_context(PythonState(self._loss_fn).restored())
            stack.enter_context(_drawing_nothing(self._device))
            stack.enter_context(torch.no_grad())
            stack.enter_context(collecting_losses())
            stack.enter_context(_Alone())  # type: ignore[no-untyped-call]
            loss = float(self._loss_fn(output, target))
        if not isfinite(loss):
            raise _IncomparableError
        return loss


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which a collective is an error: other ranks would not join it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace in _COLLECTIVES or any(hasattr(kind, "to_local") for kind in types):
            raise _IncomparableError
        return func(*args, **(kwargs or {}))


@contextmanager
def _drawing_nothing(device: torch.device) -> Iterator[None]:
    """A context in which drawing random numbers is an error, at its end. Restores the generators."""
    before = RandomStates.now(device)
    try:
        yield
        if not RandomStates.now(device).is_same_as(before):
            raise _IncomparableError
    finally:
        before.set(RandomStates.now(device))


def _chosen(weights: Mapping[int, float], share: float) -> tuple[int, ...]:
    """Returns the microbatch of the largest weight and a second one, at this `share` of the others in the order of weights.

    Of equal weights, the first microbatch is the largest, and the last one is the smallest. Returns none if there is only one microbatch,
    and if all weigh nothing.
    """
    order = sorted(weights, key=lambda microbatch: (weights[microbatch], -microbatch))
    if len(order) < 2 or not weights[order[-1]]:
        return ()
    return order[-1], order[round(share * (len(order) - 2))]


def _is_lost(place: Place) -> bool:
    """Returns whether a place that a loss changes cannot be put back, or is a random generator."""
    is_uncopied = isinstance(place, Elements) and place.read()[1] is None
    return is_uncopied or isinstance(place, Position) or generator_place("", place.owner) is not None


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a pytree with each tensor changed."""
    tensors, structure = flatten_pytree(value, opaque=True)
    return unflatten_pytree(structure, iter([change(tensor) for tensor in tensors]))


def _mean(parts: Sequence[_Part], losses: Sequence[float]) -> tuple[float, float]:
    """Returns the weighted mean of `losses`, and the largest size of a term."""
    terms = [part.weight * loss / sum(other.weight for other in parts) for part, loss in zip(parts, losses, strict=True)]
    return sum(terms), max(map(abs, terms))


def _are_near(whole: float, mean: tuple[float, float], rounding: float) -> bool:
    if not isfinite(mean[0]):
        raise _IncomparableError
    return abs(whole - mean[0]) <= rounding * max(abs(whole), *map(abs, mean))


def _rounding_of(values: Any, device: torch.device) -> float:
    if torch.is_autocast_enabled(device.type):
        return _MOST_ROUNDING
    dtypes = {tensor.dtype for tensor in flatten_pytree(values, opaque=True)[0] if tensor.is_floating_point()}
    rounding = max(_ROUNDING.get(dtype, _MOST_ROUNDING) for dtype in dtypes)
    return max(rounding, _OF_TENSOR_CORES) if not is_host(device) and dtypes != {torch.float64} else rounding


def _joined(parts: Sequence[_Part], *, by_views: bool, keeps_equal: bool) -> tuple[Any, Any]:
    """Returns the output and the target of both parts.

    A tensor with several rows for each sample has them sample by sample or, `by_views`, as torch.cat joins views of all samples. With
    `keeps_equal`, tensors that are equal in both have no batch, such as prototypes.
    """
    first, second = parts
    both = [(part.output, part.target) for part in parts]
    if any(_lists_samples(value, part.size) for value, part in zip(both, parts, strict=True)):
        raise _IncomparableError
    (ours, structure), (theirs, other) = (flatten_pytree(value, opaque=True) for value in both)
    if structure != other or len(ours) != len(theirs):
        raise _IncomparableError
    if len(ours) < len({id(tensor) for _, tensor in tensors_inside(both[0])}):  # others are in objects that stay whole, such as ModelOutput
        raise _IncomparableError
    sizes = first.size, second.size
    joined = [
        _joined_tensor(tensor, another, sizes, by_views=by_views, keeps_equal=keeps_equal)
        for tensor, another in zip(ours, theirs, strict=True)
    ]
    output, target = unflatten_pytree(structure, iter(joined))
    return output, target


def _lists_samples(value: Any, size: int) -> bool:
    """Returns whether a list in `value` may have an entry for each sample, such as the targets of detection."""
    if isinstance(value, Mapping):
        return any(_lists_samples(item, size) for item in value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return (isinstance(value, list) and len(value) == size) or any(_lists_samples(item, size) for item in value)


def _joined_tensor(tensor: Tensor, other: Tensor, sizes: tuple[int, int], *, by_views: bool, keeps_equal: bool) -> Tensor:
    """Returns one tensor for both microbatches. Tensors without a batch are equal in both, such as a temperature."""
    if type(tensor) is not type(other) or tensor.is_nested or hasattr(tensor, "to_local") or tensor.dim() != other.dim():
        raise _IncomparableError
    are_equal = tensor.shape == other.shape and torch.equal(tensor, other)
    has_batch = tensor.dim() > 0 and not (are_equal and keeps_equal)
    joined = _along_batch(tensor, other, sizes, by_views=by_views) if has_batch else None
    if joined is None and not are_equal:
        raise _IncomparableError
    return tensor.clone() if joined is None else joined


def _along_batch(tensor: Tensor, other: Tensor, sizes: tuple[int, int], *, by_views: bool) -> Tensor | None:
    """Returns both tensors joined along a dimension with the sizes of the microbatches or a multiple of them; None if they have none."""
    having = [dim for dim, lengths in enumerate(zip(tensor.shape, other.shape, strict=True)) if lengths == sizes]
    if len(having) == 1 or 0 in having:
        return torch.cat([tensor, other], having[0])
    rows = len(tensor) // sizes[0]
    if rows < 2 or (len(tensor), len(other)) != (rows * sizes[0], rows * sizes[1]):
        return None
    views = zip(tensor.chunk(rows), other.chunk(rows), strict=True) if by_views else [(tensor, other)]
    return torch.cat([tensor for view in views for tensor in view])


_MEANT = "If the accumulation is meant, ignore zb.errors.LossWarning (docs/losses.md)"


def _text(whole: float, mean: float, parts: Sequence[_Part]) -> str:
    first, second = parts
    return (
        f"loss_fn is not a mean over samples with these weights: it returns {whole:.6g} for microbatches {first.microbatch} and "
        f"{second.microbatch} together, and {mean:.6g} is the mean of what it returns for each, with weights {first.weight:g} and "
        f"{second.weight:g}. So this pipeline trains as one device that accumulates gradients over the microbatches, not as one that takes "
        "the whole batch. If samples or targets are weighted or ignored, give the weights of a microbatch as loss_weight=, such as lambda "
        "target: (target != -100).sum(). A sum needs scale='none'. A loss over the whole batch, such as one that compares samples, needs "
        "num_microbatches=1. A sum over count.clamp(min=1) needs scale='none' and the count of the whole batch, or num_microbatches=1. "
        f"{_MEANT}"
    )


def _text_of_labels(unequal: IgnoredLabels) -> str:
    (first, second), (ours, theirs), (our_weight, their_weight) = unequal.microbatches, unequal.counts, unequal.weights
    labels = "labels[..., 1:]" if unequal.are_shifted else "labels"
    return (
        f"the loss is a mean over labels other than {unequal.ignored}, of which microbatches {first} and {second} have {ours} and "
        f"{theirs}, but their weights are {our_weight:g} and {their_weight:g}. So this pipeline trains as one device that accumulates "
        "gradients over the microbatches, not as one that takes the whole batch. Give the labels as targets, and "
        f"loss_weight=lambda labels: ({labels} != {unequal.ignored}).sum(). {_MEANT}"
    )
