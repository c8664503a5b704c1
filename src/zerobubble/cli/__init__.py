"""The command line: one file per command, loaded when the command is used."""

from __future__ import annotations

from importlib import import_module

import click

from zerobubble.cli.group import Commands, OneSentenceGroup, group
from zerobubble.cli.inputs.completion import completed

__all__ = ["main"]

_COMMANDS = {
    "list": ("list", "list_schedules", "List the known schedules."),
    "show": ("show", "show", "Draw a schedule with bubble and memory."),
    "make": ("make", "make_file", "Write a schedule as a file of any form."),
    "check": ("check", "check", "Check whether a schedule can run."),
    "compare": ("compare", "compare", "Compare schedules in figures and pictures."),
    "table": ("table", "table", "Compare closed forms with simulations."),
    "block": ("blocks", "block", "Make a schedule of a building block."),
    "plan": ("plan", "plan_command", "Find the best schedule for times and memory."),
    "pareto": ("pareto", "pareto_command", "Find the smallest bubble for each memory."),
    "split": ("split", "split_command", "Show where a model is cut."),
    "diff": ("diff", "diff_command", "Explain where a run differs from its plan."),
    "trace": ("trace", "trace_command", "Explain a run of PyTorch's own pipelining from its profiler traces."),
    "explore": ("explore", "explore", "Try schedules in the browser."),
    "watch": ("watch", "watch", "Show training runs in the browser while they go on."),
    "doctor": ("doctor", "doctor", "Check whether this machine can train."),
    "export-weights": ("export_weights", "export_weights_command", "Write a checkpoint's weights for Transformers."),
}
"""File, function and short help of each command."""


def _load(name: str) -> click.Command:
    file, function, help_ = _COMMANDS[name]
    command: click.Command = getattr(import_module(f"zerobubble.cli.{file}"), function)
    command.short_help = help_
    return completed(command)


main: OneSentenceGroup = group
main.commands = Commands({name: help_ for name, (_, _, help_) in _COMMANDS.items()}, _load)
