"""All ranks name the same culprit, even late ones: the first report in the store counts for all."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerobubble as zb
from tests.procs.endpoints import OverGloo
from tests.procs.models import batch, build, loss_fn
from tests.procs.patience import SHORT_S
from tests.procs.ranks import Ranks, alone
from tests.procs.signs import await_signs
from tests.procs.test_fault_injection import MOMENTS, boom, replaced, struck
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble.runtime.transport.transport import Transport
from zerobubble.transport import StoreTiming

pytestmark = pytest.mark.ranks_wait

GRACE_S = 0.25


class Slow:
    """A store whose answers each take `seconds`."""

    def __init__(self, store: Any, seconds: float) -> None:
        self.store = store
        self.seconds = seconds

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(self.seconds)
            return getattr(self.store, name)(*args)

        return call


class Dead:
    """A store that is gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Broken pipe")


def end_with_a_slow_rank(group: Any, act: str, slow: int, store: Any, answer_s: float = GRACE_S) -> tuple[str, int | None]:
    """Rank 1 fails, or leaves; rank `slow` has another `store`: the error's text and its rank."""
    rank = torch.distributed.get_rank(group)
    endpoint = OverGloo(group, store if rank == slow else the_same, StoreTiming(answer_s=answer_s, stay_s=GRACE_S))
    with ExitStack() as stack:
        pipe = zb.Pipeline(build, "zb-h1", 8, loss_fn, transport=endpoint)
        if rank == 1 and act == "leave":
            pipe.close()
            return "", 1
        if rank == 1:
            stack.enter_context(struck(MOMENTS["backward"], boom))
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(8))
        return str(caught.value), caught.value.rank


def the_same(store: Any) -> Any:
    return store


def late(store: Any) -> Slow:
    return Slow(store, 2 * GRACE_S)


@pytest.mark.long
@pytest.mark.parametrize("slow", every(2, [2, 1]))
def test_a_late_rank_reports_a_failure_in_the_same_words(world: Ranks, slow: int) -> None:
    results = world.run(end_with_a_slow_rank, "boom", slow, late, ranks=3)
    assert set(results) == {("rank 1 failed at 'run 1B2' (B of stage 1, microbatch 2): ValueError: boom", 1)}


@pytest.mark.long
@pytest.mark.parametrize("slow", every(2, [2, 0]))
def test_a_diagnosis_is_the_same_for_all_however_late_a_rank_speaks(world: Ranks, slow: int) -> None:
    results = [text for text, _ in world.run(end_with_a_slow_rank, "leave", slow, late, ranks=3) if text]
    assert len(results) == 2
    assert len(set(results)) == 1, results


def gone(store: Any) -> Dead:
    return Dead()


def test_without_the_store_a_rank_shows_what_it_knows(world: Ranks) -> None:
    """No rank waits for an answer here, since a rank that stood still that long would report that instead."""
    results = world.run(end_with_a_slow_rank, "boom", 2, gone, 60.0, ranks=3)
    assert [rank for _, rank in results[:2]] == [1, 1]
    states(results[2][0], "rank 2", "rank 1")
    assert "the torch.distributed store" in results[2][0]
    assert results[2][0].endswith("does not answer: see the log of the process that hosts it")


def part_from_one_that_left(group: Any) -> float:
    """Rank 1 closes its pipeline before the others step; the seconds that it took the others to part."""
    endpoint = OverGloo(group, the_same, StoreTiming(stay_s=1000.0, silence_s=1000.0))
    pipe = zb.Pipeline(build, "zb-h1", 8, loss_fn, transport=endpoint)
    if pipe.rank == 1:
        pipe.close()
        return 0.0
    began = time.monotonic()
    with raises(zb.PipelineError, "rank 1", "pipeline", "waiting"):
        pipe.step(*batch(8))
    return time.monotonic() - began


def test_nobody_waits_for_a_rank_that_has_left_to_read_the_report(world: Ranks) -> None:
    assert max(world.run(part_from_one_that_left, ranks=3)) < 60.0


def leave_slowly(group: Any) -> str:
    """Other ranks query rank 1 after it has closed its connections and before it closes its listener."""

    def close(own: Transport) -> None:
        drop(own)
        time.sleep(3 * StoreTiming().listen_s)

    drop = Transport.close
    pipe = zb.Pipeline(build, "zb-h1", 8, loss_fn, group=group, timeout=60.0)
    if pipe.rank == 1:
        with replaced(Transport, "close", close):
            pipe.close()
        return ""
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(8))
    return str(caught.value)


@pytest.mark.long
def test_a_leaving_rank_reports_that_it_leaves(world: Ranks) -> None:
    first, _, last = world.run(leave_slowly, ranks=3)
    assert first == last
    states(first, "rank 1", "rank")


def step_in_another_order(group: Any, loner: int) -> tuple[str, int | None]:
    """Step two pipelines, in the opposite order on one rank."""
    first, second = (zb.Pipeline(build, name, 4, loss_fn, group=group, timeout=SHORT_S) for name in ("1f1b", "zb-h1"))
    first.step(*batch(4))
    second.step(*batch(4))
    torch.distributed.barrier(group)  # no rank is in an earlier step any more
    with pytest.raises(zb.PipelineError) as caught:
        (second if first.rank == loner else first).step(*batch(4))
    return str(caught.value), caught.value.rank


@pytest.mark.long
@pytest.mark.parametrize(("loner", "ranks"), every(2, [(0, 3), (1, 2)]))
def test_pipelines_stepped_in_another_order_are_reported_as_that(world: Ranks, loner: int, ranks: int) -> None:
    results = world.run(step_in_another_order, loner, ranks=ranks)
    for _, culprit in results:
        assert culprit is None
    assert len({text for rank, (text, _) in enumerate(results) if rank != loner}) == 1
    for text, _ in results:
        states(text, "rank 0", "ranks")
        assert text.endswith("; call the pipelines in the same order on every rank, or raise `timeout`")
        places = re.findall(r"rank (\d) was waiting for .*? in its pipeline \d+ \('(.*?)'\)", text)
        assert places == [(str(rank), "zb-h1" if rank == loner else "1f1b") for rank in range(ranks)]


def compute_elsewhere(group: Any, message: Path) -> tuple[str, int | None]:
    """Rank 1 computes in a step of a pipeline of its own until rank 0 knows of a failure, which the file `message` signals."""
    pipe = zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, timeout=SHORT_S)
    own = zb.Pipeline(lambda s, n: Dawdling(message), "1f1b", 1, nn.functional.mse_loss, group=alone())
    if pipe.rank == 1:
        own.step(torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(4))
    message.touch()
    return str(caught.value), caught.value.rank


class Dawdling(nn.Linear):
    def __init__(self, sign: Path) -> None:
        super().__init__(1, 1)
        self.sign = sign

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        await_signs(self.sign)
        return super().forward(x)


@pytest.mark.long
def test_a_rank_that_computes_in_another_pipeline_is_named(world: Ranks, tmp_path: Path) -> None:
    ((text, rank),) = set(world.run(compute_elsewhere, tmp_path / "sign", ranks=2))
    assert rank == 1
    start = r"rank 1 kept the others waiting: it was at 'run 0F0' \(F of stage 0, microbatch 0\) "
    start += r"in its pipeline \d+ \('1f1b'\), another one, when rank 0 gave up "
    assert re.match(start, text)
