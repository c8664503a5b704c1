"""`Pipeline(...)` ends in bounded time whatever a rank does, with one error that names this rank; the ranks can then try again.

A kill is reported at once on one machine. A leftover object keeps no stage alive.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerobubble as zb
from tests.procs.exhaustive import EXHAUSTIVE, SEED, one_in
from tests.procs.models import batch, build, loss_fn
from tests.procs.patience import SHORT_S, TIMING
from tests.procs.random_signals.outside import is_locked, is_torn
from tests.procs.ranks import Ranks
from tests.procs.test_fault_injection import Moment, judge_all, kill, replaced, stop, struck
from tests.refusals import states
from zerobubble.runtime import agreement, session
from zerobubble.runtime.executor.program_cache import ProgramCache
from zerobubble.runtime.hooks.shared_gradients import SharedGradients
from zerobubble.runtime.transport import choice, rendezvous
from zerobubble.runtime.transport.contact import host_is_silent
from zerobubble.runtime.transport.endpoint import Group
from zerobubble.runtime.transport.gloo import EndableStore, GlooEndpoint
from zerobubble.runtime.transport.terms import versions
from zerobubble.runtime.transport.transport import Transport

pytestmark = pytest.mark.ranks_wait

T = TypeVar("T")

RANKS = 4
TIMEOUT, LONG_S, REPORTED_S = SHORT_S, 100.0, 60.0
"""The timeout of these pipelines, that of pipelines that must not need it, and the time to report to all ranks on a busy machine."""


class Ended(NamedTuple):
    """How `Pipeline(...)` ended on a rank: the error's type, text and rank, and after how many seconds."""

    kind: str
    text: str
    rank: int | None
    seconds: float


def construct(group: Any, **options: Any) -> Ended:
    """Try to make a pipeline that cannot be made."""
    began = time.monotonic()
    try:
        zb.Pipeline(
            schedule="zb-h1", num_microbatches=4, loss_fn=loss_fn, group=group, **{"build_or_modules": build, "timeout": TIMEOUT} | options
        )
    except BaseException as error:
        return Ended(type(error).__name__, str(error), getattr(error, "rank", None), time.monotonic() - began)
    raise AssertionError("nothing went wrong")


def one_right_step(group: Any) -> float:
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, timeout=60.0) as pipe:
        return pipe.step(*batch(4)).item()


# 1. The ranks meet.


def come_late(group: Any, late: int) -> tuple[Ended, float]:
    """Rank `late` arrives after the others have given up, and all make the next pipeline once it has its error."""
    dist.barrier(group)
    if dist.get_rank(group) == late:
        dist.barrier(group)
    end = construct(group)
    if dist.get_rank(group) != late:
        dist.barrier(group)
    dist.barrier(group)
    return end, one_right_step(group)


@pytest.mark.long
@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_rank_that_does_not_come_is_named_on_all_itself_too(world: Ranks, late: int) -> None:
    results = [Ended(*ended) for ended, _ in world.run(come_late, late, ranks=3)]
    text = f"rank {late} did not call Pipeline(...) within {TIMEOUT:g} s; see the log there, or raise `timeout` if it may take that long"
    assert {end[:3] for end in results} == {("PipelineError", text, late)}
    assert max(end.seconds for end in results) < TIMEOUT + REPORTED_S


def try_again(group: Any) -> list[Ended]:
    """Rank 0 makes three attempts before the others make their first, which is its fourth."""
    attempts = [construct(group, timeout=1.0) for _ in range(3)] if dist.get_rank(group) == 0 else []
    dist.barrier(group)
    one_right_step(group)
    return attempts


@pytest.mark.long
def test_ranks_meet_after_different_numbers_of_attempts(world: Ranks) -> None:
    attempts, *_ = world.run(try_again, ranks=3)
    assert [Ended(*end).text.split(" within")[0] for end in attempts] == ["ranks 1 and 2 did not call Pipeline(...)"] * 3
    assert [Ended(*end).rank for end in attempts] == [None] * 3, "one of the two may have kept the other"


