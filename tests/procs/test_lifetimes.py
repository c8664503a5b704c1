"""A failure leaks nothing: pipelines that end, in order or not, free their resources and do not disturb others.

Holds for sessions that were never completed, too.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.models import batch, build, loss_fn
from tests.procs.patience import SHORT_S
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.procs.signs import await_signs
from tests.procs.test_fault_injection import MOMENTS, boom, fill_memory, struck
from tests.refusals import raises, states

pytestmark = pytest.mark.ranks_wait

M = 8


ENDING_S = 10.0
"""How long the system may list a thread after it has been joined; most often it is a moment."""


class Holdings(NamedTuple):
    """What a process has open, and the folders that pipelines of its world have left."""

    descriptors: int
    threads: int
    folders: int

    def is_within(self, other: Holdings) -> bool:
        """Whether nothing is more than it was in the `other`."""
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


def holdings(before: Holdings | None = None) -> Holdings:
    """What this process holds when threads that were joined have gone from the system's list; `before` is what it held then."""
    gc.collect()
    looks: list[Holdings] = []
    end = time.monotonic() + ENDING_S
    while len(looks) < 10 or (before is not None and not looks[-1].is_within(before) and time.monotonic() < end):
        folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("zerobubble-")]
        looks.append(Holdings(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(folders)))
        time.sleep(0.02)
    return min(looks, key=lambda look: look.threads)


def gradients(pipe: zb.Pipeline) -> list[Tensor]:
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(*batch(M))
    return [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]


def fail_and_rebuild(group: Any, rounds: int, transport: str = "auto") -> list[Holdings]:
    rank = torch.distributed.get_rank(group)
    seen: list[Holdings] = []
    moments = ("forward", "backward", "weight", "clip", "eval", "timeline")
    with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, transport=transport) as pipe:
        expected = gradients(pipe)
    for turn in range(rounds):
        moment = MOMENTS[moments[turn % len(moments)]]
        pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, transport=transport)
        if rank == turn % 4:
            with struck(moment, boom), raises(zb.PipelineError, "boom"):
                use(pipe)
        else:
            with raises(zb.PipelineError, f"rank {turn % 4}", "boom"):
                use(pipe)
        with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, transport=transport) as pipe:
            found = gradients(pipe)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        del pipe
        torch.distributed.barrier(group)
        seen.append(holdings(seen[1] if turn > 1 else None))
        torch.distributed.barrier(group)
    return seen


def use(pipe: zb.Pipeline) -> None:
    pipe.step(*batch(M))
    pipe.clip_grad_norm_(1.0)
    pipe.timeline()
    pipe.eval_step(*batch(M))


def fail_and_rebuild_between_machines(group: Any, rounds: int) -> list[Holdings]:
    return fail_and_rebuild(group, rounds, "gloo")


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "rounds"),
    [(fail_and_rebuild, 4), (fail_and_rebuild_between_machines, 3), pytest.param(fail_and_rebuild, 12, marks=pytest.mark.long)],
)
def test_failures_in_a_row_leave_nothing_behind(world: Ranks, job: Any, rounds: int) -> None:
    for seen in world.run(job, rounds, ranks=4):
        assert all(held.is_within(seen[1]) for held in seen[2:]), seen


