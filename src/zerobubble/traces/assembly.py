"""The traces of all ranks put together: which file is which rank, and one measured timeline a training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerobubble.errors import InputError
from zerobubble.ir import Op
from zerobubble.kinds import kinds_making, kinds_using
from zerobubble.rules import MOVES, Value, makers, message_receiver, uses
from zerobubble.timeline import Mark, Reduction, Span, Timeline
from zerobubble.traces.clocks import ClockShift, shifts
from zerobubble.traces.passes import ONLY_STAGE, Moved, RankRun, RankStep
from zerobubble.units import counted

StepOfRanks = tuple[RankStep, ...]
"""One training step, a part for each rank."""


class Assembled(NamedTuple):
    """The steps in the order of the trace, the number of stages, and how clocks were moved."""

    steps: list[StepOfRanks]
    num_stages: int
    clocks: tuple[ClockShift, ...]


def assembled(runs: Sequence[RankRun]) -> Assembled:
    """The steps of `runs`, which are in the order of the ranks. Raises `InputError` for ranks that are missing or do not fit."""
    num_stages = _require_stages(runs)
    steps = _matched(runs)
    for number, step in enumerate(steps):
        _require_microbatches(number, step)
    return Assembled(steps, num_stages, shifts(_links(steps, num_stages), [run.trace.host for run in runs]))


def in_order_of_ranks(runs: Sequence[RankRun]) -> list[RankRun]:
    """The runs by rank, as their files say, or else by their first stages.

    A rank whose ranges name no stage has that of its place.
    """
    known = [run.trace.rank for run in runs]
    twice = [rank for rank in known if rank is not None and known.count(rank) > 1]
    if twice:
        files = " and ".join(run.trace.file for run in runs if run.trace.rank == twice[0])
        raise InputError("{files} are both of rank {rank}: give one file a rank", files=files, rank=twice[0])
    ordered = sorted(runs, key=lambda run: _first_stage(run) if None in known else run.trace.rank or 0)
    for place, run in enumerate(ordered):
        if _first_stage(run) == ONLY_STAGE:
            _name_stage(run, place)
    return ordered


def _first_stage(run: RankRun) -> int:
    return min(op.stage for step in run.steps for op in step.ops)


def _name_stage(run: RankRun, stage: int) -> None:
    for step in run.steps:
        step.ran = [ran._replace(step=tuple(op._replace(stage=stage) for op in ran.step)) for ran in step.ran]


def _require_stages(runs: Sequence[RankRun]) -> int:
    """The number of stages; each must be on one rank, and none may be missing."""
    home: dict[int, str] = {}
    for run in runs:
        for stage in sorted({op.stage for step in run.steps for op in step.ops}):
            if stage in home:
                remedy = "give the ranks of one pipeline, of a single replica"
                raise InputError(f"stage {stage} ran in {home[stage]} and in {run.trace.file}: {remedy}")
            home[stage] = run.trace.file
    last = max(home)
    sent = {moved.cell for run in runs for step in run.steps for moved in step.moved if moved.cell.is_send}
    receivers = [message_receiver(kind, cell.stage, ONLY_STAGE) for cell in sent for kind in kinds_making(cell.value_kind)]
    wanted = max([last, *(stage for stage in receivers if stage is not None)]) + 1
    missing = wanted - len(home)
    if missing:
        first = next(stage for stage in range(wanted) if stage not in home)
        stages = f"{missing} stages" if missing > 1 else f"stage {first}"
        raise InputError(f"no pass of {stages} of {wanted} is in {_files(runs)}: a rank's file is missing; give those of all its ranks")
    size = next((run.trace.pipeline_size for run in runs if run.trace.pipeline_size), len(runs))
    if size != len(runs):
        raise InputError(f"the run has {counted(size, 'rank')} and one process group, and {len(runs)} came: give a file of every rank")
    return wanted


def _require_microbatches(number: int, step: StepOfRanks) -> None:
    found = {op.microbatch for part in step for op in part.ops}
    if len(found) <= max(found):
        missing = next(microbatch for microbatch in range(max(found)) if microbatch not in found)
        raise InputError(f"step {number} has no pass of microbatch {missing}, but of microbatch {max(found)}: record whole steps")


def _files(runs: Sequence[RankRun]) -> str:
    names = [run.trace.file for run in runs]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _matched(runs: Sequence[RankRun]) -> list[StepOfRanks]:
    """The steps that all ranks have: those with one number of the profiler's, or else those in one place."""
    if all(step.label is not None for run in runs for step in run.steps):
        keyed = [_by_label(run) for run in runs]
        common = [key for key in keyed[0] if all(key in steps for steps in keyed)]
        if not common:
            raise InputError(f"no step of the profiler is in all of {_files(runs)}: record the same steps on every rank")
        return [tuple(steps[key] for steps in keyed) for key in common]
    counts = [len(run.steps) for run in runs]
    if len({*counts}) > 1:
        found = ", ".join(f"{run.trace.file} has {count}" for run, count in zip(runs, counts, strict=True))
        raise InputError(
            f"the ranks have other numbers of steps: {found}; record the same steps on every rank, with a schedule of the profiler"
        )
    return list(zip(*(run.steps for run in runs), strict=True))


