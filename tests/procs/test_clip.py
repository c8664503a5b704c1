"""Clipping over all ranks matches `torch.nn.utils.clip_grad_norm_` on one device, and a failed rank ends all ranks."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.patience import SHORT_S
from tests.procs.ranks import Ranks
from tests.procs.signs import await_signs
from tests.refusals import raises, states
from zerobubble.runtime.hooks.clip import StageNorms, scale
from zerobubble.runtime.hooks.norm_ledger import NormLedger
from zerobubble.runtime.values.gradients import Gradients

MAX_NORM = {2.0: 0.5, math.inf: 0.15}
"""About the middle of the norms that come up."""
STEPS = 20
PROMPT = 60.0
"""Seconds within which a rank must know of a failure, even on a busy machine."""


@pytest.fixture
def doomed() -> Iterator[Ranks]:
    """Ranks of their own for a test that ends one."""
    ranks = Ranks(3)
    yield ranks
    ranks.kill()


def relative(mine: Tensor, theirs: Tensor) -> float:
    return ((mine - theirs).norm() / theirs.norm()).item()


def clipped_apart(group: Any, arguments: list[dict[str, Any]]) -> tuple[str, bool, float]:
    """Ranks that clip with different arguments: the error, whether gradients are unchanged, and the next norm with equal arguments."""
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        with pytest.raises(zb.InputError) as caught:
            pipe.clip_grad_norm_(**arguments[group.rank()])
        untouched = all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), before, strict=True) if p.grad is not None)
        return str(caught.value), untouched, pipe.clip_grad_norm_(1.0).item()


@pytest.mark.parametrize("other", [{"max_norm": 0.2}, {"max_norm": 0.1000000001}, {"norm_type": math.inf}, {"error_if_nonfinite": True}])
def test_other_arguments_on_one_rank_are_refused_on_all(world: Ranks, other: dict[str, Any]) -> None:
    results = world.run(clipped_apart, [{"max_norm": 0.1}, {"max_norm": 0.1, **other}], ranks=2)
    assert results[0] == results[1], "every rank has the same error and goes on with the same norm"
    text, untouched, _ = results[0]
    assert untouched
    states(text, "clip_grad_norm_", "ranks")
    assert "rank 0 has max_norm=0.1, norm_type=2.0, error_if_nonfinite=False, rank 1 has max_norm=" in text


def train_clipped(group: Any, name: str, microbatches: int, norm_type: float) -> tuple[list[float], float]:
    """Clipped steps of SGD, compared with one device: (the norms, the largest relative error of norms and parameters)."""
    norms, worst = [], 0.0
    with zb.Pipeline(build, name, microbatches, loss_fn, group=group) as pipe:
        model = nn.ModuleList(build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages))
        optimizers = [torch.optim.SGD(parameters, lr=0.3, momentum=0.9) for parameters in (pipe.parameters(), model.parameters())]
        limit = MAX_NORM[norm_type]
        for step in range(STEPS):
            inputs, targets = batch(microbatches, seed=step)
            pipe.step(inputs, targets)
            one_device(list(model), microbatches, inputs, targets)
            mine = pipe.clip_grad_norm_(limit, norm_type)
            theirs = nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)
            norms.append(theirs.item() / limit)
            worst = max(worst, relative(mine, theirs))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for stage, module in pipe.modules.items():
                pairs = zip(module.parameters(), model[stage].parameters(), strict=True)
                worst = max(worst, *(relative(p, q) for p, q in pairs))
    return norms, worst


@pytest.mark.sweep
@pytest.mark.parametrize("norm_type", [2.0, pytest.param(math.inf, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["zb-v", "zb-h1", "1f1b", "chimera"])
def test_clipped_training_equals_one_device(world: Ranks, name: str, norm_type: float) -> None:
    for norms, worst in world.run(train_clipped, name, 4, norm_type, ranks=4):
        assert min(norms) < 1 < max(norms), "clipping acts on some steps"
        assert worst <= 1e-12


def fill(stage: int, module: nn.Module) -> None:
    """Gradients that depend only on the stage."""
    generator = torch.Generator().manual_seed(stage)
    for parameter in module.parameters():
        parameter.grad = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) - 0.5


def clip_known(group: Any, name: str, norm_type: float) -> tuple[Tensor, dict[int, list[Tensor | None]]]:
    """The total norm of those gradients, and the clipped gradients by stage."""
    with zb.Pipeline(build, name, 4, loss_fn, group=group) as pipe:
        for stage, module in pipe.modules.items():
            fill(stage, module)
        total = pipe.clip_grad_norm_(1.0, norm_type)
        return total, {stage: [parameter.grad for parameter in module.parameters()] for stage, module in pipe.modules.items()}


@pytest.mark.sweep
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(("name", "stages"), [("zb-v", 8), ("chimera", 4)])
def test_norm_and_gradients_are_those_of_one_device_to_the_bit(world: Ranks, name: str, stages: int, norm_type: float) -> None:
    model = nn.ModuleList(build(stage, stages) for stage in range(stages))
    for stage, module in enumerate(model):
        fill(stage, module)
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
    for total, clipped in world.run(clip_known, name, norm_type, ranks=4):
        assert torch.equal(total, expected)
        for stage, gradients in clipped.items():
            for gradient, parameter in zip(gradients, model[stage].parameters(), strict=True):
                assert gradient is not None
                assert parameter.grad is not None
                assert torch.equal(gradient, parameter.grad)


class Scaled(nn.Module):
    """A Linear that two stages of a rank share."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(x)
        return y


