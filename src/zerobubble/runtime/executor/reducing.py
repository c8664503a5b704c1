"""What a rank does about gradients that FSDP2 reduces beside its passes: start reductions, and end them when they are there.

All ranks that hold parts of the same weights must start the same messages between them in one order, while how far each of them has got
in a pass differs. Gathers start at fixed places of the row. So reductions start in an order of their own: stage after stage as their last
passes stand in the row and module after module, each when its gradients are complete, but as long as gathers are to come only when the
last pass of the stage is over, which is a fixed place, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from torch import nn

from zerobubble.runtime.stage.reduction import Reduction
from zerobubble.runtime.stage.shards import Part, Shards
from zerobubble.runtime.stage.stage import Stage

Record = Callable[[int, int, int], object]
"""Notes that gradients of a stage were reduced from one time to another, in `perf_counter_ns`."""


class Reducing:
    """The reductions of one step for the `stages` that FSDP2 divides, in the order of their last passes in the row.

    `gathers_are_over` says whether this step starts no gather any more. `done` is called with each stage whose gradients are reduced,
    between two passes, and `record` with the time of every reduction that is known.
    """

    def __init__(
        self, stages: Sequence[Stage], gathers_are_over: Callable[[], bool], done: Callable[[int], object], record: Record
    ) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._gathers_are_over = gathers_are_over
        self._done = done
        self._record = record
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing is complete."""
        self._unstarted: dict[int, deque[Part] | None] = dict.fromkeys(self._stages)
        self._over: set[int] = set()
        self._complete: set[nn.Parameter] = set()
        self._started: dict[int, list[Reduction]] = {index: [] for index in self._stages}
        self._last: Reduction | None = None
        self._free = 0

    def complete(self, parameters: Collection[nn.Parameter]) -> None:
        """Nothing adds to the gradients of these parameters any more, which are gathered weights."""
        self._complete.update(parameters)
        self._start()

    def last_pass_is_over(self, stage: int) -> None:
        """Nothing adds to the gradients of this stage any more."""
        self._over.add(stage)
        self._start()

    def _start(self) -> None:
        """Start the reductions whose turn it is."""
        while self._unstarted:
            index = next(iter(self._unstarted))
            parts = self._unstarted[index]
            if parts is None:
                if index not in self._over and not self._gathers_are_over():
                    return
                parts = self._unstarted[index] = deque(self._shards(index).parts)
            while parts and self._may_start(index, parts[0]):
                self._start_part(index, parts.popleft())
            if index not in self._over:
                return
            del self._unstarted[index]

    def _may_start(self, index: int, part: Part) -> bool:
        return index in self._over or (self._gathers_are_over() and self._complete.issuperset(part.parameters))

    def _start_part(self, index: int, part: Part) -> None:
        for reduction in self._shards(index).start(part, self._last):
            self._started[index].append(reduction)
            self._last = reduction

    def _shards(self, index: int) -> Shards:
        shards = self._stages[index].shards
        assert shards is not None
        return shards

    def poll(self) -> None:
        """End the reductions of the stages that are over by now."""
        while self._is_next_over():
            self._end_next()

    def finish(self) -> None:
        """The passes of the step are over: wait for all reductions and end them."""
        while self._started:
            self._end_next()

    def _is_next_over(self) -> bool:
        if not self._started:
            return False
        index = next(iter(self._started))
        return index not in self._unstarted and all(reduction.is_over for reduction in self._started[index])

    def _end_next(self) -> None:
        index = next(iter(self._started))
        assert index not in self._unstarted
        for reduction in self._started[index]:
            reduction.wait()
            if reduction.times is not None:
                began, ended = reduction.times
                self._record(index, max(began, self._free), ended)
                self._free = ended
        del self._started[index]
        self._stages[index].end_reductions()
        self._done(index)
