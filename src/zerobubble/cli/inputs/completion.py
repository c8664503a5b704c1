"""What the shell completes after a command: schedules, placements, models, GPUs and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import click
from click.shell_completion import CompletionItem

FILE, FOLDER = CompletionItem("", type="file"), CompletionItem("", type="dir")
"""The shell completes files or folders by itself."""


class Completed(click.types.StringParamType):
    """Text that the shell completes: one of `words`, each with its help, the names of files, or several of these between commas."""

    def __init__(self, words: Callable[[], Mapping[str, str]] = dict, *, files: CompletionItem | None = None, commas: bool = False) -> None:
        self._words, self._files, self._commas = words, files, commas

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, begun = incomplete.rpartition(",") if self._commas else ("", "", incomplete)
        words = self._words().items()
        items = [CompletionItem(before + comma + word, help=text) for word, text in words if word.startswith(begun)]
        # bash forgets the words before files, and completes files only where no word fits
        return [CompletionItem(incomplete, type=self._files.type), *items] if self._files else items


def _schedules() -> Mapping[str, str]:
    from zerobubble.schedules import known_schedules

    return {name: recipe.summary for name, recipe in known_schedules().items()}


def _placements() -> Mapping[str, str]:
    from zerobubble.planning.placements import ANY, FAMILIES

    return dict.fromkeys((*FAMILIES, ANY), "")


def _models() -> Mapping[str, str]:
    from zerobubble.cost_model import MODELS

    return dict.fromkeys(MODELS, "")


def _gpus() -> Mapping[str, str]:
    from zerobubble.cost_model import GPUS

    return dict.fromkeys(GPUS, "")


def _blocks() -> Mapping[str, str]:
    from zerobubble.blocks.known import KNOWN

    return dict.fromkeys(KNOWN, "")


FILES, FOLDERS = Completed(files=FILE), Completed(files=FOLDER)
SCHEDULES = Completed(_schedules, files=FILE)
TYPES = {
    "block name": Completed(_blocks),
    "plan config": FILES,
    "name": SCHEDULES,
    "names": SCHEDULES,
    "schedule": SCHEDULES,
    "against": SCHEDULES,
    "plan": FILES,
    "run": FILES,
    "files": FILES,
    "folders": FOLDERS,
    "placement": Completed(_placements, commas=True),
    "model": Completed(_models, files=FILE),
    "gpu": Completed(_gpus, files=FILE),
}
"""Types of text parameters, by name, or by command and name. Parameters with the metavar FILE are files."""


def completed(command: click.Command) -> click.Command:
    """Sets the type of the text parameters of `command`, so that the shell completes them."""
    for param in command.params:
        if type(param.type) is click.types.StringParamType:
            of_name = TYPES.get(f"{command.name} {param.name}") or TYPES.get(param.name or "")
            param.type = of_name or (FILES if param.metavar == "FILE" else param.type)
    return command
