"""The command line: one file a verb."""

from __future__ import annotations

from zerobubble.cli.blocks import block
from zerobubble.cli.check import check
from zerobubble.cli.compare import compare
from zerobubble.cli.diff import diff_verb
from zerobubble.cli.explore import explore
from zerobubble.cli.export_weights import export_weights_verb
from zerobubble.cli.group import OneSentenceGroup, group
from zerobubble.cli.list import list_schedules
from zerobubble.cli.make import make_file
from zerobubble.cli.pareto import pareto_verb
from zerobubble.cli.plan import plan_verb
from zerobubble.cli.show import show
from zerobubble.cli.split import split_verb
from zerobubble.cli.table import table
from zerobubble.cli.trace import trace_verb

__all__ = ["main"]

main: OneSentenceGroup = group
for _verb in (
    list_schedules,
    show,
    make_file,
    check,
    compare,
    table,
    block,
    plan_verb,
    pareto_verb,
    split_verb,
    diff_verb,
    trace_verb,
    explore,
    export_weights_verb,
):
    main.add_command(_verb)
