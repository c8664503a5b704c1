"""Reads runs of PyTorch's own pipeline schedules from profiler traces, as measured timelines."""

from zerobubble.traces.clocks import ClockShift
from zerobubble.traces.run import TracedRun, read_trace

__all__ = ["ClockShift", "TracedRun", "read_trace"]
