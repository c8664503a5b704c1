"""A cache of the last answers, so that the page saves an answer without computing it again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Asked = TypeVar("Asked", bound=Hashable)
Answered = TypeVar("Answered")

MOST_KEPT = 100_000_000
"""Maximum bytes of all answers in a cache."""
PASS_BYTES = 500
"""Bytes of a pass in an answer, rounded up from measurements."""
OVERHEAD_BYTES = 10_000
"""Bytes of an answer without its passes."""


class AnswerCache(Generic[Asked, Answered]):
    """Makes answers and keeps the last ones, up to `most` bytes by `size`; the oldest are released first. Safe to call from threads."""

    def __init__(self, make: Callable[[Asked], Answered], size: Callable[[Answered], int], most: int = MOST_KEPT) -> None:
        self._make, self._size, self._most = make, size, most
        self._answers: dict[Asked, Answered] = {}
        self._lock = Lock()
        self.bytes = 0

    def __call__(self, question: Asked) -> Answered:
        with self._lock:
            if question in self._answers:
                self._answers[question] = self._answers.pop(question)  # now the newest
                return self._answers[question]
        answer = self._make(question)
        with self._lock:
            self._keep(question, answer)
        return answer

    def _keep(self, question: Asked, answer: Answered) -> None:
        if question in self._answers:  # another thread made the same one meanwhile
            return
        self._answers[question] = answer
        self.bytes += self._size(answer)
        while self.bytes > self._most:
            self.bytes -= self._size(self._answers.pop(next(iter(self._answers))))
