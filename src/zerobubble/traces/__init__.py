"""Other people's runs: PyTorch profiler traces of its own pipeline schedules, read as measured timelines."""

from zerobubble.traces.clocks import ClockShift
from zerobubble.traces.run import TracedRun, read_trace

__all__ = ["ClockShift", "TracedRun", "read_trace"]
