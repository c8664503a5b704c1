"""Training steps that leave nothing behind: a profile of what passes and messages cost, and a report of how backward passes split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from itertools import starmap
from statistics import median_low

from zerobubble.arguments import WHOLE, shown
from zerobubble.costs import OFFLOADABLE, Costs
from zerobubble.errors import InputError
from zerobubble.runtime.measure.profile import Progress, costs_of, telling, with_level_of
from zerobubble.runtime.split.report import SplitReport, SplitReports
from zerobubble.runtime.stage.saved_tensors import MovableBytes
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.step.runner import StepInputs, StepRunner
from zerobubble.timeline import Timeline


def profile(runner: StepRunner, given: StepInputs, steps: int, progress: Progress | None) -> Costs:
    """What the passes and messages of each stage take and hold, as `Pipeline.profile` describes it."""
    with runner.alike():
        if runner.schedule.has_divided_head:
            raise InputError(
                f"a profile is of stages alone, and schedule {runner.schedule.name!r} divides the head over ranks: profile a pipeline that "
                "has the head whole in its last stage, and plan with zb.planning.plan_head"
            )
        _agree_on_steps(runner, steps)
    runner.settle()
    runner.choose(None)
    levels = runner.levels_to_measure
    num_steps = (1 + len(levels)) * (steps + 1)
    with runner.activity("while profiling"), runner.untouched(), telling(progress, runner.rank) as tell:
        costs = _costs_one_by_one(runner, given, steps, None, lambda done: tell(done, num_steps))
        for place, level in enumerate(levels, 1):
            before = place * (steps + 1)
            measured = _costs_one_by_one(runner, given, steps, level, lambda done, before=before: tell(before + done, num_steps))  # type: ignore[misc]
            costs = with_level_of(costs, level, measured)
    return costs


def _costs_one_by_one(runner: StepRunner, given: StepInputs, steps: int, level: str | None, tell: Callable[[int], object]) -> Costs:
    """The costs that a metered step and then timed `steps` tell, in which microbatches come one by one."""
    timelines: list[Timeline] = []
    movable: dict[int, list[MovableBytes]] = {}
    with runner.programs.one_by_one(level) as compiled:
        assert compiled.train is not None
        for index, stage in compiled.stages.items():
            movable[index] = [MovableBytes(runner.device) for _ in range(compiled.schedule.num_microbatches)]
            stage.offloaded.update(enumerate(movable[index]))
        while len(timelines) <= steps:
            runner.train_unheard(compiled, given, measures_memory=not timelines)
            timelines.append(runner.timeline_of(compiled.train))
            tell(len(timelines))
    costs = costs_of(runner.schedule.placement, timelines[0], timelines[1:])
    return costs.with_columns(**{OFFLOADABLE: _offloadable(runner, movable)})


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
