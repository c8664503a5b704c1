"""The command line: one file per command."""

from __future__ import annotations

from zerobubble.cli.blocks import block
from zerobubble.cli.check import check
from zerobubble.cli.compare import compare
from zerobubble.cli.diff import diff_command
from zerobubble.cli.doctor import doctor
from zerobubble.cli.explore import explore
from zerobubble.cli.export_weights import export_weights_command
from zerobubble.cli.group import OneSentenceGroup, group
from zerobubble.cli.inputs.completion import completed
from zerobubble.cli.list import list_schedules
from zerobubble.cli.make import make_file
from zerobubble.cli.pareto import pareto_command
from zerobubble.cli.plan import plan_command
from zerobubble.cli.show import show
from zerobubble.cli.split import split_command
from zerobubble.cli.table import table
from zerobubble.cli.trace import trace_command
from zerobubble.cli.watch import watch

__all__ = ["main"]

main: OneSentenceGroup = group
for _command in (
    list_schedules,
    show,
    make_file,
    check,
    compare,
    table,
    block,
    plan_command,
    pareto_command,
    split_command,
    diff_command,
    trace_command,
    explore,
    watch,
    doctor,
    export_weights_command,
):
    main.add_command(completed(_command))
