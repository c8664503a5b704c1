"""What a rank does about weights that lie in shards beside the steps of its row: gather them, wait for them, let them go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from zerobubble.gathers import RankGathers, gathers_of
from zerobubble.ir import Step
from zerobubble.runtime.stage.shards import Shards
from zerobubble.runtime.stage.stage import Stage

Call = Callable[[], object]


class Gathering:
    """The calls beside each of the `steps` that a rank plays on its `stages`, with `memory` bytes for gathered weights.

    Without `memory` each stage is gathered once. Raises `InputError`, which names the rank as `where`, where the weights of a step do not
    fit.
    """

    def __init__(self, steps: Sequence[Step], stages: Mapping[int, Stage], memory: int | None, where: str) -> None:
        self._shards = {index: stage.shards for index, stage in stages.items() if stage.shards is not None}
        weights = {index: shards.bytes for index, shards in self._shards.items()}
        room = sum(weights.values()) if memory is None else memory
        self.plan: RankGathers = gathers_of(steps, weights, [room] * len(steps), where)
        self._before: dict[int, list[Call]] = defaultdict(list)
        self._after: dict[int, list[Call]] = defaultdict(list)
        self._to_come = 0
        for gather in self.plan.gathers:
            self._before[gather.begins].append(partial(self._gather, self._shards[gather.stage]))
        for gather in self.plan.gathers:
            self._before[gather.needed].append(stages[gather.stage].use_gathered)
            self._after[gather.ends].append(stages[gather.stage].release)

    def _gather(self, shards: Shards) -> None:
        self._to_come -= 1
        shards.gather()

    @property
    def is_over(self) -> bool:
        """Whether the step starts to gather nothing more."""
        return self._to_come == 0

    def around(self, number: int, call: Call) -> Call:
        """The call of step `number`, with those before and after it."""
        before, after = self._before.get(number, []), self._after.get(number, [])
        if not before and not after:
            return call
        calls = (*before, call, *after)

        def run() -> None:
            for each in calls:
                each()

        return run

    def begin(self, *, trains: bool) -> None:
        """A step of the pipeline begins."""
        self._to_come = len(self.plan.gathers)
        for shards in self._shards.values():
            shards.begin(trains=trains)

    def discard(self) -> None:
        """A step of the pipeline will start over, with weights that may have changed since they were gathered."""
        self._to_come = len(self.plan.gathers)
        for shards in self._shards.values():
            shards.release()

    def close(self) -> None:
        """There are no more steps; the last one may have failed."""
        for shards in self._shards.values():
            shards.close()