class Watched(nn.Module):
    """A stage that remembers every activation it made, weakly."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.made: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.made.append(weakref.ref(y))
        return y


def activations_after_a_failure(group: Any, victim: int, moment: str) -> tuple[int, int]:
    """How many activations were made and how many live while the error is still at hand."""
    pipe = zb.Pipeline(lambda s, n: Watched(build(s, n)), "zb-h1", M, loss_fn, group=group)
    watched = next(iter(pipe.modules.values()))
    if torch.distributed.get_rank(group) == victim:
        with struck(MOMENTS[moment], boom), pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(M))
    else:
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(M))
    alive = sum(made() is not None for made in watched.made)
    assert caught.value is not None
    return len(watched.made), alive


@pytest.mark.parametrize("moment", ["forward", "backward", "weight"])
def test_a_failure_gives_back_the_activations(world: Ranks, moment: str) -> None:
    victim = 1
    for rank, (made, alive) in enumerate(world.run(activations_after_a_failure, victim, moment, ranks=4)):
        assert made > 0 or rank > victim, "those behind the victim may get the error before the first activation reaches them"
        assert alive == 0


def out_of_memory(group: Any, moment: str) -> str:
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group)
    if torch.distributed.get_rank(group) == 1:
        with struck(MOMENTS[moment], fill_memory), pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(M))
    else:
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(M))
    return str(caught.value)


def test_memory_that_ran_out_is_reported_with_what_is_held(world: Ranks) -> None:
    (text,) = set(world.run(out_of_memory, "forward", ranks=4))
    states(text, "rank 1", "'run 1F2'", "RuntimeError" if DEVICE.type == "cpu" else "OutOfMemoryError")
    # Two microbatches: of each (10, 6) and (10, 12) in float64, the Block keeps its input, the norm's output and moments, and the ReLU's.
    per_microbatch = 8 * (60 + 60 + 10 + 10 + 120)
    states(text, "stage 1", 2 * per_microbatch, 2)
    states(text, "schedule", "holds")


def close_early(group: Any) -> str:
    rank = torch.distributed.get_rank(group)
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group)
    pipe.step(*batch(M))
    if rank == 1:
        pipe.close()
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(M))
    return str(caught.value)


def test_a_pipeline_closed_on_one_rank_is_reported_to_the_others(world: Ranks) -> None:
    results = world.run(close_early, ranks=4)
    states(results[1], "Pipeline", "closed")
    assert results[0] == results[2] == results[3]
    states(results[0], "rank 1", "rank")


def two_at_once(group: Any) -> tuple[float, float]:
    with zb.Pipeline(build, "1f1b", M, loss_fn, group=group) as good:
        before = good.step(*batch(M)).item()
        bad = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group)
        if torch.distributed.get_rank(group) == 2:
            with struck(MOMENTS["backward"], boom), raises(zb.PipelineError, "boom"):
                bad.step(*batch(M))
        else:
            with raises(zb.PipelineError, "rank 2", "boom"):
                bad.step(*batch(M))
        return before, good.step(*batch(M)).item()


@pytest.mark.long
def test_a_pipeline_goes_on_when_another_one_fails(world: Ranks) -> None:
    for before, after in world.run(two_at_once, ranks=4):
        assert before == after


def forget(group: Any) -> tuple[Holdings, Holdings]:
    def use_and_forget() -> None:
        zb.Pipeline(build, "zb-h1", M, loss_fn, group=group).step(*batch(M))

    use_and_forget()
    torch.distributed.barrier(group)
    before = holdings()
    torch.distributed.barrier(group)
    for _ in range(3):
        use_and_forget()
        gc.collect()
    torch.distributed.barrier(group)
    after = holdings(before)
    torch.distributed.barrier(group)
    return before, after


@pytest.mark.long
def test_a_deleted_pipeline_frees_its_resources(world: Ranks) -> None:
    for before, after in world.run(forget, ranks=4):
        assert after.is_within(before), (before, after)


class Spoil(nn.Module):
    """Returns NaN in the third microbatch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.inner(x)
        return self.spoilt(x, y) if self.calls == 3 else y

    def spoilt(self, x: Tensor, y: Tensor) -> Tensor:
        return y * float("nan")


def step_to_nan(group: Any) -> tuple[float, bool, str]:
    with zb.Pipeline(lambda s, n: Spoil(build(s, n)) if s == 1 else build(s, n), "zb-h1", M, loss_fn, group=group) as pipe:
        loss = pipe.step(*batch(M)).item()
        spoilt = all(p.grad is not None and bool(p.grad.isnan().any()) for p in pipe.parameters())
        with pytest.raises(zb.InputError) as caught:
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        pipe.step(*batch(M))
        return loss, spoilt, str(caught.value)


def test_nan_comes_back_as_on_one_device_and_stops_nobody(world: Ranks) -> None:
    for loss, spoilt, text in world.run(step_to_nan, ranks=4):
        assert loss != loss
        assert spoilt
        parts = (
            "stage 0",
            "(0.weight, 1.norm.weight, 1.norm.bias and 3 more)",
            "stage 1",
            "(inner.0.norm.weight, inner.0.norm.bias, inner.0.up.weight and 2 more)",
            "stage 2",
            "(0.norm.weight, 0.norm.bias, 0.up.weight and 2 more)",
            "stage 3",
            "(0.norm.weight, 0.norm.bias, 0.up.weight and 4 more)",
            "microbatch 2",
            "nan",
        )
        states(text, *parts)


class RootOfZero(Spoil):
    """Its output is finite, and the gradient of its input is infinite times 0 in the third microbatch."""

    def spoilt(self, x: Tensor, y: Tensor) -> Tensor:
        return y + (x * 0).sqrt() * 0


def stop_at_nan(group: Any, make: Any, anomalies: bool) -> str:
    """A step with what the page says: its hook on every stage, or `detect_anomaly`."""
    *_, hook = programs_of("docs/failures.md")
    pipe = zb.Pipeline(lambda s, n: make(build(s, n)) if s == 1 else build(s, n), "zb-h1", M, loss_fn, group=group)
    if not anomalies:
        exec(hook, {"pipe": pipe})
    with torch.autograd.set_detect_anomaly(anomalies), pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(M))
    return str(caught.value)


def test_the_pass_that_makes_the_first_nan_can_be_found(world: Ranks) -> None:
    (forward,) = set(world.run(stop_at_nan, Spoil, False, ranks=3))
    states(forward, "rank 1", "'run 1F2'", "FloatingPointError")
    (backward,) = set(world.run(stop_at_nan, RootOfZero, True, ranks=3))
    states(backward, "rank 1", "'run 1B2'", "RuntimeError", "SqrtBackward0")


