"""Where the time goes: in a schedule as simulated, and in a run held against it."""

from zerobubble.explain.account import PARTS, Account, Cause, Difference, Drift, ExtraTime
from zerobubble.explain.difference import diff
from zerobubble.explain.gaps import Gap, WaitsFor, gaps
from zerobubble.explain.idle import Causes, Idle, Metric, attribute, critical_path
from zerobubble.explain.windows import Window, windows
from zerobubble.listing import listing

__all__ = [
    "PARTS",
    "Account",
    "Cause",
    "Causes",
    "Difference",
    "Drift",
    "ExtraTime",
    "Gap",
    "Idle",
    "Metric",
    "WaitsFor",
    "Window",
    "attribute",
    "critical_path",
    "diff",
    "gaps",
    "windows",
]

__dir__ = listing(__all__)
