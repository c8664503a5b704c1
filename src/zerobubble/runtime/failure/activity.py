"""What a rank does with its pipeline, in words or as what plays its step."""

from __future__ import annotations

from typing import Protocol


class PlaysActions(Protocol):
    """What runs a step action by action; `at` is the position of the one in hand, -1 before the first."""

    at: int

    @property
    def place(self) -> tuple[str, str]:
        """Where in its row it is, in words, and the action in hand."""


Activity = str | PlaysActions
"""Words such as "while clipping gradients", or what plays a step."""


def words_of(activity: Activity) -> tuple[str, str]:
    """An activity in words, and the action in hand, empty where there is none."""
    return (activity, "") if isinstance(activity, str) else activity.place
