"""Reporting a failure cannot fail: without new threads, or with errors without text, hooks that raise, or a dead store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.patience import SHORT_S
from tests.procs.ranks import Ranks
from tests.procs.signs import await_signs
from tests.procs.test_fault_injection import MOMENTS, boom, replaced, struck
from tests.refusals import raises, states
from zerobubble.hooks import StepHook

pytestmark = pytest.mark.ranks_wait

M = 8
PROMPT_S = 60.0


@pytest.fixture
def hosted() -> Iterator[Ranks]:
    """Four ranks of their own, whose store ends with the process of rank 0."""
    ranks = Ranks(4, hosted=True)
    yield ranks
    ranks.kill()


def fail_together(pipe: zb.Pipeline, moment: str, act: Callable[[], None] | None, calls_before: int = 2) -> zb.PipelineError:
    """A step in which this rank acts at a moment, if it does: what ends it."""
    with ExitStack() as stack:
        if act is not None:
            stack.enter_context(struck(MOMENTS[moment]._replace(calls_before=calls_before), act))
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(M))
    return caught.value


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def fail_without_threads(group: Any, lanes: bool) -> tuple[str, float]:
    """Rank 1 fails when no rank can start a thread any more. Returns the error and the seconds until it was raised."""
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, transport="gloo" if lanes else "auto", timeout=200.0)
    pipe.step(*batch(M))
    torch.distributed.barrier(group)
    began = time.monotonic()
    with replaced(threading.Thread, "start", refuse):
        error = fail_together(pipe, "backward", boom if pipe.rank == 1 else None)
    return str(error), time.monotonic() - began


@pytest.mark.sweep
@pytest.mark.parametrize("lanes", [False, True])
def test_a_failure_is_reported_where_no_thread_can_be_started(world: Ranks, lanes: bool) -> None:
    for text, seconds in world.run(fail_without_threads, lanes, ranks=4):
        states(text, "rank 1", "'run 1B2'", "ValueError: boom")
        assert seconds < PROMPT_S


class NoTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NumberError(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


def huge() -> Exception:
    return ValueError("begin" + "x" * 10**8 + "end")


def unprintable() -> Exception:
    return ValueError("a\0b\ud800")


def circle() -> Exception:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    return first


ODD: tuple[tuple[Callable[[], Exception], str], ...] = (
    (NoTextError, "NoTextError: (its text cannot be made: ValueError)"),
    (NumberError, "NumberError: (its text cannot be made: TypeError)"),
    (huge, "ValueError: begin"),
    (unprintable, "ValueError: a\\x00b\\ud800"),
    (circle, "ValueError: one"),
)


def raise_odd(group: Any, number: int) -> str:
    def strike() -> None:
        raise ODD[number][0]()

    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group)
    return str(fail_together(pipe, "forward", strike if pipe.rank == 1 else None))


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(len(ODD)))
def test_an_error_is_reported_whatever_its_text_is(world: Ranks, number: int) -> None:
    (text,) = set(world.run(raise_odd, number, ranks=3))
    states(text, "rank 1", "'run 1F2'", foreign=ODD[number][1])
    assert len(text.encode()) < 5000


class BreaksInClosing(StepHook):
    closed = 0

    def on_close(self) -> None:
        self.closed += 1
        raise KeyError("closing")


class Breaks:
    """A value that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("it cannot be pickled")


class GathersWhatBreaks(StepHook):
    def on_attach(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def on_step_begin(self, step: Any) -> None:
        self.pipeline.gather(Breaks() if self.pipeline.rank == 1 else None, "gathering what breaks")


def gather_what_breaks(group: Any) -> tuple[str, int | None]:
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, hooks=[GathersWhatBreaks()])
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(M))
    return str(caught.value), caught.value.rank


def test_a_rank_that_cannot_take_part_in_a_gather_is_named_and_not_everybody(world: Ranks) -> None:
    ((text, rank),) = set(world.run(gather_what_breaks, ranks=3))
    assert rank == 1
    states(text, "rank 1", foreign="RuntimeError: it cannot be pickled")


def fail_with_hooks_that_break(group: Any, breaking: int) -> tuple[str, list[str], list[int]]:
    """Rank 1 fails; the hooks of rank `breaking` break when they are closed."""
    is_breaking = torch.distributed.get_rank(group) == breaking
    hooks = [BreaksInClosing(), BreaksInClosing()]
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, hooks=hooks if is_breaking else (), timeout=60.0)
    error = fail_together(pipe, "backward", boom if pipe.rank == 1 else None)
    return str(error), getattr(error, "__notes__", []), [hook.closed for hook in hooks]


