"""The loss function of Fabric's strategy: the user's, whose values for microbatches are compared with one call for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.integrations.batches import with_new_containers
from zerobubble.integrations.lightning.comparison import ComparedSteps, Fault, loss_fault, tolerance_of
from zerobubble.integrations.lightning.draws import BatchDraws
from zerobubble.integrations.lightning.logs import Parts
from zerobubble.integrations.lightning.network_numbers import NetworkNumbers
from zerobubble.runtime.frameworks import join_outputs


class MicrobatchLosses(partial):  # type: ignore[type-arg]
    """`loss_fn(output, targets)` of the user, as a partial of it, so that a pipeline finds its parameters.

    Attributes:
        steps: Which training steps are compared.
        weight: The weight of a microbatch for the pipeline, by its targets; None for the number of samples.
    """

    steps: ComparedSteps
    weight: Callable[[Any], Any] | None

    def __new__(cls, loss_fn: Callable[[Any, Any], Tensor], loss_weight: Callable[[Any], Any] | str | None) -> MicrobatchLosses:
        losses = super().__new__(cls, loss_fn)
        losses.steps = ComparedSteps()
        losses._is_sum = loss_weight == "sum"
        losses.weight = (lambda targets: 1) if isinstance(loss_weight, str) else loss_weight
        losses._sizes, losses._keeps, losses._calls = [], False, []
        return losses

    _is_sum: bool
    _sizes: Sequence[int]
    _keeps: bool
    _calls: list[tuple[Any, Any, float]]
    _draws: BatchDraws

    def begin(self, sizes: Sequence[int]) -> bool:
        """Begins a training step with microbatches of these sizes, and returns whether it is compared."""
        self._keeps = self.steps.count(sum(sizes)) and len(sizes) > 1
        self._sizes, self._calls, self._draws = sizes, [], BatchDraws(sizes, "loss_fn")
        return self._keeps

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """Returns the loss of a microbatch."""
        if not self._keeps:
            loss = super().__call__(output, targets)
        else:
            with self._draws.of_microbatch(len(self._calls), in_loss=True):
                loss = super().__call__(output, with_new_containers(targets))
            self._calls.append((pytree.tree_map_only(Tensor, torch.Tensor.detach, output), targets, float(loss.detach())))
        return loss * len(self._sizes) if self._is_sum and torch.is_grad_enabled() else loss

    @property
    def outputs(self) -> list[Any]:
        """The outputs of the microbatches; none on ranks without losses."""
        return [output for output, _, _ in self._calls]

    def parts(self) -> Parts:
        """Returns the losses of the microbatches and their weights."""
        weights = self._sizes if self.weight is None else [float(self.weight(targets)) for _, targets, _ in self._calls]
        return Parts([], self._sizes, weights, [loss for *_, loss in self._calls], self._is_sum)

    @torch.no_grad()
    def fault(self, numbers: NetworkNumbers, device: torch.device) -> dict[str, Any] | None:
        """Returns what differs from one call for the whole batch, as a dict; None for no difference, and on ranks without losses."""
        self._keeps = False
        if not self._calls:
            return None
        parts = self.parts()
        output = numbers.placed(join_outputs(numbers.marked(self.outputs, parts), self._sizes, takes_first=True), "the module", device)
        targets = join_outputs([targets for _, targets, _ in self._calls], self._sizes, takes_first=True)
        try:
            with self._draws.joined():
                whole = super().__call__(output, targets)
        except InputError as error:
            return Fault(str(error), kind="raised")._asdict()
        tolerance = max(tolerance_of(self.outputs), tolerance_of(whole))
        fault = loss_fault(float(whole), parts, tolerance, draws=any(self._draws.parts.values()))
        return None if fault is None else fault._asdict()
