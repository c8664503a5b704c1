"""The last answers, kept within a number of bytes, for what is saved of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Asked = TypeVar("Asked", bound=Hashable)
Given = TypeVar("Given")

MOST_KEPT = 100_000_000
"""The most bytes of all kept answers of one sort together."""
PASS_BYTES = 500
"""Bytes of a pass in an answer, rounded up from measurements."""
OVERHEAD_BYTES = 10_000
"""Bytes of an answer without its passes."""


class Kept(Generic[Asked, Given]):
    """Makes answers and keeps the last ones, up to `most` bytes by `size`; the oldest are released first. Safe to call from threads."""

    def __init__(self, make: Callable[[Asked], Given], size: Callable[[Given], int], most: int = MOST_KEPT) -> None:
        self._make, self._size, self._most = make, size, most
        self._answers: dict[Asked, Given] = {}
        self._lock = Lock()
        self.bytes = 0

    def __call__(self, question: Asked) -> Given:
        with self._lock:
            if question in self._answers:
                self._answers[question] = self._answers.pop(question)  # now the newest
                return self._answers[question]
        given = self._make(question)
        with self._lock:
            self._keep(question, given)
        return given

    def _keep(self, question: Asked, given: Given) -> None:
        if question in self._answers:  # another thread made the same one meanwhile
            return
        self._answers[question] = given
        self.bytes += self._size(given)
        while self.bytes > self._most:
            self.bytes -= self._size(self._answers.pop(next(iter(self._answers))))