def shared_once(group: Any) -> tuple[float, list[float]]:
    """The norm of a pipeline whose ranks use one Linear for both of their stages, and that of each rank's own gradients."""
    shared = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    with zb.Pipeline([Scaled(shared), Scaled(shared)], "zb-v", 4, nn.functional.mse_loss, group=group) as pipe:
        shared.weight.grad = torch.full((3, 3), 2.0 + pipe.rank, dtype=torch.float64)
        return pipe.clip_grad_norm_(100.0).item(), list(shared.weight.grad.flatten().tolist())


def test_a_parameter_of_two_stages_counts_once(world: Ranks) -> None:
    for rank, (total, gradients) in enumerate(world.run(shared_once, ranks=2)):
        assert total == pytest.approx(math.sqrt(9 * 2**2 + 9 * 3**2), rel=1e-15)
        assert gradients == [2.0 + rank] * 9, "a norm below the limit leaves gradients as they are"


def not_finite(group: Any, value: float, error_if_nonfinite: bool) -> tuple[str, list[float]]:
    """A gradient with `value` in stage 1: the error or the norm, and stage 0's gradient on rank 0 or stage 1's on rank 1 after it."""
    pipe = zb.Pipeline(lambda *_: nn.Linear(2, 2, bias=False), "1f1b", 2, nn.functional.mse_loss, group=group)
    (weight,) = pipe.parameters()
    weight.grad = torch.tensor([[1.0, value], [3.0, 4.0]]) if pipe.rank == 1 else torch.ones(2, 2)
    try:
        message = str(pipe.clip_grad_norm_(1.0, error_if_nonfinite=error_if_nonfinite).item())
    except zb.InputError as error:
        message = str(error)
    assert weight.grad is not None
    after = weight.grad.flatten().tolist()
    weight.grad = torch.ones(2, 2)
    assert pipe.clip_grad_norm_(8.0).item() == pytest.approx(math.sqrt(8)), "the pipeline goes on"
    pipe.close()
    return message, after


@pytest.mark.parametrize(("value", "after"), [(math.inf, [0.0, math.nan, 0.0, 0.0]), (math.nan, [math.nan] * 4)])
def test_a_norm_that_is_not_finite_scales_as_in_torch(world: Ranks, value: float, after: list[float]) -> None:
    (first, whole), (second, part) = world.run(not_finite, value, False, ranks=2)
    assert first == second == str(value)
    assert part == pytest.approx(after, nan_ok=True)
    assert whole == pytest.approx([0.0] * 4 if value == math.inf else [math.nan] * 4, nan_ok=True)


@pytest.mark.long
def test_a_norm_that_is_not_finite_can_be_refused_and_names_its_stage(world: Ranks) -> None:
    (first, whole), (second, part) = world.run(not_finite, math.inf, True, ranks=2)
    assert first == second
    states(first, 2, "stage 1")
    assert (whole, part) == ([1.0] * 4, [1.0, math.inf, 3.0, 4.0])


def without_gradients(group: Any) -> float:
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        return pipe.clip_grad_norm_(1.0).item()


@pytest.mark.long
def test_the_norm_of_no_gradients_is_0(world: Ranks) -> None:
    assert world.run(without_gradients, ranks=2) == [0.0, 0.0]


def clip_with(group: Any, act: Any, culprit: int, timeout: float, folder: Path) -> tuple[float, str, int | None]:
    """A step, then clipping, before which rank `culprit` acts: (seconds until the error, its text, its rank).

    Each rank with an error signals it with a file in `folder`.
    """
    pipe = zb.Pipeline(build, "zb-h1", 8, loss_fn, group=group, timeout=timeout)
    pipe.step(*batch(8))
    begin = time.monotonic()
    if pipe.rank == culprit:
        act(pipe)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.clip_grad_norm_(1.0)
    took = time.monotonic() - begin
    (folder / str(pipe.rank)).touch()
    with raises(zb.PipelineError, "new", "Pipeline"):
        pipe.clip_grad_norm_(1.0)
    return took, str(caught.value), caught.value.rank


