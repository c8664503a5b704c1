"""Counts the processes that Linux's OOM killer has ended: the only evidence that a rank whose process ended ran out of memory."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = Path("/proc/vmstat")


def memory_kills() -> int:
    """Returns how many processes the OOM killer has ended on this machine since it booted; 0 if the kernel does not count them."""
    try:
        counters = dict(line.split() for line in _COUNTERS.read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
