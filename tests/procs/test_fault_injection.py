"""(fault) x (moment) x (rank) x (transport): every rank that lives ends with the same clear error, in bounded time.

A fault strikes one rank the moment it enters a pass, a gather or its own code between two calls. Processes that a fault leaves healthy
are shared; a kill or a freeze gets processes of its own, several worlds at a time, for they mostly wait.
Of all cases one in three is played, unless ZEROBUBBLE_EXHAUSTIVE=1.

A session is complete on all ranks or absent on all of them. The error names the culprit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

import zerobubble as zb
from tests.procs.exhaustive import one_in
from tests.procs.models import batch, build, loss_fn
from tests.procs.patience import SHORT_S
from tests.procs.ranks import Ranks
from zerobubble.runtime.executor.program_cache import ProgramCache
from zerobubble.runtime.hooks import clip
from zerobubble.runtime.measure import trace
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.step.loss import StepLosses
from zerobubble.runtime.transport.transport import Transport

pytestmark = pytest.mark.ranks_wait

RANKS, MICROBATCHES = 4, 8
LONG_S, SPARE_S = 100.0, 60.0
"""The timeout of pipelines that must not need it, and what may pass beyond that of those with a frozen rank."""


def boom() -> None:
    raise ValueError("boom")


def leave() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def recurse() -> None:
    recurse()


def warn() -> None:
    raise UserWarning("a warning turned error")


def fill_memory() -> None:
    torch.empty(1 << 55)


def fill_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Moment(NamedTuple):
    """The call at which a fault strikes, and how the error of an exception says so, with `{rank}` for the rank."""

    owner: Any
    name: str
    calls_before: int
    words: str


MOMENTS = {
    "forward": Moment(Stage, "forward", 2, "at 'run {rank}F2' (F of stage {rank}, microbatch 2)"),
    "backward": Moment(Stage, "backward", 2, "at 'run {rank}B2' (B of stage {rank}, microbatch 2)"),
    "weight": Moment(Stage, "weight", 2, "at 'run {rank}W2' (W of stage {rank}, microbatch 2)"),
    "loss": Moment(StepLosses, "_loss", 2, "at 'run {rank}F2' (F of stage {rank}, microbatch 2)"),
    "after": Moment(StepLosses, "close", 0, "after its last pass"),
    "clip": Moment(clip, "norms_of", 0, "while clipping gradients"),
    "timeline": Moment(trace, "gather", 0, "while gathering a timeline"),
    "profile": Moment(ProgramCache, "one_by_one", 0, "while profiling"),
    "eval": Moment(Stage, "infer", 1, "at 'run {rank}F1' (F of stage {rank}, microbatch 1)"),
    "open": Moment(Transport, "open", 0, "while connecting the ranks"),
}
OUTSIDE = ("build", "optimizer")
"""Moments in user code, where an exception is reported differently."""


class Case(NamedTuple):
    """One fault: `act` at `moment` on `rank`, over gloo where `lanes`, else over rings."""

    act: Callable[[], None]
    moment: str
    rank: int
    lanes: bool

    def __str__(self) -> str:
        return f"{self.act.__name__} in {self.moment} of rank {self.rank} over {'lanes' if self.lanes else 'rings'}"


class Ended(NamedTuple):
    """How a rank's training ended: the error's type, text, rank and action, and how long the last call took in seconds."""

    kind: str
    text: str
    rank: int | None
    op: str | None
    seconds: float


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextmanager
def struck(moment: Moment, act: Callable[[], None]) -> Iterator[None]:
    """Within, a call of the moment acts first, once."""
    call, calls = getattr(moment.owner, moment.name), 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == moment.calls_before + 1:
            act()
        return call(*args, **kwargs)

    with replaced(moment.owner, moment.name, run):
        yield


@contextmanager
def prepared(case: Case, is_victim: bool) -> Iterator[None]:
    if is_victim and case.moment in MOMENTS:
        with struck(MOMENTS[case.moment], case.act):
            yield
    else:
        yield


def train(group: Any, case: Case, timeout: float) -> Ended:
    """Two steps and all that may come between, with the fault."""
    rank = torch.distributed.get_rank(group)
    is_victim = rank == case.rank
    began = time.monotonic()

    def faulty_build(stage: int, num_stages: int) -> torch.nn.Module:
        if is_victim and case.moment == "build":
            case.act()
        return build(stage, num_stages)

    try:
        with (
            prepared(case, is_victim),
            zb.Pipeline(
                faulty_build, "zb-h1", MICROBATCHES, loss_fn, group=group, timeout=timeout, transport="gloo" if case.lanes else "auto"
            ) as pipe,
        ):
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

            def update() -> None:
                if is_victim and case.moment == "optimizer":
                    case.act()
                optimizer.step()

            whole = batch(MICROBATCHES)
            for call in (
                lambda: pipe.step(*whole),
                lambda: pipe.clip_grad_norm_(1.0),
                pipe.timeline,
                update,
                lambda: pipe.eval_step(*whole),
                lambda: pipe.profile(*whole, steps=1),
                lambda: pipe.step(*whole),
            ):
                began = time.monotonic()
                call()
    except BaseException as error:
        return Ended(type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "op", None), time.monotonic() - began)
    raise AssertionError("nothing went wrong")


def one_right_step(group: Any) -> float:
    with zb.Pipeline(build, "zb-h1", MICROBATCHES, loss_fn, group=group) as pipe:
        return pipe.step(*batch(MICROBATCHES)).item()


def places(moment: str) -> Iterable[int]:
    return (RANKS - 1,) if moment == "loss" else range(RANKS)


def matrix(*acts: Callable[[], None]) -> list[Case]:
    moments = (*MOMENTS, *OUTSIDE)
    return [Case(act, m, rank, lanes) for act in acts for m in moments for rank in places(m) for lanes in (False, True)]


def every_place(act: Callable[[], None]) -> list[Case]:
    """Every moment on every rank, the transports in turn."""
    moments = (*MOMENTS, *OUTSIDE)
    return [Case(act, m, rank, (i + rank) % 2 == 1) for i, m in enumerate(moments) for rank in places(m)]


def diagonal(*acts: Callable[[], None]) -> list[Case]:
    """Every moment once, the ranks and transports in turn."""
    moments = (*MOMENTS, *OUTSIDE)
    return [
        Case(act, m, tuple(places(m))[(i + k) % len(tuple(places(m)))], (i // 2 + k) % 2 == 1)
        for k, act in enumerate(acts)
        for i, m in enumerate(moments)
    ]


def in_turns(*acts: Callable[[], None]) -> list[Any]:
    """The diagonal: every moment with one of the acts, which take turns, and with the others in long tests."""
    cases = diagonal(*acts)
    moments = len(cases) // len(acts)
    return [
        case if place % moments % len(acts) == place // moments else pytest.param(case, marks=pytest.mark.long)
        for place, case in enumerate(cases)
    ]


def judge_exception(world: Ranks, case: Case) -> None:
    ended = [Ended(*result) for result in world.run(train, case, LONG_S, ranks=RANKS)]
    for rank, end in enumerate(ended):
        assert end.seconds < LONG_S / 2, f"{case}: {end}"
        if rank == case.rank and not issubclass(exception_of(case.act), Exception):
            assert end.kind == exception_of(case.act).__name__, f"{case}: {end}"
        elif case.moment == "build" and issubclass(exception_of(case.act), Exception):
            assert end.kind == "InputError", f"{case}: {end}"
            assert end.text.startswith(f"rank {case.rank}: {exception_of(case.act).__name__}"), f"{case}: {end}"
        elif case.moment == "optimizer":
            outside = f"rank {case.rank} kept the others waiting: it was closing the pipeline after {exception_of(case.act).__name__}"
            assert rank == case.rank or (end.rank == case.rank and end.text.startswith(outside)), f"{case}: {end}"
        else:
            words = "while building its stages" if case.moment == "build" else MOMENTS[case.moment].words.format(rank=case.rank)
            assert end.kind == "PipelineError", f"{case}: {end}"
            assert end.rank == case.rank, f"{case}: {end}"
            assert end.text.startswith(f"rank {case.rank} failed {words}: {exception_of(case.act).__name__}"), f"{case}: {end}"
    found = {end.text for rank, end in enumerate(ended) if rank != case.rank}
    assert len(found) == 1, f"{case}: {found}"


def exception_of(act: Callable[[], None]) -> type[BaseException]:
    try:
        act()
    except BaseException as error:
        return type(error)
    raise AssertionError("the act raises nothing")


def judge_kill(case: Case) -> None:
    world = Ranks(RANKS)
    try:
        outcomes = world.outcomes(train, case, LONG_S, ranks=RANKS)
        assert outcomes[case.rank] == ("gone", "SIGKILL"), f"{case}: {outcomes}"
        judge_survivors(case, {rank: outcome for rank, outcome in enumerate(outcomes) if rank != case.rank}, LONG_S / 2)
    finally:
        world.kill()


def judge_stop(case: Case) -> None:
    """The others name the frozen rank. When it wakes, it reports the same, and all continue with a new pipeline."""
    world = Ranks(RANKS)
    try:
        world.run(one_right_step, ranks=RANKS)  # first calls take time
        world.start(train, case, SHORT_S, ranks=RANKS)
        judge_survivors(case, {rank: world.outcome(rank) for rank in range(RANKS) if rank != case.rank}, SHORT_S + SPARE_S)
        os.kill(world.processes[case.rank].pid or 0, signal.SIGCONT)
        state, end = world.outcome(case.rank)
        assert state == "ok", f"{case}: {end}"
        assert end[0] == "PipelineError", f"{case}: {end}"
        assert end[2] == case.rank, f"{case}: {end}"
        assert len(set(world.run(one_right_step, ranks=RANKS))) == 1
    finally:
        world.kill()


def judge_survivors(case: Case, outcomes: dict[int, tuple[str, Any]], seconds: float) -> None:
    assert all(state == "ok" for state, _ in outcomes.values()), f"{case}: {outcomes}"
    ended = {rank: Ended(*result) for rank, (_, result) in outcomes.items()}
    for end in ended.values():
        assert end.kind == "PipelineError", f"{case}: {ended}"
        assert end.rank == case.rank, f"{case}: {ended}"
        found = "is gone: its process ended while rank " if case.act is kill else "does not answer: rank "
        assert end.text.startswith(f"rank {case.rank} {found}"), f"{case}: {ended}"
        assert end.seconds < seconds, f"{case}: {ended}"
    assert len({end.text for end in ended.values()}) == 1, f"{case}: {ended}"


def judge_all(judge: Callable[[Case], None], cases: list[Case], at_once: int = 6) -> None:
    """Judges the cases in several worlds at a time, and reports every case that fails."""
    with ThreadPoolExecutor(at_once) as pool:
        failed = [str(error) for error in pool.map(lambda case: _error_of(judge, case), cases) if error is not None]
    assert not failed, f"{len(failed)} of {len(cases)} cases:\n" + "\n".join(failed)


def _error_of(judge: Callable[[Case], None], case: Case) -> AssertionError | None:
    try:
        judge(case)
    except AssertionError as error:
        return error
    return None


@pytest.mark.sweep
@pytest.mark.parametrize("case", in_turns(boom, leave), ids=str)
def test_an_exception_is_reported_to_every_rank(world: Ranks, case: Case) -> None:
    judge_exception(world, case)


@pytest.mark.sweep
@pytest.mark.parametrize("act", [interrupt, recurse, warn, fill_memory, fill_device])
def test_every_kind_of_exception_is_reported(world: Ranks, act: Callable[[], None]) -> None:
    judge_exception(world, Case(act, "backward", 1, lanes=False))


@pytest.mark.long
def test_a_kill_is_reported_to_the_living() -> None:
    judge_all(judge_kill, diagonal(kill)[::2])


@pytest.mark.long
def test_a_frozen_rank_is_named_by_all_and_goes_on_when_it_wakes() -> None:
    judge_all(judge_stop, diagonal(stop)[1::4])


@pytest.mark.long
def test_an_exception_anywhere_is_reported_to_every_rank(world: Ranks) -> None:
    judge_all(lambda case: judge_exception(world, case), one_in(3, matrix(boom, interrupt)), at_once=1)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("judge", [judge_kill, judge_stop])
def test_kills_and_freezes_anywhere_are_reported_to_the_living(judge: Callable[[Case], None]) -> None:
    judge_all(judge, one_in(3, every_place(kill if judge is judge_kill else stop)))
