"""Reduces the gradients of stages sharded by FSDP2 while passes run: starts each reduction, and finishes it once it is complete.

All ranks that hold shards of the same weights must start the same collectives in the same order, or they deadlock. But ranks are at
different points within a pass. All-gathers start at fixed places of the row. So reductions have a fixed order: stage by stage in the order
of their last passes, and module by module, each as soon as its gradients are complete. While gathers are still to come, they start only
after the last pass of the stage, which is a fixed place too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from torch import nn

from zerobubble.runtime.measure.clock import Instant
from zerobubble.runtime.stage.reduction import Reduction
from zerobubble.runtime.stage.shards import Part, Shards
from zerobubble.runtime.stage.stage import Stage

RecordReduction = Callable[[int, Instant, Instant], object]
"""Records that gradients of a stage were reduced from one time to another, on the clock of the device."""


class ShardReductions:
    """The reductions of one step for `stages` sharded by FSDP2, in the order of their last passes in the row.

    `gathers_are_over` returns whether this step starts no further all-gather. `done` is called with each stage whose gradients are reduced,
    between two passes, and `record` with the time of every reduction that reports one.
    """

    def __init__(
        self, stages: Sequence[Stage], gathers_are_over: Callable[[], bool], done: Callable[[int], object], record: RecordReduction
    ) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._gathers_are_over = gathers_are_over
        self._done = done
        self._record = record
        self.begin()

    def begin(self) -> None:
        """Begins a step: no gradients are complete."""
        self._unstarted: dict[int, deque[Part] | None] = dict.fromkeys(self._stages)
        self._over: set[int] = set()
        self._complete: set[nn.Parameter] = set()
        self._started: dict[int, list[Reduction]] = {index: [] for index in self._stages}
        self._last: Reduction | None = None

    def complete(self, parameters: Collection[nn.Parameter]) -> None:
        """Records that the gradients of these gathered weights are final."""
        self._complete.update(parameters)
        self._start()

    def last_pass_is_over(self, stage: int) -> None:
        """Records that the gradients of this stage are final."""
        self._over.add(stage)
        self._start()

    def _start(self) -> None:
        """Starts all reductions that may start by now, in their order."""
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
        """Finishes the stages whose reductions are complete."""
        while self._is_next_over():
            self._end_next()

    def finish(self) -> None:
        """Waits for all reductions, after the passes of the step, and finishes them."""
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
                self._record(index, *reduction.times)
        del self._started[index]
        self._stages[index].end_reductions()
        self._done(index)
