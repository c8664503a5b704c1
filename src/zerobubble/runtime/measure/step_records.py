"""What one rank notes in a step: when its passes, messages, sums and copies began and ended, and the bytes held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from zerobubble.ir import Op
from zerobubble.rules import Value
from zerobubble.runtime.measure.clock import Instant, clock_for
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.measure.trace import RawRecords, Records
from zerobubble.timeline import Copying, Doing


class StepRecords:
    """The notes of the last step on `device`, in instants of its `clock`.

    Attributes:
        times_messages: Whether sends and waits are timed.
        meter: Counts the bytes held for backward; None if they are not recorded.
        order: The microbatch at each place of the program. Notes have the numbers of places.
    """

    def __init__(self, device: torch.device, num_microbatches: int) -> None:
        self.clock = clock_for(device)
        self.times_messages = False
        self.meter: Meter | None = None
        self._optimizer: list[tuple[Instant, Instant]] = []
        self._reductions: list[tuple[int, Instant, Instant]] = []
        self.restart(range(num_microbatches))

    def begin(self) -> None:
        """Begins a step."""
        self._optimizer = []
        self._reductions = []
        self.clock.start()

    def restart(self, order: Sequence[int]) -> None:
        """Begins the passes of a step, which take microbatches in this order, or begins them again."""
        self.order = order
        self.spans: list[tuple[Op, Instant, Instant]] = []
        self.copies: list[tuple[Copying, int, int, Any]] = []
        self._held: list[tuple[Instant, int]] = []
        self._messages: list[tuple[Doing, Value, Instant, Instant]] = []

    def timed(self, doing: Doing, value: Value, call: Callable[[], Any]) -> Callable[[], Any]:
        """Returns `call`, with its beginning and end recorded if messages are timed."""
        if not self.times_messages:
            return call
        mark = self.clock.mark

        def timed() -> Any:
            begin = mark()
            result = call()
            self._messages.append((doing, value, begin, mark()))
            return result

        return timed

    def note_memory(self, when: Instant = None) -> None:
        """Records the bytes held now, or at the instant `when`, if they are metered."""
        if self.meter is not None:
            self._held.append((self.clock.mark() if when is None else when, self.meter.bytes))

    def note_reduction(self, stage: int, began: Instant, ended: Instant) -> None:
        """Records when gradients of a stage were summed over replicas."""
        self._reductions.append((stage, began, ended))

    @contextmanager
    def noting_optimizer(self) -> Iterator[None]:
        """Records when the code inside began and ended."""
        self.clock.follow()
        begin = self.clock.mark()
        yield
        self._optimizer.append((begin, self.clock.mark()))

    def read(self) -> Records:
        """Returns the records in host time."""
        return self.read_later()()

    def read_later(self) -> Callable[[], Records]:
        """Returns a function that returns the records of this step, even during later steps."""
        noted = self.spans, self._held, self._messages, tuple(self._optimizer), tuple(self._reductions), self.copies
        read = partial(RawRecords(self.order, *noted).read, self.clock)
        if self.clock.instants_last:
            return read
        records = read()
        return lambda: records
