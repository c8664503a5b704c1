"""What a rank does around the last passes of its row that add to the gradients of each stage, beside running them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import nn

from zerobubble.ir import Op
from zerobubble.kinds import traits_of
from zerobubble.program import Action, Compute
from zerobubble.reductions import weight_tails
from zerobubble.runtime.executor.gathering import Gathering
from zerobubble.runtime.executor.reducing import Record, Reducing
from zerobubble.runtime.stage.stage import Stage

Call = Callable[[], object]


class RowListener(Protocol):
    """Who is told how far a row has come, between two steps or within a W: which step is the next, which gradients are complete."""

    def row_goes_on(self, number: int) -> None:
        """The rank is about to wait for what step `number` of its row uses."""

    @property
    def takes_gradients_early(self) -> bool:
        """Whether the last W's of a stage are to go parameter by parameter, where its split can do that."""

    def gradients_are_complete(self, stage: int, parameters: Collection[nn.Parameter]) -> None:
        """No pass of the step adds to the gradients of these parameters any more; W's of the stage are still to run."""

    def stage_is_done(self, stage: int) -> None:
        """The last pass has run that adds to the gradients of the stage."""


class Endings:
    """The calls around the actions of a row, whose stages are `stages`; `listener` is told of gradients.

    Gradients that FSDP2 reduces are reduced beside what comes after their last pass; `gathering` says which gathers are still to come, and
    `record` notes when reductions were made. Of these stages the listener is told when they are reduced, between two passes or at the end.
    """

    def __init__(
        self, row: Sequence[Action], stages: Mapping[int, Stage], gathering: Gathering, listener: RowListener | None, record: Record
    ) -> None:
        self._before: dict[int, list[Call]] = defaultdict(list)
        self._after: dict[int, list[Call]] = defaultdict(list)
        self._stages = stages
        self._listener = listener
        passes = [
            (place, op, len(action.step) > 1) for place, action in enumerate(row) if isinstance(action, Compute) for op in action.step
        ]
        last = _last_places(passes)
        sharded = [stages[stage] for stage in last if stages[stage].shards is not None]
        self._reducing = Reducing(sharded, lambda: gathering.is_over, self._tell_done, record)
        overlapped = [number for number, (_, _, is_overlapped) in enumerate(passes) if is_overlapped]
        tails = weight_tails([op for _, op, _ in passes], overlapped) if listener is not None else {}
        for stage, numbers in tails.items():
            first, *_ = numbers
            microbatches = tuple(passes[number][1].microbatch for number in numbers)
            self._before[passes[first][0]].append(partial(self._begin_tail, stage, microbatches))
        for stage, place in last.items():
            self._after[place].append(partial(self._last_pass_is_over, stage))
        for place in sorted({place for place, _, _ in passes}) if sharded else ():
            if place > last[sharded[0].index]:
                self._after[place].append(self._reducing.poll)

    def _last_pass_is_over(self, stage: int) -> None:
        if self._stages[stage].shards is None:
            self._tell_done(stage)
        else:
            self._reducing.last_pass_is_over(stage)

    def _tell_done(self, stage: int) -> None:
        if self._listener is not None:
            self._listener.stage_is_done(stage)

    def _begin_tail(self, stage: int, microbatches: tuple[int, ...]) -> None:
        assert self._listener is not None
        shards = self._stages[stage].shards
        if shards is not None and len(shards.parts) > 1:
            self._stages[stage].begin_tail(microbatches, self._reducing.complete)
        elif shards is None and self._listener.takes_gradients_early:
            self._stages[stage].begin_tail(microbatches, partial(self._listener.gradients_are_complete, stage))

    def begin(self) -> None:
        """The row begins."""
        self._reducing.begin()

    def finish(self) -> None:
        """The row is over: wait for what is reduced beside it."""
        self._reducing.finish()

    def around(self, place: int, call: Call) -> Call:
        """The call of the action at this place of the row, with those before and after it."""
        before, after = self._before.get(place, []), self._after.get(place, [])
        return partial(_all, (*before, call, *after)) if before or after else call


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _last_places(passes: Sequence[tuple[int, Op, bool]]) -> dict[int, int]:
    """Where in the row the last pass of each stage is that adds to its gradients, the first of these places first."""
    last = {op.stage: place for place, op, _ in passes if traits_of(op.kind).adds_gradients}
    return dict(sorted(last.items(), key=lambda item: item[1]))
