"""What ranks report through the store, with each of its calls failing in turn: nothing raises or hangs, and all blame the same rank."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.refusals import raises, states
from zerobubble.errors import PipelineError
from zerobubble.runtime.failure import watch
from zerobubble.runtime.failure.report import FailureReport, RankStatus
from zerobubble.runtime.failure.watch import FailureWatch
from zerobubble.runtime.transport.endpoint import Group, StoreTiming

SIZE = 3
TIMING = StoreTiming(answer_s=0.3, silence_s=0.4, stay_s=0.2, listen_s=0.02)
SLOW = StoreTiming(*(10 * seconds for seconds in TIMING))
"""For a second try of ranks that got no time to answer while many others ran."""
PATIENT = TIMING._replace(answer_s=10.0, silence_s=10.0)
"""Of ranks that all answer: on a busy machine one may come late to it, and may seem to have stood still."""
STANDING = TIMING._replace(answer_s=1.0, silence_s=10.0)
"""Of ranks that are to know that they have just stood still: within `answer_s` of it they may be kept from running once more."""
LONGEST_S = 60.0
"""After which a rank hangs; each of the four waits above may come once or twice."""


class DictStore:
    """A store in this process."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self.lock:
            if self.kept.get(key, b"").decode() == expected:
                self.kept[key] = value.encode()
            return self.kept[key]


Fault = Callable[[StoreTiming], Any]
"""What a call of a store comes to, where ranks wait as long as the timing says."""


class FaultyStore:
    """A store whose call number `faulty` of those that touch a key which begins with `prefix` ends in `fault`, and so do all after it."""

    def __init__(self, store: DictStore, prefix: str, faulty: int, fault: Fault, timing: StoreTiming = TIMING) -> None:
        self.store = store
        self.prefix = prefix
        self.left = faulty
        self.fault = fault
        self.timing = timing

    def __getattr__(self, name: str) -> Any:
        def call(keys: Any, *args: Any) -> Any:
            first = keys if isinstance(keys, str) else keys[0]
            self.left -= first.startswith(self.prefix)
            return self.fault(self.timing) if self.left < 0 else getattr(self.store, name)(keys, *args)

        return call


def gone(timing: StoreTiming) -> Any:
    raise ConnectionError("Broken pipe")


def silent(timing: StoreTiming) -> Any:
    time.sleep(4 * timing.silence_s)
    raise RuntimeError("the store was silent")


def garbled(timing: StoreTiming) -> Any:
    return b"no JSON"


class Rank:
    """One rank's watch, and what it does meanwhile."""

    def __init__(self, rank: int, store: Any, host: int | None = None, timing: StoreTiming = TIMING) -> None:
        self.now = RankStatus("at 'run 0F0'")
        self.watch = FailureWatch(Group(rank, SIZE, store, host, timing=timing), self.status, self.disconnect, self.abort)
        self.report: FailureReport | None = None

    def status(self) -> RankStatus:
        return self.now

    def disconnect(self, rank: int) -> None:
        return

    def abort(self) -> None:
        return

    def fail(self) -> None:
        self.report = self.watch.publish(FailureReport(1, "run 1B2", "rank 1 failed at 'run 1B2': ValueError: boom"))
        self.watch.close(self.report)

    def lose(self, peer: int) -> None:
        self.now = RankStatus("waiting for a message", peer, "Connection closed by peer")
        self.report = self.watch.find_culprit(self.now)
        self.watch.close(self.report)


def together(*calls: Callable[[], None]) -> None:
    """Every call in a thread of its own."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    end = time.monotonic() + LONGEST_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"


@contextmanager
def no_threads() -> Iterator[None]:
    """Within, no thread can be started, as when memory or the number of processes has run out."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kept = threading.Thread.start
    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = kept  # type: ignore[method-assign]


FAULTS, PREFIXES = (gone, silent, garbled), ("", "report", "status", "alarm", "left")
CASES = [(fault, prefix, faulty) for fault in FAULTS for prefix in PREFIXES for faulty in (0, 1)]


