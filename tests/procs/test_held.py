"""A pipeline's resources do not grow with use, and are freed when it closes, even while the object lives.

There is one ring per channel, and their total size is bounded.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_fault_injection import MOMENTS, boom, struck
from zerobubble.lowering import Compiled, compiled, program_faults
from zerobubble.runtime.executor import program_cache
from zerobubble.runtime.executor.program_cache import ProgramCache
from zerobubble.runtime.transport import shared_memory

SPARE_KB = 12 << 10
"""By how much the memory of the allocator may wander."""
SIZE = 1 << 18


class Held(NamedTuple):
    """Open resources of a process and its memory: touched shared pages, and private memory."""

    descriptors: int
    threads: int
    shared_kb: int
    own_kb: int


def held() -> Held:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    shared, own = (int(status[name].split()[0]) for name in ("RssShmem", "RssAnon"))
    return Held(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared, own)


ENDING_S = 10.0
"""How long the system may list a thread after it has been joined; most often it is a moment."""


def all_held(group: Any, before: Sequence[Held] = ()) -> Held:
    """What this rank holds while all others rest, too, and threads that were about to end have ended; `before` is what it held then."""
    torch.distributed.barrier(group)
    ctypes.CDLL(None).malloc_trim(0)
    looks = []
    end = time.monotonic() + ENDING_S
    while len(looks) < 10 or (before and _is_more(looks[-1], before[-1]) and time.monotonic() < end):
        looks.append(held())
        time.sleep(0.02)
    seen = min(looks, key=lambda look: (look.threads, look.descriptors))
    torch.distributed.barrier(group)
    return seen


def _is_more(now: Held, before: Held) -> bool:
    """Whether there are more threads than before, or descriptors, which some of them close when they end."""
    return now.threads > before.threads or now.descriptors > before.descriptors


def many_numbers(group: Any, kept: int, count: int, transport: str) -> list[Held]:
    """What is held when as many programs as are `kept` have been made, and after `count` further numbers of microbatches."""
    seen = []
    with (
        mock.patch.object(program_cache, "MOST_KEPT", kept),
        zb.Pipeline(build, "zb-h1", 1, loss_fn, group=group, transport=transport) as pipe,
    ):
        for number in (*range(count + 1, count + kept + 1), *range(1, count + 1)):
            for _ in range(2):  # the first announces its messages
                pipe.step(*batch(number), num_microbatches=number)
            pipe.eval_step(*batch(number), num_microbatches=number)
            if number in (count + kept, count):
                seen.append(all_held(group, seen))
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("kept", "count", "transport"),
    [
        (3, 8, "auto"),
        pytest.param(8, 32, "auto", marks=pytest.mark.long),
        pytest.param(8, 32, "gloo", marks=pytest.mark.long),
    ],
)
def test_many_numbers_of_microbatches_hold_no_more_than_few(world: Ranks, kept: int, count: int, transport: str) -> None:
    for early, late in world.run(many_numbers, kept, count, transport, ranks=4, seconds=550):
        refuse_growth(early, late)


def refuse_growth(early: Held, late: Held) -> None:
    assert late.descriptors <= early.descriptors, (early, late)
    assert late.threads <= early.threads, (early, late)
    assert late.shared_kb <= early.shared_kb + 64, (early, late)
    assert late.own_kb <= early.own_kb + SPARE_KB, (early, late)


def alternate(group: Any, few: int, many: int) -> tuple[int, int, bool]:
    """How many programs `few` and `many` numbers in turns compile, and whether a number that comes back has the same loss."""
    made = []
    compile_program = ProgramCache._make_ready

    def counting(cache: ProgramCache, compiled: Compiled) -> Any:
        made.append(compiled.schedule.num_microbatches)
        return compile_program(cache, compiled)

    with zb.Pipeline(build, "zb-h1", 1, loss_fn, group=group) as pipe, mock.patch.object(ProgramCache, "_make_ready", counting):
        first = pipe.step(*batch(1), num_microbatches=1)
        for number in 3 * list(range(1, few + 1)):
            pipe.step(*batch(number), num_microbatches=number)
        by_few = len(made)
        for number in range(1, many + 1):
            pipe.step(*batch(number), num_microbatches=number)
        came_back = pipe.step(*batch(1), num_microbatches=1)
        return by_few, len(made), bool(came_back == first)


@pytest.mark.long
def test_few_numbers_in_turns_are_compiled_once(world: Ranks) -> None:
    kept = program_cache.MOST_KEPT
    for by_few, by_all, is_same in world.run(alternate, kept, kept + 1, ranks=2):
        assert by_few == kept - 1  # that of one microbatch was there
        assert by_all == by_few + 2  # one further, and number 1, which had gone for it
        assert is_same


class Wide(nn.Module):
    """Returns a megabyte per microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output**2).mean()


