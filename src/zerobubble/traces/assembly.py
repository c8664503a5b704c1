"""Assembles the traces of all ranks: finds the rank of each file, and makes one measured timeline per training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerobubble.errors import InputError
from zerobubble.ir import Op
from zerobubble.kinds import kinds_making, kinds_using
from zerobubble.rules import SENT_BETWEEN_STAGES, Value, makers, message_receiver, uses
from zerobubble.timeline import Mark, ReplicaSum, Span, Timeline
from zerobubble.traces.clocks import ClockShift, shifts
from zerobubble.traces.passes import ONLY_STAGE, Moved, RankRun, RankStep
from zerobubble.units import listed

StepOfRanks = tuple[RankStep, ...]
"""One training step, a part for each rank."""


class Assembled(NamedTuple):
    """The steps in the order of the trace, the number of stages, and how clocks were moved."""

    steps: list[StepOfRanks]
    num_stages: int
    clocks: tuple[ClockShift, ...]


def assembled(runs: Sequence[RankRun]) -> Assembled:
    """Return the steps of `runs`, given in the order of the ranks. Raises `InputError` for missing and contradictory ranks."""
    num_stages = _require_stages(runs)
    steps = _matched(runs)
    for number, step in enumerate(steps):
        _require_microbatches(number, step)
    return Assembled(steps, num_stages, shifts(_links(steps, num_stages), [run.trace.host for run in runs]))


def in_order_of_ranks(runs: Sequence[RankRun]) -> list[RankRun]:
    """Return the runs in the order of the ranks in their files, or of their first stages if a file has no rank.

    If the ranges of a rank name no stage, its stage is its place in that order.
    """
    ranks = [run.trace.rank for run in runs]
    twice = [rank for rank in ranks if rank is not None and ranks.count(rank) > 1]
    if twice:
        files = " and ".join(run.trace.file for run in runs if run.trace.rank == twice[0])
        raise InputError("{files} are both of rank {rank}", files=files, rank=twice[0], remedy="give one file per rank")
    ordered = sorted(runs, key=lambda run: _first_stage(run) if None in ranks else run.trace.rank or 0)
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
    """Return the number of stages; each must be on one rank, and none may be missing."""
    home = _files_by_stage(runs)
    last = max(home)
    sent = {moved.cell for run in runs for step in run.steps for moved in step.moved if moved.cell.is_send}
    receivers = [message_receiver(kind, cell.stage, ONLY_STAGE) for cell in sent for kind in kinds_making(cell.value_kind)]
    wanted = max([last, *(stage for stage in receivers if stage is not None)]) + 1
    missing = wanted - len(home)
    if missing:
        first = next(stage for stage in range(wanted) if stage not in home)
        sentence = "{files} have no passes of {missing} of the {stages} stages, such as stage {stage}"
        remedy = "give the files of all ranks"
        raise InputError(sentence, files=listed(run.trace.file for run in runs), missing=missing, stages=wanted, stage=first, remedy=remedy)
    size = next(filter(None, (run.trace.pipeline_size for run in runs)), len(runs))
    if size != len(runs):
        raise InputError(
            "the run has {ranks} ranks, but {got} files were given", ranks=size, got=len(runs), remedy="give one file per rank"
        )
    return wanted


def _files_by_stage(runs: Sequence[RankRun]) -> dict[int, str]:
    """Return the file of the rank that ran each stage."""
    files: dict[int, str] = {}
    for run in runs:
        for stage in sorted({op.stage for step in run.steps for op in step.ops}):
            if stage in files:
                both, remedy = (files[stage], run.trace.file), "give the ranks of one pipeline, of a single replica"
                raise InputError("stage {stage} ran in both {files[0]} and {files[1]}", stage=stage, files=both, remedy=remedy)
            files[stage] = run.trace.file
    return files


def _require_microbatches(number: int, step: StepOfRanks) -> None:
    microbatches = {op.microbatch for part in step for op in part.ops}
    if len(microbatches) <= max(microbatches):
        missing = next(microbatch for microbatch in range(max(microbatches)) if microbatch not in microbatches)
        sentence, last = "step {step} has passes of microbatch {last}, but none of microbatch {missing}", max(microbatches)
        raise InputError(sentence, step=number, last=last, missing=missing, remedy="record whole steps")


_SAME_STEPS = "record the same steps on every rank, with a schedule of the profiler"


def _matched(runs: Sequence[RankRun]) -> list[StepOfRanks]:
    """Return the steps that all ranks have, matched by the profiler's step number, or else by position."""
    if all(step.label is not None for run in runs for step in run.steps):
        keyed = list(map(_by_label, runs))
        common = [key for key in keyed[0] if all(key in steps for steps in keyed)]
        if not common:
            raise InputError("{files} have no profiler step in common", files=listed(run.trace.file for run in runs), remedy=_SAME_STEPS)
        return [tuple(steps[key] for steps in keyed) for key in common]
    if len({len(run.steps) for run in runs}) > 1:
        lengths = ", ".join(f"{run.trace.file} has {len(run.steps)}" for run in runs)
        raise InputError("the ranks have different numbers of steps: {found}", found=lengths, remedy=_SAME_STEPS)
    return list(zip(*(run.steps for run in runs), strict=True))