def end_with_the_store(group: Any) -> str:
    """Rank 2 does not arrive. Rank 0, which hosts the store, ends as soon as it has reported that. Rank 1 polls only rarely."""
    rank, give_up = dist.get_rank(group), rendezvous._Participant._give_up
    dist.barrier(group)
    if rank == 2:
        time.sleep(LONG_S)

    def give_up_when_the_other_has_come(attendance: Any, everybody: Any) -> Any:
        while not attendance._store.check([everybody[1]]):
            time.sleep(0.02)
        return give_up(attendance, everybody)

    seldom = 0.8 if rank == 1 else 0.05
    with (
        replaced(rendezvous, "_SHORTEST_S", seldom),
        replaced(rendezvous, "_LONGEST_S", seldom),
        replaced(rendezvous._Participant, "_give_up", give_up_when_the_other_has_come if rank == 0 else give_up),
    ):
        end = construct(group, timeout=2.0 if rank == 0 else LONG_S)
    if rank == 0:
        os._exit(0)
    return end.text


@pytest.mark.long
def test_the_process_with_the_store_stays_until_the_others_have_read_why_it_ends() -> None:
    world = Ranks(3, hosted=True)
    try:
        world.start(end_with_the_store, ranks=3)
        state, text = world.outcome(1)
        assert state == "ok"
        states(text, "rank 2", "Pipeline", "2 s")
    finally:
        world.kill()


def be_interrupted(group: Any) -> Ended | None:
    """Rank 1 gets SIGTERM while it waits for rank 2, which does not arrive."""
    rank = dist.get_rank(group)
    if rank == 2:
        return None
    waits, wait = itertools.count(), rendezvous._Participant._count

    def count_and_interrupt(attendance: Any, seconds: float) -> None:
        if next(waits) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        wait(attendance, seconds)

    with replaced(rendezvous._Participant, "_count", count_and_interrupt if rank == 1 else wait):
        return construct(group, timeout=LONG_S)


def test_an_interrupt_while_meeting_is_reported_to_the_others(world: Ranks) -> None:
    first, second, _ = world.run(be_interrupted, ranks=3)
    assert Ended(*second).kind == "KeyboardInterrupt"
    assert Ended(*first)[:3] == ("PipelineError", "rank 1 failed while meeting the other ranks: KeyboardInterrupt", 1)
    assert Ended(*first).seconds < REPORTED_S


def of_other_versions(group: Any, what: str, other: str) -> str:
    mine = {**versions(), what: other} if dist.get_rank(group) == 1 else versions()
    with ExitStack() as stack:
        for module in (session, agreement, choice):
            stack.enter_context(replaced(module, "versions", lambda: mine))
        return construct(group).text


@pytest.mark.parametrize(("what", "other"), [("version of torch", "2.4.0"), ("version of zerobubble", "9.0 #12345678")])
def test_other_versions_are_reported_when_the_ranks_meet(world: Ranks, what: str, other: str) -> None:
    (text,) = set(world.run(of_other_versions, what, other, ranks=3))
    mine = versions()[what].split(" #")[0]
    states(text, what.split()[-1], "ranks 0, 2", mine, "rank 1", other.split(" #")[0])


def silent_store(group: Any, act: Callable[[], None]) -> Ended:
    """A fault strikes rank 0, which hosts the store, before it arrives."""
    if dist.get_rank(group) == 0:
        time.sleep(0.5)
        act()
    return construct(group)


@pytest.mark.sweep
@pytest.mark.parametrize("act", [kill, stop])
def test_a_store_that_ends_or_is_silent_while_the_ranks_meet_is_reported(act: Callable[[], None]) -> None:
    world = Ranks(3, hosted=True)
    try:
        world.start(silent_store, act, ranks=3)
        ended = [Ended(*world.outcome(rank)[1]) for rank in (1, 2)]
    finally:
        world.kill()
    assert {(end.kind, end.rank) for end in ended} == {("PipelineError", 0)}, ended
    assert len({end.text for end in ended}) == 1, ended
    states(ended[0].text, "torch.distributed", "answer", "store")
    assert max(end.seconds for end in ended) < TIMEOUT + REPORTED_S


