"""The command line: one file a verb."""

from __future__ import annotations

from zerobubble.cli.check import check
from zerobubble.cli.group import OneSentenceGroup, group
from zerobubble.cli.list import list_schedules
from zerobubble.cli.make import make_file
from zerobubble.cli.show import show

__all__ = ["main"]

main: OneSentenceGroup = group
for _verb in (list_schedules, show, make_file, check):
    main.add_command(_verb)
