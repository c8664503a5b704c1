"""Training steps that leave nothing behind: a profile of what passes and messages cost, and a report of how backward passes split."""

from __future__ import annotations

from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.runtime.measure.profile import Progress, costs_of, telling
from zerobubble.runtime.split.report import SplitReports
from zerobubble.runtime.step.runner import StepInputs, StepRunner
from zerobubble.timeline import Timeline


def profile(runner: StepRunner, given: StepInputs, steps: int, progress: Progress | None) -> Costs:
    """What the passes and messages of each stage take and hold, as `Pipeline.profile` describes it."""
    if steps < 1:
        raise InputError(f"a profile takes at least 1 step, got {steps}")
    runner.settle()
    timelines: list[Timeline] = []
    with (
        runner.activity("while profiling"),
        runner.untouched(),
        telling(progress, runner.rank) as tell,
        runner.programs.one_by_one() as compiled,
    ):
        assert compiled.train is not None
        while len(timelines) <= steps:
            runner.train_unheard(compiled, given, measures_memory=not timelines)
            timelines.append(runner.timeline_of(compiled.train))
            tell(len(timelines), steps + 1)
    return costs_of(runner.schedule.placement, timelines[0], timelines[1:])


def describe(runner: StepRunner, given: StepInputs) -> SplitReports:
    """How each stage splits its backward pass, as `Pipeline.describe` describes it."""
    runner.settle()
    compiled = runner.choose(None)
    with runner.activity("while describing the split"):
        with runner.untouched():
            for stage in compiled.stages.values():
                stage.splitter.count()
            runner.train_unheard(compiled, given)
        told = runner.gather([stage.splitter.report() for stage in compiled.stages.values()], "describing the split")
    found = {report.stage: report for reports in reversed(told) for report in reports}
    return SplitReports(found[stage] for stage in sorted(found))