def meet_after_silence(group: Any) -> str:
    """The store does not answer rank 1 before its arrival; it answers again in the next attempt, in which rank 0 already waits."""
    answers, opened = threading.Event(), threading.Event()
    open_round = rendezvous._Participant._open_round
    attempts = []

    def late(attendance: Any) -> str:
        attempts.append(attendance)
        if len(attempts) == 1:
            answers.wait()
            found = open_round(attendance)
            opened.set()
            return found
        time.sleep(0.5)
        answers.set()
        assert opened.wait(60)
        time.sleep(0.5)
        return open_round(attendance)

    with ExitStack() as stack:
        if dist.get_rank(group) == 1:
            stack.enter_context(replaced(rendezvous._Participant, "_open_round", late))
        text = construct(group, timeout=1.0).text
        dist.barrier(group)
        one_right_step(group)
    return text


@pytest.mark.long
def test_a_rank_that_has_given_up_does_not_come_to_the_next_attempt_when_the_store_answers_again(world: Ranks) -> None:
    _, text, *_ = world.run(meet_after_silence, ranks=2)
    assert "the torch.distributed store" in text
    states(text, "store", "answer")


# 2. Arguments are checked before anything is connected, and faults are reported on all ranks.

WRONG: list[tuple[str, Any]] = [
    *(("timeout", value) for value in (0, -1, math.nan, math.inf, 1e12, 1e-9, "10", None, True)),
    *(("num_microbatches", value) for value in (2.5, "8", True, None, 10**6)),
    *(("pace", 3), ("overlap", 3), ("on_loss", 3), ("loss_fn", None), ("split", 3), ("hooks", 3), ("tied", 3), ("main_grad", 3)),
]


def of_wrong_arguments(group: Any, where: int | None) -> list[tuple[str, float]]:
    """The error for each wrong argument, given on rank `where` or on all, and whether the ranks had connected before it."""

    def refuse(endpoint: GlooEndpoint) -> None:
        raise AssertionError("connected")

    seen = []
    with replaced(GlooEndpoint, "connect", refuse):
        for name, value in WRONG:
            options = {"build_or_modules": build, "schedule": "1f1b", "num_microbatches": 4, "loss_fn": loss_fn, "timeout": LONG_S}
            if where in (None, dist.get_rank(group)):
                options[name] = value
            began = time.monotonic()
            with pytest.raises(zb.InputError) as caught:
                zb.Pipeline(**options, group=group)
            seen.append((str(caught.value), time.monotonic() - began))
    return seen


@pytest.mark.parametrize("where", [0, 1, None])
def test_wrong_arguments_are_refused_to_all_before_ranks_connect(world: Ranks, where: int | None) -> None:
    results = world.run(of_wrong_arguments, where, ranks=3)
    for (name, value), *ended in zip(WRONG, *results, strict=True):
        (text,) = {text for text, _ in ended}
        assert text.startswith(f"{'all ranks' if where is None else f'rank {where}'}: {name} must be ")
        assert f", got {value!r}" in text
        assert max(seconds for _, seconds in ended) < REPORTED_S


def outside_of_its_group(group: Any) -> list[str]:
    part = dist.new_group([0])
    if dist.get_rank() == 0:
        with zb.Pipeline(build, "1f1b", 4, loss_fn, group=part) as pipe:
            pipe.step(*batch(4))
        dist.destroy_process_group(part)
    return [construct(part).text, construct(3).text]


def test_a_rank_outside_of_the_group_is_reported(world: Ranks) -> None:
    inside, *others = world.run(outside_of_its_group, ranks=4)
    states(inside[0], "group", "rank")
    assert {other[0] for other in others} == {"Pipeline: this rank is not in `group`: make a Pipeline on the ranks of the group alone"}
    assert all("Pipeline: group must be a ProcessGroup, or None, got 3" in message for _, message in (inside, *others))


# 3. A rank ends or stands still inside.