def failing_witness(fault: Fault, prefix: str, faulty: int, timing: StoreTiming) -> None:
    """Rank 1 fails, and the store of rank 2 at one of its calls; ranks 0 and 2 have lost contact with rank 1."""
    store = DictStore()
    failing = FaultyStore(store, prefix, faulty, fault, timing)
    first, culprit, last = (Rank(rank, each, timing=timing) for rank, each in enumerate((store, store, failing)))
    together(lambda: first.lose(1), culprit.fail, lambda: last.lose(1))
    assert culprit.report is not None
    assert first.report == culprit.report
    assert last.report is not None
    assert last.report == culprit.report or last.report.message.startswith("rank 2 lost contact with rank 1 while waiting for a message")


def failing_culprit(fault: Fault, prefix: str, faulty: int, timing: StoreTiming) -> None:
    """Rank 1 fails, and its store at one of its calls; rank 0 has lost contact with it, and rank 2 with rank 0."""
    store = DictStore()
    failing = FaultyStore(store, prefix, faulty, fault, timing)
    first, culprit, last = (Rank(rank, each, timing=timing) for rank, each in enumerate((store, failing, store)))
    culprit.now = RankStatus("at 'run 1B2'", op="run 1B2")
    together(lambda: first.lose(1), culprit.fail, lambda: last.lose(0))
    assert culprit.report is not None
    states(culprit.report.message, "rank 1", "'run 1B2'", "ValueError")
    assert first.report is not None
    assert first.report == last.report
    assert first.report.rank == 1


@pytest.mark.parametrize("judge", [failing_witness, failing_culprit])
def test_whatever_call_of_a_ranks_store_fails_it_shows_what_it_knows_and_the_others_agree(judge: Callable[..., None]) -> None:
    with ThreadPoolExecutor(len(CASES)) as pool:
        judged = {case: pool.submit(judge, *case, TIMING) for case in CASES}
    for case in CASES:
        if isinstance(judged[case].exception(), AssertionError):  # next to all others, a rank may get no time to answer
            judge(*case, SLOW)
        else:
            judged[case].result()


def test_a_failure_needs_no_new_thread() -> None:
    store = DictStore()
    ranks = [Rank(rank, store, timing=PATIENT) for rank in range(SIZE)]
    with ExitStack() as stack:
        threads = [threading.Thread(target=call) for call in (lambda: ranks[0].lose(1), ranks[1].fail, lambda: ranks[2].lose(0))]
        go = threading.Event()
        waiting = [threading.Thread(target=lambda t=thread: (go.wait(), t.run())) for thread in threads]  # type: ignore[misc]
        for thread in waiting:
            thread.start()
        stack.enter_context(no_threads())
        go.set()
        for thread in waiting:
            thread.join(LONGEST_S)
    assert {rank.report.message for rank in ranks if rank.report is not None} == {"rank 1 failed at 'run 1B2': ValueError: boom"}
    assert all(rank.report is not None for rank in ranks)


def test_a_rank_that_cannot_have_its_thread_shows_the_others() -> None:
    store = DictStore()
    other = Rank(0, store, timing=PATIENT)
    with no_threads(), raises(PipelineError, "rank 1", "failed", "thread") as caught:
        Rank(1, store)
    together(lambda: other.lose(1))
    assert other.report is not None
    assert other.report.message == str(caught.value)


def test_a_rank_hears_while_it_is_busy_and_needs_no_store_then() -> None:
    """Rank 0 hosts the store, and its process ends as soon as all have heard; rank 2 was in a long pass."""
    store = DictStore()
    late = FaultyStore(store, "", 1 << 30, gone)
    host, culprit, busy = Rank(0, store, 0, PATIENT), Rank(1, store, 0, PATIENT), Rank(2, late, 0, PATIENT)
    together(lambda: host.lose(1), culprit.fail)
    end = time.monotonic() + LONGEST_S
    while busy.watch.received is None:
        assert time.monotonic() < end, "it does not hear"
        time.sleep(TIMING.listen_s)
    late.left = 0
    together(lambda: busy.lose(1))
    assert busy.report == culprit.report


