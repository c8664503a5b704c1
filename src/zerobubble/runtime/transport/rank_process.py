"""Identifies the process of a rank. Ranks exchange this at the rendezvous, so that those on one machine can watch each other."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

from zerobubble.error_reports.error_file import error_file

_START_TIME = 19
"""The field of the start time in /proc/PID/stat, counted after the name of the process, which is in parentheses."""
_ENDED = ("Z", "X")
"""The states of a process that has ended but was not reaped by its parent."""


class RankProcess(NamedTuple):
    """A rank's process. Numbers are reused, so the start time, `started`, in clock ticks since boot, is part of its identity.

    Numbers and times are comparable within one `place`: the boot id of a machine, its PID and time namespaces and its host name; empty if
    unknown. The time namespace shifts the times that a process reads in /proc. The host name is needed for virtual machines that resume
    from one snapshot: they share a boot id. `error_file` is the path where torchrun looks for the error of the
    process; empty without torchrun.
    """

    number: int
    started: int
    place: str
    error_file: str = ""


def this_process() -> RankProcess:
    """Returns the identity of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {_time_namespace()} {platform.node()}"
        return RankProcess(os.getpid(), start_of(os.getpid()), place, error_file())
    except OSError:
        return RankProcess(os.getpid(), 0, "")


def _time_namespace() -> int:
    """Returns the number of this process's time namespace, 0 if the kernel has none (before Linux 5.6)."""
    try:
        return os.stat("/proc/self/ns/time").st_ino
    except FileNotFoundError:
        return 0


def start_of(number: int) -> int:
    """Returns when the process of this number started, in clock ticks since boot. Raises `OSError` if there is none."""
    return int(_stat_of(number)[_START_TIME])


def has_ended(process: RankProcess) -> bool:
    """Returns whether a process is known to have ended; False for a process that is not visible from here."""
    here = this_process()
    if not here.place or process.place != here.place:
        return False
    try:
        stat = _stat_of(process.number)
    except OSError:
        return True
    return int(stat[_START_TIME]) != process.started or stat[0] in _ENDED


def _stat_of(number: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name, the state first. Raises `OSError` if there is no such process."""
    stat = Path(f"/proc/{number}/stat").read_text()
    return stat[stat.rindex(")") + 1 :].split()