def _by_label(run: RankRun) -> dict[tuple[int, int], RankStep]:
    """The steps of a rank by the profiler's number and their place in it: gradients may be accumulated over several."""
    found: dict[tuple[int, int], RankStep] = {}
    for step in run.steps:
        assert step.label is not None
        found[step.label, sum(label == step.label for label, _ in found)] = step
    return found


def _links(steps: Sequence[StepOfRanks], num_stages: int) -> dict[tuple[int, int], int]:
    """The least times from a pass that makes a message to its use, by the ranks of both."""
    found: dict[tuple[int, int], int] = {}
    for step in steps:
        for sender, receiver, time in _message_times(step, num_stages):
            pair = sender, receiver
            found[pair] = min(time, found.get(pair, time))
    return found


def _message_times(step: StepOfRanks, num_stages: int) -> Iterator[tuple[int, int, int]]:
    """Sender, receiver and time of each message between ranks, but for those to overlapped passes, which may start without them."""
    made = {op: (rank, ran.end) for rank, part in enumerate(step) for ran in part.ran for op in ran.step}
    for rank, part in enumerate(step):
        for ran in (ran for ran in part.ran if len(ran.step) == 1):
            for value in (value for op in ran.step for value in uses(op, num_stages) if value.value_kind in MOVES):
                source, end = next((made[op] for op in makers(value) if op in made), (rank, 0))
                if source != rank:
                    yield source, rank, ran.start - end


def timeline_of(step: StepOfRanks, found: Assembled, name: str) -> Timeline:
    """The timeline of a step, with the clocks moved; it begins with its first pass."""
    moved = [clock.shift for clock in found.clocks]
    origin = min((part.ran[0].start + shift for part, shift in zip(step, moved, strict=True)), default=0)
    shifted = [shift - origin for shift in moved]
    rows = tuple(
        tuple(Span(op, ran.start + by, ran.end + by) for ran in part.ran for op in ran.step) for part, by in zip(step, shifted, strict=True)
    )
    marks = tuple(tuple(_mark(moved, by, found.num_stages) for moved in part.moved) for part, by in zip(step, shifted, strict=True))
    sums = tuple(
        tuple(Reduction(one.stage, one.start + by, one.end + by) for one in part.sums) for part, by in zip(step, shifted, strict=True)
    )
    return Timeline(name, rows, (), "measured", marks if any(marks) else (), sums if any(sums) else ())


def _mark(moved: Moved, by: int, num_stages: int) -> Mark:
    value_kind, stage, microbatch = moved.cell.value_kind, moved.cell.stage, moved.cell.microbatch
    value = Value(value_kind, stage, microbatch)
    if not moved.cell.is_send:
        readers = [Op(kind, stage, microbatch) for kind in kinds_using(value_kind)]
        value = next(used for op in readers for used in uses(op, num_stages) if used.value_kind is value_kind)
    return Mark(moved.doing, moved.start + by, moved.end + by, str(value))