def test_the_end_of_the_host_is_heard_by_a_rank_that_was_kept_from_running_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is gone with its host; before another thread hears of the end, this process stands still, for long by every clock."""
    rank = Rank(2, FaultyStore(DictStore(), "", 0, gone), 0, PATIENT)
    now, pauses = [time.monotonic()], []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += 60.0
        if len(pauses) == 2:
            rank.watch.report_process_end(0, rank.status())

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=pause))
    rank.lose(1)
    assert rank.report is not None
    states(rank.report.message, "rank 0", "torch.distributed")
    assert len(pauses) == 2


def hold_python(seconds: float) -> None:
    """Keep Python's lock, as foreign code can: no other thread of this process runs."""
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@pytest.mark.long
def test_a_rank_that_stood_still_does_not_blame_the_host_of_a_store_that_is_gone_since() -> None:
    store = DictStore()
    late = FaultyStore(store, "", 1 << 30, gone)
    frozen = Rank(2, late, 0, STANDING)
    time.sleep(10 * TIMING.listen_s)
    late.left = 0
    hold_python(2 * STANDING.answer_s)
    together(lambda: frozen.lose(0))
    assert frozen.report is not None
    assert frozen.report.rank == 2
    assert re.match(r"rank 2 stalled for \d+ s: ", frozen.report.message)


@pytest.mark.long
def test_a_host_of_the_store_that_stood_still_does_not_blame_a_process_that_gave_it_up_and_ended() -> None:
    timing = STANDING._replace(silence_s=STANDING.answer_s)
    host = Rank(0, DictStore(), 0, timing)
    time.sleep(10 * TIMING.listen_s)
    hold_python(2 * timing.silence_s)
    host.watch.report_process_end(1, host.status())
    host.lose(1)
    assert host.report is not None
    assert host.report.rank == 0


def test_a_host_of_the_store_that_ran_on_blames_the_process_that_ended() -> None:
    host = Rank(0, DictStore(), 0, PATIENT)
    host.watch.report_process_end(1, host.status())
    host.lose(1)
    assert host.report is not None
    assert host.report.rank == 1


def test_a_store_that_is_gone_is_its_hosts_fault_where_this_rank_ran_on() -> None:
    rank = Rank(2, FaultyStore(DictStore(), "", 3, gone), 0, PATIENT)
    together(lambda: rank.lose(1))
    assert rank.report is not None
    assert rank.report.rank == 0
    states(rank.report.message, "rank 0", "torch.distributed")


@pytest.mark.parametrize(("host", "ended"), [(None, 1), (0, 1), (0, 0)])
@pytest.mark.parametrize("kills", [0, 1, 2])
def test_memory_is_suspected_only_where_the_system_has_ended_a_process_for_want_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: int | None, ended: int, kills: int
) -> None:
    counters = tmp_path / "vmstat"
    monkeypatch.setattr(watch, "_COUNTERS", counters)
    counters.write_text("nr_free_pages 7\noom_kill 3\n")
    rank = Rank(2, DictStore(), host, PATIENT)
    counters.write_text(f"nr_free_pages 7\noom_kill {3 + kills}\n")
    assert rank.watch.report_process_end(ended, RankStatus("at 'run 2F0'"))
    found = rank.watch.received or rank.watch.publish(FailureReport(2, "", "something else"))
    rank.watch.close(found)
    states(found.message, f"rank {ended}", "process", "ended")
    words = {0: "", 1: "1 process on that machine", 2: "2 processes on that machine"}[kills]
    assert words in found.message
    assert ("OOM" in found.message) is (kills > 0)


@pytest.mark.long
def test_the_host_of_the_store_is_not_blamed_for_its_end_by_a_rank_that_stood_still() -> None:
    frozen = Rank(2, DictStore(), 0, STANDING)
    time.sleep(10 * TIMING.listen_s)
    hold_python(2 * STANDING.answer_s)
    assert frozen.watch.report_process_end(0, frozen.status())
    found = frozen.watch.received
    frozen.watch.close(found)
    assert found is not None
    assert re.match(r"rank 2 stalled for \d+ s: ", found.message)
    assert found.message.endswith("then the process of rank 0, which hosted the torch.distributed store, had ended")
