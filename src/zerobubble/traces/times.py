"""When a pass began and ended: on a GPU by its kernels, otherwise by the host's clock without the wait for its message."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from zerobubble.errors import InputError
from zerobubble.export.torch_cells import Cell, MessageEnd, SendWait, Weights
from zerobubble.ir import Step
from zerobubble.traces.file import Event, GpuKernel, RankTrace


class Action(NamedTuple):
    """An action of PyTorch's schedule and its range on the host.

    If two nested ranges name it, it `begins` with the inner range, since the outer range first waits for a message.
    """

    cell: Cell
    start: int
    end: int
    begins: int | None = None

    @property
    def step(self) -> Step | None:
        """The passes that it runs; None for messages and weights."""
        return None if isinstance(self.cell, (MessageEnd, SendWait, Weights)) else self.cell


Interval = tuple[int, int]
"""Start and end in ns since the epoch."""


class TraceTimes(Protocol):
    """Reads the times of actions from a trace, by the clock `name`."""

    name: str

    def ran(self, action: Action, arrivals: Sequence[int]) -> Interval:
        """The time of a pass whose messages came at `arrivals`."""

    def moved(self, action: Action) -> Interval | None:
        """The time of a message; None if the trace lacks it."""

    def summed(self, action: Action) -> Interval | None:
        """The times at which gradients were summed over replicas; None if there were no sums."""

    def notes(self) -> list[str]:
        """Notes for readers of these times."""


def times_of(trace: RankTrace, actions: Sequence[Action]) -> TraceTimes:
    """The times of the GPU if the trace has its kernels, else the times of the host."""
    return KernelTimes(trace, actions) if trace.kernels else HostTimes(trace)


class HostTimes:
    """Passes last from the end of the wait for their messages to the end of their range, by the host's clock."""

    name = "host"

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._starts = [event.start for event in trace.transfers]

    def _within(self, action: Action, word: str) -> list[Event]:
        """The transfers that began in the action and have `word` in their names."""
        transfers = self._trace.transfers[bisect_left(self._starts, action.start) : bisect_right(self._starts, action.end)]
        return [event for event in transfers if word in event.name]

    def ran(self, action: Action, arrivals: Sequence[int]) -> Interval:
        """From the end of the wait to the end of the range. GPipe's ranges ask for messages and send them, too."""
        received = [event.end for event in self._within(action, "recv")]
        begin = max([action.start, *arrivals, *received]) if action.begins is None else action.begins
        end = min([action.end, *(event.start for event in self._within(action, "send"))])
        return min(begin, end), end

    def moved(self, action: Action) -> Interval | None:
        """A send lasts as long as its call, a receive until the message has arrived."""
        assert isinstance(action.cell, MessageEnd)
        if action.cell.is_send:
            return action.start, action.end
        receives = self._within(action, "recv")
        return (action.start, max(event.end for event in receives)) if receives else None

    def summed(self, action: Action) -> Interval | None:
        """The range, if it communicates; a range that only divides gradients is no sum."""
        reduces = self._within(action, "reduce")
        return (action.start, max(action.end, *(event.end for event in reduces))) if reduces else None

    def notes(self) -> list[str]:
        """A note if there is a GPU whose kernels are missing."""
        note = f"{self._trace.file} comes from a machine with a GPU, but has no kernels: its times are those of the host"
        return [note] if self._trace.has_gpu else []


class KernelTimes:
    """Passes last from their first to their last kernel on the stream that computes, by the GPU's clock.

    The host's range says which kernels are a pass's own, by the moment of their launch. The profiler's own ranges on the GPU miss what
    autograd's thread launches, which is most of a backward pass (github.com/pytorch/kineto/issues/1022).
    """

    name = "kernels"

    def __init__(self, trace: RankTrace, actions: Sequence[Action]) -> None:
        launched = [(kernel.launched, kernel) for kernel in trace.kernels if kernel.launched is not None]
        launched.sort(key=lambda pair: pair[0])
        self._launches, self._kernels = [launch for launch, _ in launched], [kernel for _, kernel in launched]
        self._file, self._end, self._empty = trace.file, 0, 0
        self._stream = self._busiest(action for action in actions if action.step)

    def _within(self, action: Action) -> list[GpuKernel]:
        """The kernels that were launched in the action."""
        return self._kernels[bisect_left(self._launches, action.start) : bisect_right(self._launches, action.end)]

    def _busiest(self, passes: Iterable[Action]) -> str:
        """The stream on which passes compute most."""
        busy: Counter[str] = Counter()
        for kernel in (kernel for action in passes for kernel in self._within(action) if not kernel.communicates):
            busy[kernel.stream] += kernel.end - kernel.start
        if not busy:
            remedy = "record with ProfilerActivity.CPU and ProfilerActivity.CUDA"
            message = "{file} has {num_kernels} kernels of a known launch, none in the range of a pass: {remedy}"
            raise InputError(message, file=str(self._file), num_kernels=len(self._kernels), remedy=remedy)
        return busy.most_common(1)[0][0]

    def ran(self, action: Action, arrivals: Sequence[int]) -> Interval:
        """From the first to the last kernel. A pass without kernels takes no time."""
        computing = [kernel for kernel in self._within(action) if kernel.stream == self._stream and not kernel.communicates]
        if not computing:
            self._empty += 1
            begin = max(self._end, action.start, *arrivals)
            return begin, begin
        self._end = max(kernel.end for kernel in computing)
        return min(kernel.start for kernel in computing), self._end

    def moved(self, action: Action) -> Interval | None:
        """The kernels that move the message."""
        return _around([kernel for kernel in self._within(action) if kernel.communicates])

    def summed(self, action: Action) -> Interval | None:
        """The kernels that reduce gradients."""
        return _around([kernel for kernel in self._within(action) if kernel.communicates and "reduce" in kernel.name.lower()])

    def notes(self) -> list[str]:
        """A note if passes have no kernels."""
        return [f"{self._file}: {self._empty} passes launched no kernel and count as taking no time"] if self._empty else []


def _around(kernels: Sequence[GpuKernel]) -> Interval | None:
    return (min(kernel.start for kernel in kernels), max(kernel.end for kernel in kernels)) if kernels else None