INSIDE = {
    "coming": Moment(rendezvous._Participant, "_open_round", 0, ""),
    "having met": Moment(GlooEndpoint, "__init__", 0, ""),
    "meeting the others": Moment(Transport, "connect", 0, ""),
    "giving its address": Moment(EndableStore, "set", 0, ""),
    "asking for addresses": Moment(EndableStore, "get", 1, ""),
    "comparing": Moment(Transport, "gather_objects", 0, ""),
    "connecting": Moment(GlooEndpoint, "open", 0, ""),
    "first values": Moment(SharedGradients, "broadcast_initial_values", 0, ""),
    "programs": Moment(ProgramCache, "play", 0, ""),
}


DECIDED = ("having met", "meeting the others", "giving its address", "asking for addresses")
"""Moments at which rank 0 has decided the round, and others may not have read the decision, which has its process."""


class Case(NamedTuple):
    """`act` at a moment of construction on `rank`; the store is in the process of rank 0 if `hosted`, else a file."""

    act: Callable[[], None]
    moment: str
    rank: int
    hosted: bool

    def __str__(self) -> str:
        return f"{self.act.__name__} in {self.moment} of rank {self.rank}{' with the store in rank 0' if self.hosted else ''}"


def be_struck(group: Any, case: Case) -> Ended:
    """Make a pipeline and step, with the fault."""
    began = time.monotonic()
    with ExitStack() as stack:
        if dist.get_rank(group) == case.rank:
            stack.enter_context(struck(INSIDE[case.moment], case.act))
        try:
            with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, timeout=TIMEOUT) as pipe:
                pipe.step(*batch(4))
        except BaseException as error:
            return Ended(type(error).__name__, str(error), getattr(error, "rank", None), time.monotonic() - began)
    raise AssertionError("nothing went wrong")


MOST_PLAYS = 3


def unless_the_store_was_struck(judge_world: Callable[[Ranks], T], hosted: bool) -> T:
    """Judge a case in a new world; repeat it if it fails and the store's file shows that it is torn or locked for good."""
    for play in range(MOST_PLAYS):
        world = Ranks(RANKS, hosted=hosted)
        try:
            return judge_world(world)
        except AssertionError:
            world.kill_all_but_frozen()
            if play == MOST_PLAYS - 1 or not (is_locked(world.file) or is_torn(world.file)):
                raise
        finally:
            world.kill()
    raise AssertionError


def judge(case: Case) -> None:
    unless_the_store_was_struck(lambda world: judge_in(world, case), case.hosted)


def judge_in(world: Ranks, case: Case) -> None:
    world.run(one_right_step, ranks=RANKS)  # first imports take time
    world.start(be_struck, case, ranks=RANKS)
    outcomes = {rank: world.outcome(rank) for rank in range(RANKS) if rank != case.rank}
    assert all(state == "ok" for state, _ in outcomes.values()), f"{case}: {outcomes}"
    ended = {rank: Ended(*end) for rank, (_, end) in outcomes.items()}
    judge_ended(str(case), case.rank, ended, case.hosted and case.rank == 0)
    if case.act is kill and case.moment != "coming":  # a rank reports its process when it arrives
        gone, silent = f"rank {case.rank} is gone: its process ended", host_is_silent(case.rank)
        with_the_store = case.hosted and case.rank == 0 and case.moment in DECIDED
        assert all(gone in end.text or (with_the_store and end.text == silent) for end in ended.values()), f"{case}: {ended}"
    if case.act is stop:
        os.kill(world.processes[case.rank].pid or 0, signal.SIGCONT)
        state, woken = world.outcome(case.rank)
        assert state == "ok", f"{case}: {woken}"
        assert Ended(*woken).rank == case.rank, f"{case}: {woken}"
        assert len(set(world.run(one_right_step, ranks=RANKS))) == 1


def judge_ended(case: str, victim: int, ended: dict[int, Ended], without_store: bool) -> None:
    for end in ended.values():
        assert end.kind == "PipelineError", f"{case}: {ended}"
        assert end.rank == victim, f"{case}: {ended}"
        assert end.seconds < TIMEOUT + REPORTED_S, f"{case}: {ended}"
    assert without_store or len({end.text for end in ended.values()}) == 1, f"{case}: {ended}"