class WithoutNorm(Tensor):
    """A gradient without a norm; which of torch's tensor types lack one depends on its version."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linalg.vector_norm:
            raise NotImplementedError("there is no norm of it")
        return super().__torch_function__(func, types, args, kwargs)


def take_away_norm(pipe: zb.Pipeline) -> None:
    weight = next(pipe.parameters())
    weight.grad = torch.zeros_like(weight).as_subclass(WithoutNorm)


def die(pipe: zb.Pipeline) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(folder: Path, pipe: zb.Pipeline) -> None:
    """Freezes until the other three have their errors."""
    await_signs(*(folder / str(rank) for rank in range(3)))


@pytest.mark.sweep
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_cannot_clip_ends_all_with_its_cause(world: Ranks, culprit: int, tmp_path: Path) -> None:
    for took, text, rank in world.run(clip_with, take_away_norm, culprit, 2 * PROMPT, tmp_path, ranks=4):
        assert took < PROMPT
        assert rank == culprit
        states(text, f"rank {culprit}", "NotImplementedError")


@pytest.mark.long
def test_a_rank_that_is_gone_ends_the_others(doomed: Ranks, tmp_path: Path) -> None:
    first, gone, last = doomed.outcomes(clip_with, die, 1, 2 * PROMPT, tmp_path, ranks=3)
    assert gone == ("gone", "SIGKILL")
    for state, (took, text, rank) in (first, last):
        assert state == "ok"
        assert took < PROMPT
        assert rank == 1
        assert text == first[1][1]
        assert re.match("rank 1 is gone: its process ended while rank [02] was gathering the norms of gradients", text)


@pytest.mark.long
def test_a_rank_that_does_not_come_ends_the_others_within_the_timeout(world: Ranks, tmp_path: Path) -> None:
    for took, text, rank in world.run(clip_with, partial(freeze, tmp_path), 3, SHORT_S, tmp_path, ranks=4)[:3]:
        assert 1 < took < PROMPT
        assert rank == 3
        states(text, "rank 3", "rank")


@pytest.mark.in_process
@pytest.mark.parametrize("max_norm", [5e-7, 1e-6, 2e-6, 1.0])
def test_sums_in_main_grad_are_scaled_by_the_factor_of_torch(max_norm: float) -> None:
    """The norm is 1e-6, and torch adds 1e-6 to it before it divides."""
    theirs, mine = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    gradient = torch.tensor([0.6e-6, 0.8e-6], dtype=torch.float64)
    theirs.grad = gradient.clone()
    torch.nn.utils.clip_grads_with_norm_([theirs], max_norm, gradient.norm())
    gradients = Gradients(torch.float64)
    gradients.put(mine, gradient.clone())
    scale([mine, nn.Parameter(torch.zeros(1))], max_norm, gradient.norm(), gradients)
    torch.testing.assert_close(gradients.get(mine), theirs.grad, rtol=0, atol=0)
    assert mine.grad is None


@pytest.mark.in_process
@pytest.mark.parametrize(
    ("norms", "max_norm", "overflowed", "waits", "is_skipped"),
    [
        ((3.0, 4.0), 5.1, (False, False), (False, False), (False, False)),
        ((3.0, 4.0), 5.0, (False, False), (False, True), (False, False)),  # 5 / (5 + 1e-6) is below 1
        ((3.0, 4.0), 2.0, (False, False), (True, True), (False, False)),
        ((3.0, 4.0), None, (False, False), (False, False), (False, False)),
        ((3.0, 4.0), 5.000001, (False, False), (False, False), (False, False)),  # scales by 1
        ((1.0, None), None, (False, False), (False, False), (False, False)),
        ((3.0, 4.0), None, (False, True), (False, True), (False, True)),
        ((3.0, 4.0), None, (True, False), (True, True), (True, True)),
        ((math.inf, 4.0), None, (False, False), (True, True), (True, True)),
        ((math.inf, None), 9.0, (False, False), (True, True), (True, True)),
    ],
)
def test_a_rank_waits_for_the_ledger_if_the_norms_so_far_need_clipping_or_skipping(
    norms: tuple[float | None, ...],
    max_norm: float | None,
    overflowed: tuple[bool, bool],
    waits: tuple[bool, bool],
    is_skipped: tuple[bool, bool],
) -> None:
    """A parameter in each of two stages, on two ranks. `waits` and `is_skipped` are what each rank finds after it has written."""
    parameters = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    dtypes = [{rank: [parameter.dtype]} for rank, parameter in enumerate(parameters)]
    ledgers = [NormLedger({rank: [parameters[rank]]}, dtypes, rank, max_norm) for rank in range(2)]
    ledger = ledgers[0].empty()
    for rank, (form, norm) in enumerate(zip(ledgers, norms, strict=True)):
        mine = {} if norm is None else {rank: StageNorms([parameters[rank]], torch.tensor([norm]))}
        form.write(ledger, mine, overflowed=overflowed[rank])
        assert (form.waits(ledger), form.is_skipped(ledger)) == (waits[rank], is_skipped[rank])
    total = ledgers[1].total(ledger)
    assert total.item() == math.hypot(*(norm for norm in norms if norm is not None))
    assert total.dtype == (torch.float32 if norms[1] is None else torch.float64)
