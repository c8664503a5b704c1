"""Finds the passes, messages and sums over replicas of a rank in each training step, from its events."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zerobubble.errors import InputError, ParseError
from zerobubble.export.torch_cells import Cell, MessageEnd, WeightAction, Weights, parse_cell
from zerobubble.ir import Kind, Op, Step
from zerobubble.kinds import SENT_BETWEEN_STAGES, traits_of
from zerobubble.timeline import Doing, ReplicaSum
from zerobubble.traces.file import RankTrace, step_number
from zerobubble.traces.times import Action, TraceTimes, times_of

_WITHOUT_STAGE = {"Forward": Kind.F, "Backward": Kind.BW}
"""The ranges of PyTorch's GPipe, which name a microbatch but no stage, since each rank has one stage."""
ONLY_STAGE = 10**9
"""Stands for the stage of a rank whose ranges do not name it."""


class Ran(NamedTuple):
    """A step of a row as it ran, in ns since the epoch by the clock of its machine."""

    step: Step
    start: int
    end: int


class Moved(NamedTuple):
    """A message that a rank sent, or waited for until `end`."""

    doing: Doing
    cell: MessageEnd
    start: int
    end: int


@dataclass
class RankStep:
    """The passes of a rank in one training step. `label` is the profiler's step number, or None if the trace has none."""

    label: int | None
    ran: list[Ran] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    sums: list[ReplicaSum] = field(default_factory=list)

    @property
    def ops(self) -> list[Op]:
        """The passes in their order."""
        return [op for ran in self.ran for op in ran.step]


class RankRun(NamedTuple):
    """All training steps of a rank, the `clock` of their times ("host" or "kernels"), and notes on missing data."""

    trace: RankTrace
    steps: list[RankStep]
    clock: str
    notes: list[str]


def run_of(trace: RankTrace) -> RankRun:
    """Returns the passes of the rank of `trace`. Raises `InputError` if its ranges name no pass."""
    actions, notes = _actions(trace)
    if not any(action.step for action in actions):
        raise InputError("{file} has ranges of messages and weights but of no pass, such as PP:2F0: record whole steps", file=trace.file)
    times = times_of(trace, actions)
    steps = [_filled(label, part, times) for label, part in _cut(trace, actions)]
    return RankRun(trace, [step for step in steps if step.ran], times.name, notes + times.notes())


def _actions(trace: RankTrace) -> tuple[list[Action], list[str]]:
    """The ranges as actions, in their order, and a note on unknown ranges."""
    actions: list[Action] = []
    unknown: Counter[str] = Counter()
    is_named = any(event.name.startswith("PP:") for event in trace.passes)
    for event in (event for event in trace.passes if event.name.startswith("PP:") is is_named):
        try:
            cell = _cell(event.name)
        except ParseError:
            unknown[event.name] += 1
            continue
        if actions and actions[-1].cell == cell and event.start < actions[-1].end:
            actions[-1] = actions[-1]._replace(begins=event.start)
        else:
            actions.append(Action(cell, event.start, event.end))
    some = ", ".join(list(unknown)[:3])
    return actions, [f"{trace.file}: {unknown.total()} ranges that are no known action were left out: {some}"] if unknown else []


def _cell(name: str) -> Cell:
    if name.startswith("PP:"):
        return parse_cell(name.removeprefix("PP:"))
    word, _, microbatch = name.partition(" ")
    return (Op(_WITHOUT_STAGE[word], ONLY_STAGE, int(microbatch)),)


def _cut(trace: RankTrace, actions: Sequence[Action]) -> Iterator[tuple[int | None, list[Action]]]:
    """Yields the actions of each training step. A step ends with a step of the profiler, or when an action occurs a second time."""
    starts = [event.start for event in trace.steps]
    part: list[Action] = []
    before: int | None = None
    seen: set[Cell] = set()
    for action in actions:
        place = bisect_right(starts, action.start) - 1
        label = step_number(trace.steps[place]) if place >= 0 and action.start < trace.steps[place].end else None
        if part and (action.cell in seen or label != before):
            yield before, part
            part, seen = [], set()
        part.append(action)
        seen.add(action.cell)
        before = label
    yield before, part


def _filled(label: int | None, actions: Sequence[Action], times: TraceTimes) -> RankStep:
    step = RankStep(label)
    arrivals: dict[MessageEnd, int] = {}
    for action in actions:
        if isinstance(action.cell, MessageEnd):
            _add_message(step, action, action.cell, times, arrivals)
        elif isinstance(action.cell, Weights):
            interval = times.summed(action) if action.cell.action is WeightAction.REDUCE_GRAD else None
            if interval is not None:
                step.sums.append(ReplicaSum(action.cell.stage, *interval))
        elif action.step:
            _add_passes(step, action, action.step, times, arrivals)
    return step


def _add_message(step: RankStep, action: Action, cell: MessageEnd, times: TraceTimes, arrivals: dict[MessageEnd, int]) -> None:
    """Add a sent message to the step. For a received message, note its arrival for the pass that waits for it."""
    interval = times.moved(action)
    if interval is not None and cell.is_send:
        step.moved.append(Moved(Doing.SEND, cell, *interval))
    elif interval is not None:
        arrivals[cell] = interval[1]


def _add_passes(step: RankStep, action: Action, passes: Step, times: TraceTimes, arrivals: Mapping[MessageEnd, int]) -> None:
    """Add the passes of a range. If PyTorch overlaps two, the second may wait for its message while the first runs."""
    kind, stage, microbatch = passes[0]
    received = (MessageEnd(False, used, stage, microbatch) for used, _ in traits_of(kind).uses if used in SENT_BETWEEN_STAGES)
    awaited = [cell for cell in received if cell in arrivals]
    start, end = times.ran(action, [arrivals[cell] for cell in awaited])
    free = max(action.start, step.ran[-1].end) if step.ran else action.start
    begin = min(free, start)
    for cell in awaited:
        step.moved.append(Moved(Doing.WAIT, cell, begin, min(max(arrivals[cell], begin), start)))
    step.ran.append(Ran(passes, start, end))
