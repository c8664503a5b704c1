"""How many processes Linux has ended for want of memory: the only evidence that a rank whose process ended ran out of it."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = Path("/proc/vmstat")


def memory_kills() -> int:
    """The processes of this machine that its kernel has ended for want of memory since it started, 0 where that is not counted."""
    try:
        counters = dict(line.split() for line in _COUNTERS.read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