def wide(group: Any, module: Wide) -> zb.Pipeline:
    """A pipeline that has made two steps with a `module` of the user's own."""
    pipe = zb.Pipeline([module], "zb-h1", 4, square, group=group, transport="shared-memory")
    x = torch.ones(4, SIZE)
    for _ in range(2):
        pipe.step(x, x)
    assert pipe.transport.held_bytes > 4 * SIZE
    return pipe


def close_often(group: Any, count: int) -> list[Held]:
    """What is held after the second closed pipeline and after `count` more, each still at hand."""
    module, kept, seen = Wide(), [], []
    for _ in range(count + 2):
        kept.append(wide(group, module))
        kept[-1].close()
        assert kept[-1].transport.held_bytes == 0
        seen.append(all_held(group, seen))
    return [seen[1], seen[-1]]


@pytest.mark.long
@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.long)])
@cpu_only("a driver keeps memory and descriptors of its own")
def test_closed_pipelines_hold_nothing(world: Ranks, count: int) -> None:
    for early, late in world.run(close_often, count, ranks=4, seconds=550):
        refuse_growth(early, late)


def fail_often(group: Any, count: int) -> list[Held]:
    """What is held after the second failure and after `count` more, each with its pipeline and its error at hand."""
    module, x = Wide(), torch.ones(4, SIZE)
    kept: list[Any] = []
    seen = []
    for number in range(count + 2):
        pipe = wide(group, module)
        if torch.distributed.get_rank(group) == number % 4:
            with struck(MOMENTS["forward"], boom), pytest.raises(zb.PipelineError) as caught:
                pipe.step(x, x)
        else:
            with pytest.raises(zb.PipelineError) as caught:
                pipe.step(x, x)
        kept += [pipe, caught.value]
        seen.append(all_held(group, seen))
    return [seen[1], seen[-1]]


@pytest.mark.long
@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.long)])
@cpu_only("a driver keeps memory and descriptors of its own")
def test_failures_hold_nothing_though_pipeline_and_error_are_kept(world: Ranks, count: int) -> None:
    for early, late in world.run(fail_often, count, ranks=4, seconds=550):
        refuse_growth(early, late)


def rings(group: Any) -> list[int]:
    """The bytes of this rank's rings: before any message, after steps of one schedule, and after a step with half as many microbatches."""
    x = torch.ones(32, 1 << 14)
    seen = []
    with zb.Pipeline(lambda s, n: nn.Identity(), "v-half", 32, square, group=group, transport="shared-memory") as pipe:
        seen.append(pipe.transport.held_bytes)
        for _ in range(2):
            pipe.eval_step(x, x)
        seen.append(pipe.transport.held_bytes)
        for _ in range(2):
            pipe.eval_step(x, x, num_microbatches=16)
        seen.append(pipe.transport.held_bytes)
    return seen


@pytest.mark.long
@cpu_only("the rings are those of CPUs")
def test_the_rings_of_a_rank_are_bounded_together(world: Ranks) -> None:
    for rank, (before, after, again) in enumerate(world.run(rings, ranks=4)):
        assert before == 0
        channels = 1 if rank in (0, 3) else 2  # activations down and up the ranks; those of gradients are not used
        assert (1 << 16) * 4 < after <= shared_memory.SPARE_BYTES * channels / 4 + 1024
        assert again == after


def judged(group: Any) -> list[str]:
    """Which programs are judged while a pipeline is made and trains, profiles nothing and evaluates twice."""
    found = []

    def counting(program: zb.Program) -> Any:
        found.append(program.name)
        return program_faults(program)

    with mock.patch.object(compiled, "program_faults", counting), zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group) as pipe:
        for _ in range(2):
            pipe.step(*batch(4))
        found.append("evaluation")
        for _ in range(2):
            pipe.eval_step(*batch(4))
    return found


def test_a_schedule_is_compiled_once_and_its_evaluation_when_it_comes(world: Ranks) -> None:
    for names in world.run(judged, ranks=2):
        assert names == ["zb-h1", "every route (one by one)", "evaluation", "zb-h1 (forward only)"]
