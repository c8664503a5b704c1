"""Detects when the gradients of a stage, or of some of its parameters, are complete, and reports it while the row goes on.

Gradients may only be used after the last pass that adds to them. The row is fixed, so the last places are known when the executor is built,
and checking for them costs nothing during a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import nn

from zerobubble.ir import Op
from zerobubble.kinds import traits_of
from zerobubble.program import Action, Compute
from zerobubble.reductions import weight_tails
from zerobubble.runtime.executor.row_calls import RowCalls
from zerobubble.runtime.executor.shard_reductions import RecordReduction, ShardReductions
from zerobubble.runtime.executor.weight_gathers import WeightGathers
from zerobubble.runtime.stage.stage import Stage


class RowListener(Protocol):
    """Observes the progress of a row, between two steps and within a W."""

    def before_step_of_row(self, number: int) -> None:
        """Called before the rank waits for the inputs of step `number` of its row."""

    @property
    def takes_gradients_early(self) -> bool:
        """Whether the last W's of a stage should run parameter by parameter, if its split supports that."""

    def gradients_are_complete(self, stage: int, parameters: Collection[nn.Parameter]) -> None:
        """Called when no pass of the step adds to the gradients of these parameters any more, while W's of the stage still have to run."""

    def stage_is_done(self, stage: int) -> None:
        """Called after the last pass that adds to the gradients of the stage."""


class GradientCompletion:
    """The calls around the actions of a row, on these `stages`, that report complete gradients to `listener`.

    FSDP2 reduces the gradients of its stages while later passes run. `gathers` says which all-gathers are still to come, and `record` notes
    the times of reductions. For these stages the listener is called once their reductions are over, between two passes or at the end.
    """

    def __init__(
        self,
        row: Sequence[Action],
        stages: Mapping[int, Stage],
        gathers: WeightGathers,
        listener: RowListener | None,
        record: RecordReduction,
    ) -> None:
        self.calls = RowCalls()
        self._stages = stages
        self._listener = listener
        passes = [
            (place, op, len(action.step) > 1) for place, action in enumerate(row) if isinstance(action, Compute) for op in action.step
        ]
        last = _last_places(passes)
        sharded = [stages[stage] for stage in last if stages[stage].shards is not None]
        self._reductions = ShardReductions(sharded, lambda: gathers.is_over, self._report_done, record)
        overlapped = [number for number, (_, _, is_overlapped) in enumerate(passes) if is_overlapped]
        tails = weight_tails([op for _, op, _ in passes], overlapped) if listener is not None else {}
        for stage, numbers in tails.items():
            first, *_ = numbers
            microbatches = tuple(passes[number][1].microbatch for number in numbers)
            self.calls.before[passes[first][0]].append(partial(self._begin_tail, stage, microbatches))
        for stage, place in last.items():
            self.calls.after[place].append(partial(self._last_pass_is_over, stage))
        for place in sorted({place for place, _, _ in passes}) if sharded else ():
            if place > last[sharded[0].index]:
                self.calls.after[place].append(self._reductions.poll)

    def _last_pass_is_over(self, stage: int) -> None:
        if self._stages[stage].shards is None:
            self._report_done(stage)
        else:
            self._reductions.last_pass_is_over(stage)

    def _report_done(self, stage: int) -> None:
        if self._listener is not None:
            self._listener.stage_is_done(stage)

    def _begin_tail(self, stage: int, microbatches: tuple[int, ...]) -> None:
        assert self._listener is not None
        shards = self._stages[stage].shards
        if shards is not None and len(shards.parts) > 1:
            self._stages[stage].begin_tail(microbatches, self._reductions.complete)
        elif shards is None and self._listener.takes_gradients_early:
            self._stages[stage].begin_tail(microbatches, partial(self._listener.gradients_are_complete, stage))

    def begin(self) -> None:
        """Begins a row."""
        self._reductions.begin()

    def finish(self) -> None:
        """Waits for pending reductions, at the end of the row."""
        self._reductions.finish()


def _last_places(passes: Sequence[tuple[int, Op, bool]]) -> dict[int, int]:
    """Returns the position in the row of the last pass of each stage that adds to its gradients, in ascending order."""
    last = {op.stage: place for place, op, _ in passes if traits_of(op.kind).adds_gradients}
    return dict(sorted(last.items(), key=lambda item: item[1]))
