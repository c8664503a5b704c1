"""Calls before and after the calls of a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

Call = Callable[[], object]


class RowCalls:
    """The calls `before` and `after` each numbered call of a row, in the order in which they run."""

    def __init__(self) -> None:
        self.before: dict[int, list[Call]] = defaultdict(list)
        self.after: dict[int, list[Call]] = defaultdict(list)

    def wrap(self, number: int, call: Call) -> Call:
        """Returns `call` with the calls before and after it; `call` itself if there are none, because a step has many calls."""
        before, after = self.before.get(number, []), self.after.get(number, [])
        if not before and not after:
            return call
        calls = (*before, call, *after)

        def run() -> None:
            for function in calls:
                function()

        return run