def _by_label(run: RankRun) -> dict[tuple[int, int], RankStep]:
    """Return the steps of a rank by the profiler's step number and their place in it, since gradients may be accumulated."""
    by_label: dict[tuple[int, int], RankStep] = {}
    counts: Counter[int] = Counter()
    for step in run.steps:
        assert step.label is not None
        by_label[step.label, counts[step.label]] = step
        counts[step.label] += 1
    return by_label


def _links(steps: Sequence[StepOfRanks], num_stages: int) -> dict[tuple[int, int], int]:
    """Return the least times from a pass that makes a message to its use, by the ranks of both."""
    links: dict[tuple[int, int], int] = {}
    for step in steps:
        for sender, receiver, time in _message_times(step, num_stages):
            pair = sender, receiver
            links[pair] = min(time, links.get(pair, time))
    return links


def _message_times(step: StepOfRanks, num_stages: int) -> Iterator[tuple[int, int, int]]:
    """Yield sender, receiver and time of each message between ranks, except to overlapped passes, which may start without them."""
    ends = {op: (rank, ran.end) for rank, part in enumerate(step) for ran in part.ran for op in ran.step}
    for rank, part in enumerate(step):
        for ran in (ran for ran in part.ran if len(ran.step) == 1):
            for value in (value for op in ran.step for value in uses(op, num_stages) if value.value_kind in SENT_BETWEEN_STAGES):
                source, end = next((ends[op] for op in makers(value) if op in ends), (rank, 0))
                if source != rank:
                    yield source, rank, ran.start - end


def timeline_of(step: StepOfRanks, run: Assembled, name: str) -> Timeline:
    """Return the timeline of a step with the clocks shifted; it begins with its first pass."""
    moved = [clock.shift for clock in run.clocks]
    origin = min((part.ran[0].start + shift for part, shift in zip(step, moved, strict=True)), default=0)
    shifted = [shift - origin for shift in moved]
    rows = tuple(
        tuple(Span(op, ran.start + by, ran.end + by) for ran in part.ran for op in ran.step) for part, by in zip(step, shifted, strict=True)
    )
    marks = tuple(tuple(_mark(moved, by, run.num_stages) for moved in part.moved) for part, by in zip(step, shifted, strict=True))
    sums = tuple(
        tuple(ReplicaSum(total.stage, total.start + by, total.end + by) for total in part.sums)
        for part, by in zip(step, shifted, strict=True)
    )
    return Timeline(name, rows, (), "measured", marks if any(marks) else (), sums if any(sums) else ())


def _mark(moved: Moved, by: int, num_stages: int) -> Mark:
    value_kind, stage, microbatch = moved.cell.value_kind, moved.cell.stage, moved.cell.microbatch
    value = Value(value_kind, stage, microbatch)
    if not moved.cell.is_send:
        readers = [Op(kind, stage, microbatch) for kind in kinds_using(value_kind)]
        value = next(used for op in readers for used in uses(op, num_stages) if used.value_kind is value_kind)
    return Mark(moved.doing, moved.start + by, moved.end + by, str(value))
