"""Which process a rank is: what ranks tell each other when they meet, so that those on one machine can watch each other's end."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

_START_TIME = 19
"""The place of a process's start in what its stat says behind its name, which is in parentheses."""


class RankProcess(NamedTuple):
    """A rank's process. A number is given again to a later process, which has `started`, in clock ticks after the boot, at another time.

    Numbers mean the same in one `place`: the boot of a machine, its namespace of processes and its host name; empty where that cannot be
    told. The name is there for machines that were started from one snapshot of a running one, for they have the same boot.
    """

    number: int
    started: int
    place: str


def this_process() -> RankProcess:
    """What this rank tells the others of its process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {platform.node()}"
        return RankProcess(os.getpid(), start_of(os.getpid()), place)
    except OSError:
        return RankProcess(os.getpid(), 0, "")


def start_of(number: int) -> int:
    """When the process of this number started, in clock ticks after the boot; raises `OSError` where there is none."""
    told = Path(f"/proc/{number}/stat").read_text()
    return int(told[told.rindex(")") + 1 :].split()[_START_TIME])