def disagree(group: Any) -> str:
    rank = torch.distributed.get_rank(group)
    order = zb.make("zb-h1", 4, M) if rank else replace(zb.make("zb-h2", 4, M), name="zb-h1")
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(
            build if rank != 2 else [build(2, 4), build(3, 4)],
            order,
            M,
            loss_fn,
            group=group,
            timeout=60.0 if rank != 3 else 30.0,
            overlap=(lambda a, b: None) if rank == 1 else None,
        )
    return str(caught.value)


def test_all_that_differs_between_ranks_is_reported_at_once(world: Ranks) -> None:
    (text,) = set(world.run(disagree, ranks=4))
    states(text, "rank 2", "zb-h1", 2)
    states(text, "timeout", "60 s", "rank 3", "30 s")
    states(text, "overlap", "rank 0", "rank 1", "rank 2", "rank 3")
    states(text, "rank 0", "zb-h1", 8)


def mismatch(group: Any, dtype: torch.dtype, width: int) -> str:
    pipe = zb.Pipeline(lambda s, n: build(s, n) if s != 2 else build(s, n, width=width, dtype=dtype), "zb-h1", M, loss_fn, group=group)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(M))
    assert caught.value.rank == 2
    return str(caught.value)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 6), (torch.float64, 8)])
def test_stages_that_do_not_fit_are_reported_to_every_rank(world: Ranks, dtype: torch.dtype, width: int) -> None:
    assert len(set(world.run(mismatch, dtype, width, ranks=4))) == 1


def end_host(group: Any, act: Any, lanes: bool) -> tuple[str, int | None]:
    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, timeout=SHORT_S, transport="gloo" if lanes else "auto")
    if torch.distributed.get_rank(group) == 0:
        with struck(MOMENTS["backward"], act), pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(M))
    else:
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(M))
    return str(caught.value), caught.value.rank


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.long
@pytest.mark.parametrize(
    ("act", "lanes"),
    [
        (kill_self, False),
        pytest.param(stop_self, True, marks=pytest.mark.long),
        pytest.param(kill_self, True, marks=pytest.mark.long),
        pytest.param(stop_self, False, marks=pytest.mark.long),
    ],
)
def test_the_others_end_when_the_process_with_the_store_does(act: Any, lanes: bool) -> None:
    world = Ranks(4, hosted=True)
    try:
        world.start(end_host, act, lanes, ranks=4)
        texts = set()
        for rank in (1, 2, 3):
            state, ended = world.outcome(rank)
            assert state == "ok", ended
            assert ended[1] == 0, ended
            texts.add(ended[0])
        (text,) = texts
        found = "is gone: its process ended, and with it the torch.distributed store" if act is kill_self else "does not answer: "
        assert text.startswith(f"rank 0 {found}")
        if act is stop_self:
            os.kill(world.processes[0].pid or 0, signal.SIGCONT)
            state, ended = world.outcome(0)
            assert (state, ended[1]) == ("ok", 0), ended
            states(ended[0], "rank 0", "stalled")
    finally:
        world.kill()


def wait_frozen(group: Any, folder: Path) -> tuple[str, int | None]:
    """Rank 0, which hosts the store, waits in a B for the test, which freezes it meanwhile."""

    def wait_for_the_test() -> None:
        (folder / "waits").touch()
        await_signs(folder / "woken")

    pipe = zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, timeout=SHORT_S)
    with struck(MOMENTS["backward"], wait_for_the_test) if pipe.rank == 0 else nullcontext(), pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(M))
    return str(caught.value), caught.value.rank


@pytest.mark.long
@pytest.mark.parametrize("others_end", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_frozen_process_with_the_store_blames_itself_when_it_wakes(tmp_path: Path, others_end: bool) -> None:
    """As under torchrun, the other processes end with their errors before it wakes."""
    world = Ranks(4, hosted=True)
    try:
        host = world.processes[0].pid or 0
        world.start(wait_frozen, tmp_path, ranks=4)
        try:
            await_signs(tmp_path / "waits")
        except TimeoutError as late:
            pytest.fail(f"{late}; ranks that ended before: {[pipe.recv() for pipe in world.pipes if pipe.poll()]}")
        os.kill(host, signal.SIGSTOP)
        others = [world.outcome(rank) for rank in (1, 2, 3)]
        assert [(state, ended[1]) for state, ended in others] == [("ok", 0)] * 3, others
        for process in world.processes[1:] if others_end else ():
            process.kill()
            process.join()
        (tmp_path / "woken").touch()
        os.kill(host, signal.SIGCONT)
        state, ended = world.outcome(0)
        assert (state, ended[1]) == ("ok", 0), ended
        states(ended[0], "rank 0", "stalled")
    finally:
        world.kill()


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    _, program, _ = programs_of("docs/failures.md")
    states(run_forked(program, tmp_path, 1), "rank 0", "'run 0F0'", "ValueError: boom", "True")


def make_divided(group: Any) -> str:
    schedule = zb.schedules.with_vocabulary(zb.make("1f1b", 2, 4))
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, schedule, 4, loss_fn, group=group)
    return str(caught.value)


def test_a_divided_head_with_another_loss_is_refused_on_all_ranks(world: Ranks) -> None:
    for text in world.run(make_divided, ranks=2):
        states(text, "loss_fn=zb.nn.DividedHead(...)")
