"""Runs the last W's of a stage parameter by parameter instead of microbatch by microbatch.

The gradients of the first parameters are then complete while W's still run, so their reduction over replicas can overlap. Each parameter's
gradients are added in the order of the microbatches, as in separate W's, so the sums are bitwise equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from zerobubble.runtime.split.layers.weight_work import Entries, WeightWork

Complete = Callable[[Collection[nn.Parameter]], object]
"""Called with parameters whose gradients are complete for the step."""


class _Unit(NamedTuple):
    """The gradient of one microbatch for one parameter or a part of it. `size` estimates its time; `completes` are the parameters it
    completes.
    """

    work: WeightWork
    entries: Entries
    size: int
    completes: tuple[nn.Parameter, ...]


class WeightTail:
    """The weight work `works` of the last microbatches of a step, run in equally many parts of about the same size.

    Parameters are processed in the order of `parameters`, and `complete` is called for each as soon as its gradient is complete.
    """

    def __init__(self, works: Sequence[WeightWork], parameters: Sequence[nn.Parameter], complete: Complete) -> None:
        self._complete = complete
        self._parts_left = len(works)
        self._units = deque(_units(works, parameters))
        self._size_left = sum(unit.size for unit in self._units)
        waiting = {id(entries[0].weight) for work in works for entries in work.waiting()}
        self._at_once = [parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in waiting]
        for work in works:
            work.hand_over()

    @property
    def held(self) -> list[Tensor]:
        """Returns the tensors kept for the remaining work."""
        return [tensor for unit in self._units for entry in unit.entries for tensor in entry.held]

    @property
    def is_over(self) -> bool:
        """Whether all parts are done."""
        return self._parts_left == 0

    def run_part(self) -> None:
        """Runs the next part, as one W."""
        if self._at_once:
            self._complete(self._at_once)
            self._at_once = []
        rest = self._size_left - self._size_left // self._parts_left
        self._parts_left -= 1
        while self._units and (self.is_over or self._size_left > rest):
            unit = self._units.popleft()
            self._size_left -= unit.size
            unit.work.add(unit.entries)
            if unit.completes:
                self._complete(unit.completes)


def _units(works: Sequence[WeightWork], parameters: Sequence[nn.Parameter]) -> Iterator[_Unit]:
    """Yields the units of all works, by parameter and then by microbatch."""
    of_weight: dict[int, list[tuple[WeightWork, Entries]]] = {id(parameter): [] for parameter in parameters}
    for work in works:
        for entries in work.waiting():
            of_weight[id(entries[0].weight)].append((work, entries))
    for parameter in parameters:
        units = of_weight[id(parameter)]
        for number, (work, entries) in enumerate(units, 1):
            size = sum(tensor.numel() for entry in entries for tensor in entry.held)
            yield _Unit(work, entries, size, (parameter,) if number == len(units) else ())
