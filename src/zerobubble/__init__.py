"""zerobubble: every pipeline-parallel schedule, judged, planned and run on PyTorch.

Importing this loads the standard library only; names that need torch load it when first touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerobubble.costs import Costs, Limits
from zerobubble.errors import Fault, InputError, ParseError, PipelineError, ProgramError, ScheduleError, ZeroBubbleError
from zerobubble.explain import Difference, attribute, critical_path, diff
from zerobubble.fit import fit_costs
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.lowering import lower, prefetch_depth
from zerobubble.partition import Layer
from zerobubble.planning import Problem, Solved, Workload, load_plan, plan, plan_layers, save_plan, sensitivity
from zerobubble.program import Program
from zerobubble.recognition import recognise
from zerobubble.schedules import SCHEDULES, Recipe, known_schedules, make, schedule
from zerobubble.simulation import memory_faults, peak_memory, simulate
from zerobubble.text_picture import picture
from zerobubble.timeline import Timeline
from zerobubble.verify import schedule_faults
from zerobubble.verify_program import program_faults

if TYPE_CHECKING:
    from zerobubble.runtime.hooks.post_validation import PostValidation as PostValidation
    from zerobubble.runtime.hooks.telemetry import StepReport as StepReport
    from zerobubble.runtime.hooks.telemetry import log_steps as log_steps
    from zerobubble.runtime.hooks.telemetry import write_scalars as write_scalars
    from zerobubble.runtime.pipeline import Pipeline as Pipeline
    from zerobubble.runtime.split.custom_layers import check_split as check_split
    from zerobubble.runtime.split.custom_layers import deferral as deferral
    from zerobubble.runtime.split.report import SplitReport as SplitReport
    from zerobubble.runtime.stage.skips import pop as pop
    from zerobubble.runtime.stage.skips import stash as stash

_NEEDS_TORCH = {
    "Pipeline": "zerobubble.runtime.pipeline",
    "PostValidation": "zerobubble.runtime.hooks.post_validation",
    "SplitReport": "zerobubble.runtime.split.report",
    "StepReport": "zerobubble.runtime.hooks.telemetry",
    "check_split": "zerobubble.runtime.split.custom_layers",
    "deferral": "zerobubble.runtime.split.custom_layers",
    "log_steps": "zerobubble.runtime.hooks.telemetry",
    "pop": "zerobubble.runtime.stage.skips",
    "stash": "zerobubble.runtime.stage.skips",
    "write_scalars": "zerobubble.runtime.hooks.telemetry",
}

__all__ = [
    "SCHEDULES",
    "Costs",
    "Difference",
    "Fault",
    "InputError",
    "Kind",
    "Layer",
    "Limits",
    "Op",
    "ParseError",
    "PipelineError",
    "Placement",
    "Problem",
    "Program",
    "ProgramError",
    "Recipe",
    "Schedule",
    "ScheduleError",
    "Solved",
    "Timeline",
    "Workload",
    "ZeroBubbleError",
    "attribute",
    "critical_path",
    "diff",
    "fit_costs",
    "known_schedules",
    "load_plan",
    "lower",
    "make",
    "memory_faults",
    "peak_memory",
    "picture",
    "plan",
    "plan_layers",
    "prefetch_depth",
    "program_faults",
    "recognise",
    "save_plan",
    "schedule",
    "schedule_faults",
    "sensitivity",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'zerobubble' has no attribute {name!r}")
    try:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"zerobubble.{name} needs PyTorch: pip install 'zerobubble[torch]'") from error