def diagonal() -> list[Case]:
    return [Case((kill, stop)[i % 2], moment, (i // 2) % RANKS, hosted=i % 3 == 0) for i, moment in enumerate(INSIDE)]


@pytest.mark.long
def test_a_rank_that_ends_or_stands_still_inside_is_reported_to_the_living() -> None:
    """At every other moment."""
    judge_all(judge, diagonal()[::2], at_once=3)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("act", [kill, stop])
def test_a_rank_that_ends_or_stands_still_anywhere_inside_is_reported_to_the_living(act: Callable[[], None]) -> None:
    """One case in five, of which there are two for most moments, unless ZEROBUBBLE_EXHAUSTIVE=1."""
    cases = [Case(act, moment, rank, hosted) for moment in INSIDE for rank in range(RANKS) for hosted in (False, True)]
    judge_all(judge, one_in(5, cases), at_once=3)


WHILE_MEETING = {
    "coming": INSIDE["coming"],
    "deciding": Moment(rendezvous._Participant, "_judge", 0, ""),
    "having met": INSIDE["having met"],
    "meeting the others": INSIDE["meeting the others"],
}


def freeze_while_meeting(group: Any, moment: str, victim: int) -> Ended:
    """The victim counts a shorter silence of the store as its fault than the others bear, so that the time of the test's signal is free."""
    with ExitStack() as stack:
        if dist.get_rank(group) == victim:
            timing = TIMING._replace(silence_s=TIMING.answer_s)
            stack.enter_context(replaced(choice, "Group", partial(Group, timing=timing)))
            stack.enter_context(struck(WHILE_MEETING[moment], stop))
        return construct(group, timeout=2 * TIMEOUT)


def judge_woken(case: tuple[str, int]) -> None:
    """The others report the victim and end before it goes on, and the store may end with them."""
    world, victim = Ranks(3, hosted=True), case[1]
    try:
        world.run(one_right_step, ranks=3)  # first imports take time
        world.start(freeze_while_meeting, *case, ranks=3)
        others = [rank for rank in range(3) if rank != victim]
        reported = [world.outcome(rank) for rank in others]
        assert {(state, Ended(*end).rank) for state, end in reported} == {("ok", victim)}, f"{case}: {reported}"
        for rank in others:
            world.processes[rank].kill()
            wait([world.processes[rank].sentinel])
        os.kill(world.processes[victim].pid or 0, signal.SIGCONT)
        state, woken = world.outcome(victim)
        assert (state, woken[0], woken[2]) == ("ok", "PipelineError", victim), f"{case}: {woken}"
    finally:
        world.kill()


@pytest.mark.long
def test_a_rank_that_stood_still_while_the_ranks_met_names_itself_though_the_others_have_ended() -> None:
    judge_all(judge_woken, [*((moment, 0) for moment in WHILE_MEETING), ("having met", 1), ("meeting the others", 2)], at_once=3)


LEAVING = """
import os, signal, sys
import torch, torch.distributed as dist, zerobubble as zb
from zerobubble.runtime.transport.gloo import EndableStore

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
if rank == 1:
    EndableStore.get = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
zb.Pipeline(lambda stage, stages: torch.nn.Linear(4, 4), "1f1b", 4, torch.nn.functional.mse_loss, timeout=10.0)
"""


@pytest.mark.long
def test_a_process_ends_as_usual_after_it_has_left_a_constructor_behind(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    command = [sys.executable, str(tmp_path / "leaving.py")]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True) for rank in range(3)]
    try:
        for living in (ranks[0], ranks[2]):
            _, output = living.communicate(timeout=300)
            assert living.returncode == 1, output
            states(output, "zerobubble.errors.PipelineError", "rank 1")  # gloo may have its say behind that
            assert "terminate called" not in output
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def what_is_left(group: Any) -> tuple[bool, int, int]:
    """The second backend's constructor hangs: whether it was detached, the modules that were made, and those still alive."""
    made: list[weakref.ref[nn.Module]] = []
    is_over = threading.Event()

    def build_once(stage: int, num_stages: int) -> nn.Module:
        module = build(stage, num_stages)
        made.append(weakref.ref(module))
        return module

    with replaced(GlooEndpoint, "open", lambda *_: is_over.wait(60.0)):
        assert construct(group, build_or_modules=build_once, timeout=4.0).kind == "PipelineError"
        gc.collect()
        is_left = any(thread.name == "zerobubble-background" for thread in threading.enumerate())
        living = sum(module() is not None for module in made)
        is_over.set()
    return is_left, len(made), living


@pytest.mark.long
def test_a_constructor_that_is_left_behind_keeps_no_stage_alive(world: Ranks) -> None:
    for is_left, made, living in world.run(what_is_left, ranks=2):
        assert is_left
        assert made > 0
        assert living == 0


# 4. A rank ends or stands still at a random moment.


class RandomCase(NamedTuple):
    """A fault strikes `rank` after this fraction of the time that a construction takes."""

    signal: int
    part: float
    rank: int
    hosted: bool

    def __str__(self) -> str:
        return f"signal {self.signal} after {self.part:.3f} to rank {self.rank}{' with the store in rank 0' if self.hosted else ''}"


def be_struck_at_random(group: Any, case: RandomCase) -> tuple[Ended, bool]:
    """How the pipeline ended, with the seconds since the fault, and whether that was during construction.

    The minimum over three earlier constructions is the time, so that a busy machine does not move the fault beyond the construction.
    """
    took = []
    for _ in range(3):
        dist.barrier(group)
        began = time.monotonic()
        with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, timeout=60.0):
            took.append(time.monotonic() - began)
    strikes_after = torch.tensor([case.part * min(took)])
    dist.broadcast(strikes_after, case.rank, group)
    is_made = False
    dist.barrier(group)
    began = time.monotonic()
    if dist.get_rank(group) == case.rank:
        threading.Timer(strikes_after.item(), os.kill, (os.getpid(), case.signal)).start()
    try:
        with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, timeout=TIMEOUT) as pipe:
            is_made = True
            while True:
                pipe.step(*batch(4))
    except Exception as error:
        seconds = time.monotonic() - began - strikes_after.item()
        return Ended(type(error).__name__, str(error), getattr(error, "rank", None), seconds), not is_made


