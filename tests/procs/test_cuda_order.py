"""Requirements of CUDA that can be tested without it: the order in which communicators are made, and when events are read."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any, ClassVar

import pytest
import torch

from tests.refusals import raises
from zerobubble.communicators import (
    SUMS_CHANNELS,
    USUAL_QUEUES,
    Communicator,
    Purpose,
    communicator_of,
    communicators_of,
    held_by,
    queues_for,
)
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.lowering import Compiled
from zerobubble.program import Channel
from zerobubble.rules import ValueKind
from zerobubble.runtime.device import hardware_queues
from zerobubble.runtime.executor.program_cache import every_channel
from zerobubble.runtime.measure import clock
from zerobubble.runtime.transport.endpoint import Group
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.transport.nccl import NcclEndpoint
from zerobubble.schedules import make, with_vocabulary

LANES = [f"{purpose}-{direction}" for purpose in (Purpose.STAGES, Purpose.SHARED) for direction in ("down", "up")]


class Communicators:
    """Emulates NCCL: the first message between two ranks blocks each of them until the other has arrived."""

    def __init__(self) -> None:
        self.meetings: dict[frozenset[int], threading.Barrier] = defaultdict(lambda: threading.Barrier(2, timeout=60))
        self.lock = threading.Lock()

    def end(self, rank: int) -> Any:
        return _End(self, rank)

    def meet(self, mine: int, other: int) -> None:
        with self.lock:
            collective = self.meetings[frozenset((mine, other))]
        collective.wait()


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


class _End:
    def __init__(self, lane: Communicators, rank: int) -> None:
        self.lane, self.rank = lane, rank

    def send(self, _: list[torch.Tensor], peer: int, tag: int) -> _Done:
        assert tag == 0
        self.lane.meet(self.rank, peer)
        return _Done()

    recv = send


class Faked(NcclEndpoint):
    """The endpoint of `rank` with communicators that need no device."""

    def __init__(self, communicators: dict[str, Communicators], rank: int, channels: list[Channel]) -> None:
        super().__init__(Group(rank, 4, None), 5.0)
        self._ends = {lane: end.end(rank) for lane, end in communicators.items()}
        self.open(torch.device("cpu"), channels)

    def backend(self, name: str, members: Any = None, most: int | None = None) -> Any:
        if members is not None:
            assert most == SUMS_CHANNELS
            return None
        return self._ends[name]


def test_the_communicator_of_sums_counts() -> None:
    channels = every_channel(Compiled.from_schedule(make("1f1b", 2, 4)))
    end = Faked({lane: Communicators() for lane in LANES}, 0, channels)
    before = end.held_bytes()
    end.sums([0, 2])
    assert end.held_bytes() - before == held_by(0, [Communicator((0, 2), Purpose.SUMS)]).bytes > 0


@pytest.mark.parametrize(
    "schedule",
    [make("zb-h1", 4, 8), make("zb-v", 4, 8), make("dualpipe", 4, 8), make("interleaved-1f1b", 4, 8), with_vocabulary(make("1f1b", 4, 8))],
    ids=lambda schedule: schedule.name,
)
def test_every_communicator_is_made_in_one_order(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    channels = [
        *every_channel(Compiled.from_schedule(schedule)),
        *(Channel(a, b, ValueKind.WEIGHT_WORK) for a, b in permutations(range(4), 2)),
    ]
    lanes = {lane: Communicators() for lane in LANES}
    ends = [Faked(lanes, rank, channels) for rank in range(4)]
    with ThreadPoolExecutor(4) as ranks:
        # a rank that gets the channels in another order opens them in the same one
        list(ranks.map(lambda rank: ends[rank].open_channels(channels if rank % 2 else channels[::-1]), range(4)))
    assert [end.held_bytes() for end in ends] == [held_by(rank, communicators_of(channels)).bytes for rank in range(4)]
    made = {_communicator(lane, *sorted(pair)) for lane, communicators in lanes.items() for pair in communicators.meetings}
    assert made == set(map(communicator_of, channels))


@pytest.mark.parametrize(("given", "found"), [("1", 1), ("", USUAL_QUEUES), ("5", 5), ("none", USUAL_QUEUES)])
def test_kernels_that_could_block_each_other_in_a_hardware_queue_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: str, found: int
) -> None:
    """Every rank raises before it makes a communicator, for which the others would wait."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    assert hardware_queues() == found
    channels = every_channel(Compiled.from_schedule(make("zb-v", 4, 8)))
    needed = queues_for(communicators_of(channels))
    shared = [Channel(a, b, ValueKind.WEIGHT_WORK) for a, b in permutations(range(4), 2)]
    lanes = {lane: Communicators() for lane in LANES}
    ends = [Faked(lanes, rank, channels) for rank in range(4)]
    for end in ends:
        if found < needed:
            with raises(InputError, "CUDA_DEVICE_MAX_CONNECTIONS", needed=needed, found=found):
                end.open_channels(channels)
        with raises(InputError, "CUDA_DEVICE_MAX_CONNECTIONS", needed=needed + 6, found=found):
            end.open_channels(shared)
    assert not any(communicators.meetings for communicators in lanes.values())


def _communicator(lane: str, low: int, high: int) -> Communicator:
    purpose, direction = lane.split("-")
    return Communicator((low, high) if direction == "up" else (high, low), Purpose(purpose))


def test_lines_without_communicators_need_no_first_message() -> None:
    GlooEndpoint(Group(0, 2, None), 5.0).open_channels([Channel(0, 1, ValueKind.ACTIVATION)])  # nobody answers


class Event:
    """An event of a stream whose clock is `now`; `waits` counts how often the host waited."""

    now = 0.0
    waits = 0
    streams: ClassVar[list[Any]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        """What is recorded earlier is lost."""
        self.at = Event.now
        Event.streams.append(stream)

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_events_are_on_the_stages_device_and_read_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(clock, "perf_counter_ns", lambda: 10_000_000_000)
    hours = clock.clock_for(torch.device("cuda", 1))
    hours.start()
    marks = []
    for Event.now in (0.0, 1.5, 4.0):
        marks.append(hours.mark())
    assert Event.waits == 0
    Event.now = 5.0
    assert [hours.read(mark) for mark in marks] == [9_995_000_000, 9_996_500_000, 9_999_000_000]
    assert set(Event.streams) == {"the stream of cuda:1"}
    Event.now = 6.0
    assert hours.read(hours.mark()) == 10_001_000_000  # the optimizer's step, noted after the times were read
    hours.start()
    assert [hours.mark() for _ in marks] == marks  # creating events takes longer than recording them
