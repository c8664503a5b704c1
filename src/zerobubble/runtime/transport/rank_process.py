"""Which process a rank is: what ranks tell each other when they meet, so that those on one machine can watch each other's end."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

_START_TIME = 19
"""The place of a process's start in what its stat says behind its name, which is in parentheses."""
_ENDED = ("Z", "X")
"""The states of a process that has ended and whose parent has not asked how."""


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
    return int(_stat_of(number)[_START_TIME])


def has_ended(process: RankProcess) -> bool:
    """Whether a process is known to have ended; False for one that cannot be seen from here."""
    here = this_process()
    if not here.place or process.place != here.place:
        return False
    try:
        stat = _stat_of(process.number)
    except OSError:
        return True
    return int(stat[_START_TIME]) != process.started or stat[0] in _ENDED


def _stat_of(number: int) -> list[str]:
    """What the system says of a process behind its name, first its state; raises `OSError` where there is none."""
    told = Path(f"/proc/{number}/stat").read_text()
    return told[told.rindex(")") + 1 :].split()