def judge_random(case: RandomCase) -> list[tuple[float, bool]]:
    """The seconds until each surviving rank had its error, and whether that was while the pipeline was made."""
    return unless_the_store_was_struck(lambda world: judge_random_in(world, case), case.hosted)


def judge_random_in(world: Ranks, case: RandomCase) -> list[tuple[float, bool]]:
    world.start(be_struck_at_random, case, ranks=RANKS)
    outcomes = {rank: world.outcome(rank) for rank in range(RANKS) if rank != case.rank}
    assert all(state == "ok" for state, _ in outcomes.values()), f"{case}: {outcomes}"
    ended = {rank: Ended(*end) for rank, (_, (end, _)) in outcomes.items()}
    seen = [(end[3], inside) for _, (end, inside) in outcomes.values()]
    judge_ended(str(case), case.rank, ended, case.hosted and case.rank == 0)
    return seen


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_kills_and_freezes_at_random_moments_inside_are_reported_to_the_living(number: int) -> None:
    """Twelve cases, or 40 with ZEROBUBBLE_EXHAUSTIVE=1."""
    chance = random.Random(f"{int(number)} {os.environ.get(SEED)}")
    count = 40 if EXHAUSTIVE else 12
    cases = [RandomCase(number, chance.uniform(0, 0.9), chance.randrange(RANKS), chance.random() < 0.5) for _ in range(count)]
    seen: list[tuple[float, bool]] = []
    judge_all(lambda case: seen.extend(judge_random(case)), cases, at_once=3)
    inside = [seconds for seconds, is_inside in seen if is_inside]
    assert len(inside) > len(seen) / 2, "the moments must lie inside"
    print(f"{len(inside)} of {len(seen)} reported inside, after {max(inside):.1f} s at most")
