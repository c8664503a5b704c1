"""zerobubble: check, simulate, plan and run any pipeline-parallel schedule on PyTorch.

This module has the names that most programs need. The others are in namespaces: `zb.planning`, `zb.explain`, `zb.io`, `zb.nn`, `zb.hooks`,
`zb.transport`, `zb.testing`, `zb.schedules`, `zb.blocks`, `zb.partition`, `zb.simulation`, `zb.lowering`, `zb.recognition`, `zb.fit`,
`zb.bounds`, `zb.cost_model`, `zb.kinds` and `zb.errors`. docs/api.md lists all of them.

Importing this module loads nothing else of the package: each name and namespace is loaded on first access, and torch only with a name that
needs it. If torch is not installed, `from zerobubble import *` leaves these out.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobubble.version import __version__ as __version__

if sys.argv[:1] == ["-m"]:  # `python -m zerobubble` imports this package before its own module
    import_module("zerobubble_command").report_interruptions()

if "RANK" in os.environ:  # a launcher started this process
    import_module("zerobubble.error_reports.uncaught").show_uncaught()

if TYPE_CHECKING:
    from zerobubble import blocks as blocks
    from zerobubble import bounds as bounds
    from zerobubble import cost_model as cost_model
    from zerobubble import errors as errors
    from zerobubble import explain as explain
    from zerobubble import fit as fit
    from zerobubble import hooks as hooks
    from zerobubble import io as io
    from zerobubble import kinds as kinds
    from zerobubble import lowering as lowering
    from zerobubble import nn as nn
    from zerobubble import offload as offload
    from zerobubble import partition as partition
    from zerobubble import planning as planning
    from zerobubble import recognition as recognition
    from zerobubble import schedules as schedules
    from zerobubble import simulation as simulation
    from zerobubble import testing as testing
    from zerobubble import transport as transport
    from zerobubble.costs import Costs, Limits
    from zerobubble.errors import InputError, PipelineError, ScheduleError, ZeroBubbleError
    from zerobubble.explain import diff
    from zerobubble.ir import Kind, Op, Placement, Schedule
    from zerobubble.lowering import lower
    from zerobubble.models.model_split import split
    from zerobubble.planning import Workload, plan
    from zerobubble.program import Program
    from zerobubble.replanning.auto import Auto
    from zerobubble.runtime.checkpoint.checkpoint import load, save
    from zerobubble.runtime.distributed import init_distributed
    from zerobubble.runtime.gathered import gathered
    from zerobubble.runtime.hooks.post_validation import PostValidation
    from zerobubble.runtime.pipeline import Pipeline
    from zerobubble.schedules import make
    from zerobubble.simulation import simulate
    from zerobubble.text_picture import picture
    from zerobubble.timeline import Timeline
    from zerobubble.verify import schedule_faults

__all__ = [  # noqa: RUF022 - in reading order for newcomers
    "Pipeline",
    "split",
    "init_distributed",
    "PostValidation",
    "Auto",
    "save",
    "load",
    "gathered",
    "Schedule",
    "Placement",
    "Op",
    "Kind",
    "Costs",
    "Limits",
    "Workload",
    "Program",
    "Timeline",
    "make",
    "plan",
    "schedule_faults",
    "simulate",
    "lower",
    "diff",
    "picture",
    "InputError",
    "PipelineError",
    "ScheduleError",
    "ZeroBubbleError",
]

_NAMESPACES = (
    "blocks",
    "bounds",
    "cost_model",
    "errors",
    "explain",
    "fit",
    "hooks",
    "io",
    "kinds",
    "lowering",
    "nn",
    "offload",
    "partition",
    "planning",
    "recognition",
    "schedules",
    "simulation",
    "testing",
    "transport",
)
_HOMES = {
    "Costs": "zerobubble.costs",
    "InputError": "zerobubble.errors",
    "Kind": "zerobubble.ir",
    "Limits": "zerobubble.costs",
    "Op": "zerobubble.ir",
    "PipelineError": "zerobubble.errors",
    "Placement": "zerobubble.ir",
    "Program": "zerobubble.program",
    "Schedule": "zerobubble.ir",
    "ScheduleError": "zerobubble.errors",
    "Timeline": "zerobubble.timeline",
    "Workload": "zerobubble.planning",
    "ZeroBubbleError": "zerobubble.errors",
    "diff": "zerobubble.explain",
    "lower": "zerobubble.lowering",
    "make": "zerobubble.schedules",
    "picture": "zerobubble.text_picture",
    "plan": "zerobubble.planning",
    "schedule_faults": "zerobubble.verify",
    "simulate": "zerobubble.simulation",
}
"""Where the names that need no torch are."""
_NEEDS_TORCH = {
    "Auto": "zerobubble.hooks",
    "Pipeline": "zerobubble.runtime.pipeline",
    "PostValidation": "zerobubble.hooks",
    "split": "zerobubble.models.model_split",
    "save": "zerobubble.runtime.checkpoint.checkpoint",
    "load": "zerobubble.runtime.checkpoint.checkpoint",
    "gathered": "zerobubble.runtime.gathered",
    "init_distributed": "zerobubble.runtime.distributed",
}

if find_spec("torch") is None:
    __all__[:] = [name for name in __all__ if name not in _NEEDS_TORCH]


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOMES, *_NEEDS_TORCH, *_NAMESPACES, "__version__"})


def _hint(name: str) -> str:
    """`: did you mean zb.io.load_plan?` for `load_plan`, nothing for a private name.

    Reads `__all__` of the namespaces from their sources: importing those that need torch takes seconds.
    """
    if name.startswith("_"):
        return ""
    root = Path(__file__).parent
    for namespace in _NAMESPACES:
        file = root / f"{namespace}.py"
        source = (file if file.is_file() else root / namespace / "__init__.py").read_text(encoding="utf-8")
        if f'"{name}"' in source.partition("\n__all__ = [")[2].partition("]")[0]:
            return f": did you mean zb.{namespace}.{name}?"
    near = import_module("zerobubble.errors").near(name, __dir__()).rstrip()
    return f": {near or 'dir(zerobubble) lists all names'}"


def __getattr__(name: str) -> Any:
    """Load a name or a namespace on first access."""
    home = {**_HOMES, **_NEEDS_TORCH}.get(name)
    if home is None and name not in _NAMESPACES:
        raise AttributeError(f"module 'zerobubble' has no attribute {name!r}{_hint(name)}")
    try:
        value = import_module(f"zerobubble.{name}") if home is None else getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        missing, remedy = import_module("zerobubble.errors").MissingPackageError, import_module("zerobubble.installing").install("torch")
        raise missing("zerobubble.{name} needs PyTorch", name=name, remedy=remedy) from error
    globals()[name] = value
    return value
