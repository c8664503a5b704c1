"""Files as signals: ranks and tests wait for an event in another process until it creates a file."""

from __future__ import annotations

import time
from pathlib import Path

LONGEST_S = 150.0
"""After which what is waited for does not come any more."""


def await_signs(*signs: Path) -> None:
    """Wait until all of these files exist; raises `TimeoutError` if that takes too long."""
    end = time.monotonic() + LONGEST_S
    while missing := [sign.name for sign in signs if not sign.exists()]:
        if time.monotonic() > end:
            raise TimeoutError(f"no sign of {', '.join(missing)} after {LONGEST_S:g} s")
        time.sleep(0.02)
