"""All-gathers sharded weights around the steps of a row: starts gathers, waits for them, and frees gathered weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from zerobubble.gathers import RankGathers, gathers_of
from zerobubble.ir import Step
from zerobubble.runtime.executor.row_calls import RowCalls
from zerobubble.runtime.stage.shards import Shards
from zerobubble.runtime.stage.stage import Stage


class WeightGathers:
    """The calls around each of the `steps` that a rank runs on its `stages`, within `memory` bytes for gathered weights.

    Without `memory`, each stage is gathered once. Raises `InputError`, with the rank as `where`, if the weights of one step do not fit.
    """

    def __init__(self, steps: Sequence[Step], stages: Mapping[int, Stage], memory: int | None, where: str) -> None:
        self._shards = {index: stage.shards for index, stage in stages.items() if stage.shards is not None}
        weights = {index: shards.bytes for index, shards in self._shards.items()}
        memory = sum(weights.values()) if memory is None else memory
        self.plan: RankGathers = gathers_of(steps, weights, [memory] * len(steps), where)
        self.calls = RowCalls()
        self._to_come = 0
        for gather in self.plan.gathers:
            self.calls.before[gather.begins].append(partial(self._gather, self._shards[gather.stage]))
        for gather in self.plan.gathers:
            self.calls.before[gather.needed].append(stages[gather.stage].use_gathered)
            self.calls.after[gather.ends].append(stages[gather.stage].release)

    def _gather(self, shards: Shards) -> None:
        self._to_come -= 1
        shards.gather()

    @property
    def is_over(self) -> bool:
        """Whether all gathers of this step of the pipeline have started."""
        return self._to_come == 0

    def begin(self, *, trains: bool) -> None:
        """Begins a step of the pipeline."""
        self._to_come = len(self.plan.gathers)
        for shards in self._shards.values():
            shards.begin(trains=trains)

    def discard(self) -> None:
        """Frees gathered weights before the step starts over: their shards may have changed."""
        self._to_come = len(self.plan.gathers)
        for shards in self._shards.values():
            shards.release()

    def close(self) -> None:
        """Frees everything. There are no more steps, and the last one may have failed."""
        for shards in self._shards.values():
            shards.close()
