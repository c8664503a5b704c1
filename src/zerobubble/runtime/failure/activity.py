"""Describes what a rank does with its pipeline: words, or the executor that plays its step."""

from __future__ import annotations

from typing import Protocol


class PlaysActions(Protocol):
    """Plays a step action by action; `at` is the position of the current one in its row, -1 before the first."""

    at: int

    @property
    def place(self) -> tuple[str, str]:
        """Its place in its row, in words, and the current action."""


Activity = str | PlaysActions
"""Words such as "while clipping gradients", or what plays a step. Words for a step are made only on a failure: a step has many actions."""


def words_of(activity: Activity) -> tuple[str, str]:
    """Returns an activity in words, and the current action, empty if there is none."""
    return (activity, "") if isinstance(activity, str) else activity.place
