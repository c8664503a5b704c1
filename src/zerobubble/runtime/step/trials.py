"""Training steps that leave nothing behind: a profile of what passes and messages cost, and a report of how backward passes split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from itertools import starmap
from statistics import median_low
from typing import NamedTuple

from zerobubble.arguments import WHOLE
from zerobubble.costs import OFFLOADABLE, Costs
from zerobubble.errors import InputError, shown
from zerobubble.ir import Kind, Placement
from zerobubble.runtime.measure.measured_head import MeasuredHead, with_measured_head
from zerobubble.runtime.measure.profile import Progress, costs_of, telling, with_fused_of, with_level_of
from zerobubble.runtime.split.report import SplitReport, SplitReports
from zerobubble.runtime.stage.saved_tensors import MovableBytes
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.step.inputs import StepInputs
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.schedules.vocabulary import PASSES, algorithm_of
from zerobubble.timeline import Timeline


class _Round(NamedTuple):
    """Steps one by one: all stages at a `level` of recomputation, or as the pipeline has them, and a divided head by `algorithm`.

    With `in_one_piece` each backward is a BW.
    """

    level: str | None
    algorithm: int | None
    in_one_piece: bool = False


class _Measured(NamedTuple):
    """What the steps of a round told: one with its memory metered, others that were timed, and the bytes that can go to the host."""

    metered: Timeline
    timed: list[Timeline]
    offloadable: list[int]

    def costs(self, placement: Placement) -> Costs:
        """The costs of the stages."""
        return costs_of(placement, self.metered, self.timed).with_columns(**{OFFLOADABLE: self.offloadable})


def profile(runner: StepRunner, given: StepInputs, steps: int, progress: Progress | None) -> Costs:
    """What the passes and messages of each stage take and hold, as `Pipeline.profile` describes it."""
    with runner.alike():
        _agree_on_steps(runner, steps)
    runner.settle()
    runner.choose(None)
    schedule = runner.schedule
    algorithm = algorithm_of(schedule) if schedule.has_divided_head else None
    rounds = [_Round(None, one) for one in ([None] if algorithm is None else PASSES)]
    rounds += [_Round(level, algorithm) for level in runner.levels_to_measure]
    whole = _Round(None, algorithm, in_one_piece=True)
    mixes_backwards = {Kind.B, Kind.BW} <= {op.kind for row in schedule.rows for op in row}
    rounds += [whole] * mixes_backwards
    with runner.activity("while profiling"), runner.untouched(), telling(progress, runner.rank) as tell:
        measured = {}
        for place, each in enumerate(rounds):
            done = place * (steps + 1)
            measured[each] = _one_by_one(runner, given, steps, each, lambda more, done=done: tell(done + more, len(rounds) * (steps + 1)))  # type: ignore[misc]
    costs = measured[_Round(None, algorithm)].costs(schedule.placement)
    if mixes_backwards:
        costs = with_fused_of(costs, measured[whole].costs(schedule.placement))
    for level in runner.levels_to_measure:
        costs = with_level_of(costs, level, measured[_Round(level, algorithm)].costs(schedule.placement))
    if algorithm is None:
        return costs
    return with_measured_head(costs, algorithm, {one: MeasuredHead(*measured[_Round(None, one)][:2]) for one in PASSES})


def _one_by_one(runner: StepRunner, given: StepInputs, steps: int, each: _Round, tell: Callable[[int], object]) -> _Measured:
    """What a metered step and then timed `steps` tell, in which microbatches come one by one."""
    timelines: list[Timeline] = []
    movable: dict[int, list[MovableBytes]] = {}
    with runner.programs.one_by_one(*each) as compiled:
        assert compiled.train is not None
        for index, stage in compiled.stages.items():
            movable[index] = [MovableBytes(runner.device) for _ in range(compiled.schedule.num_microbatches)]
            stage.offloaded.update(enumerate(movable[index]))
        while len(timelines) <= steps:
            runner.train_unheard(compiled, given, measures_memory=not timelines)
            timelines.append(runner.timeline_of(compiled.train))
            tell(len(timelines))
    return _Measured(timelines[0], timelines[1:], _offloadable(runner, movable))


def _offloadable(runner: StepRunner, movable: Mapping[int, list[MovableBytes]]) -> list[int]:
    """For each stage, how many bytes of what its forward saves can go to the host, the same on all ranks."""
    found = {index: [one.bytes for one in several if one.bytes] for index, several in movable.items()}
    told: list[dict[int, list[int]]] = runner.gather(found, "telling what can go to the host")
    sizes = [[size for ranks in told for size in ranks.get(stage, [])] for stage in range(runner.schedule.num_stages)]
    return [median_low(each) if each else 0 for each in sizes]


def _agree_on_steps(runner: StepRunner, steps: int) -> None:
    """Raise `InputError` on every rank where one of them is given no number of steps, or another one, or cannot compute again."""
    faults = runner.gather((steps if WHOLE.accepts(steps) else shown(steps), runner.fault_in_levels()), "comparing how to profile")
    told = [count for count, _ in faults]
    wrong = [count for count in told if not (WHOLE.accepts(count) and count >= 1)]
    if wrong:
        raise InputError(f"a profile takes at least 1 step, got {wrong[0]}")
    if len(set(told)) > 1:
        listed = ", ".join(f"rank {rank} has {count}" for rank, count in zip(runner.peers.members, told, strict=True))
        raise InputError(f"ranks disagree on the steps of a profile: {listed}")
    unable = [fault for _, fault in faults if fault]
    if unable:
        raise InputError(f"a profile measures the levels of recompute in every stage: {unable[0]}; or leave recompute out while profiling")


def describe(runner: StepRunner, given: StepInputs) -> SplitReports:
    """How each stage splits its backward pass, as `Pipeline.describe` describes it."""
    runner.settle()
    compiled = runner.choose(None)
    with runner.activity("while describing the split"):
        with runner.untouched():
            for stage in compiled.stages.values():
                stage.splitter.count()
            runner.train_unheard(compiled, given)
        reports = [_with_sums(runner, stage) for stage in compiled.stages.values()]
        told = runner.gather(list(map(astuple, reports)), "describing the split")
    found = {report.stage: report for reports in reversed(told) for report in starmap(SplitReport, reports)}
    return SplitReports(found[stage] for stage in sorted(found))


def _with_sums(runner: StepRunner, stage: Stage) -> SplitReport:
    """The report of a stage, with a note where a hook waits longer for its gradients than other splits would let it."""
    report = stage.report()
    waits = report.passes == "FBW" and any(hook.takes_gradients_early for hook in runner.hooks) and not stage.ends_by_parameter
    if not waits:
        return report
    return replace(report, notes=(*report.notes, "its gradients leave together for replicas and hooks, when its last pass is over"))