@pytest.mark.parametrize("breaking", [1, 2])
def test_a_hook_that_breaks_in_closing_hides_no_error(world: Ranks, breaking: int) -> None:
    for rank, (text, notes, closed) in enumerate(world.run(fail_with_hooks_that_break, breaking, ranks=3)):
        states(text, "rank 1", "'run 1B2'", "ValueError: boom")
        assert notes == (["closing the pipeline failed, too: KeyError: 'closing'"] if rank == breaking else [])
        assert closed == ([1, 1] if rank == breaking else [0, 0])


def close_with_hooks_that_break(group: Any) -> tuple[str, str]:
    """A hook that raises while the pipeline closes is reported after everything is closed, unless another error is being raised."""
    seen = []
    for error in (None, ValueError("mine")):
        pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, hooks=[BreaksInClosing()])
        pipe.step(*batch(M))
        try:
            with pipe:
                if error is not None:
                    raise error
        except (KeyError, ValueError) as caught:
            seen.append(repr(caught))
        with raises(zb.PipelineError, "closed", "pipeline"):
            pipe.step(*batch(M))
    return seen[0], seen[1]


def test_a_hook_that_breaks_in_closing_is_reported_where_nothing_else_is(world: Ranks) -> None:
    assert set(world.run(close_with_hooks_that_break, ranks=2)) == {("KeyError('closing')", "ValueError('mine')")}


def fail_in_forward(group: Any, ended: Path) -> tuple[str, int | None]:
    """Rank 1 fails at its third forward while rank 2 is in a long pass, its first, until the process of rank 0 has `ended`."""
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, timeout=200.0)
    acts: dict[int, Callable[[], None]] = {1: boom, 2: lambda: await_signs(ended)}
    error = fail_together(pipe, "forward", acts.get(pipe.rank), 0 if pipe.rank == 2 else 2)
    return str(error), error.rank


@pytest.mark.long
def test_a_rank_that_was_busy_blames_the_culprit_though_the_store_has_ended(hosted: Ranks, tmp_path: Path) -> None:
    hosted.start(fail_in_forward, tmp_path / "ended", ranks=4)
    first = hosted.outcome(0)
    hosted.processes[0].kill()
    hosted.processes[0].join()
    (tmp_path / "ended").touch()
    assert first == hosted.outcome(1) == hosted.outcome(2) == hosted.outcome(3)
    assert first == ("ok", ("rank 1 failed at 'run 1F2' (F of stage 1, microbatch 2): ValueError: boom", 1))


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stand_still(group: Any, victim: int) -> tuple[str, int | None]:
    """The victim is stopped in its third B, for longer than the others wait."""
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, timeout=SHORT_S)
    error = fail_together(pipe, "backward", stop_self if pipe.rank == victim else None)
    return str(error), error.rank


@pytest.mark.long
@pytest.mark.parametrize("store_lives", [True, False])
def test_a_rank_that_was_stopped_names_itself_and_not_the_host_of_the_store(hosted: Ranks, store_lives: bool) -> None:
    hosted.start(stand_still, 2, ranks=4)
    found = {hosted.outcome(rank) for rank in (0, 1, 3)}
    assert len(found) == 1
    if not store_lives:
        hosted.processes[0].kill()
        hosted.processes[0].join()
    os.kill(hosted.processes[2].pid or 0, signal.SIGCONT)
    woken = hosted.outcome(2)
    assert woken[0] == "ok"
    assert woken[1][1] == 2, woken
    if store_lives:
        assert {woken} == found
    else:
        states(woken[1][0], "rank 2", "stalled")


def fail_while_the_host_is_stopped(group: Any, seconds: float) -> tuple[str, int | None]:
    """Rank 1 fails when it has just stopped the process of rank 0, which hosts the store, for so many seconds."""
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, timeout=60.0)
    host = hosts_process(group)

    def stop_the_host_and_fail() -> None:
        os.kill(host, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (host, signal.SIGCONT)).start()
        boom()

    error = fail_together(pipe, "forward", stop_the_host_and_fail if pipe.rank == 1 else None)
    return str(error), error.rank


def hosts_process(group: Any) -> int:
    found: list[int] = [0]
    found[0] = os.getpid()
    torch.distributed.broadcast_object_list(found, src=0, group=group)
    return found[0]


@pytest.mark.long
def test_a_store_that_is_silent_for_a_second_is_waited_for(hosted: Ranks) -> None:
    results = set(hosted.run(fail_while_the_host_is_stopped, 1.0, ranks=4))
    assert results == {("rank 1 failed at 'run 1F2' (F of stage 1, microbatch 2): ValueError: boom", 1)}
