"""Arguments that must be equal on all ranks are compared: if one rank's differs, all ranks raise the same error with both values."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import states
from zerobubble.hooks import PostValidation, StepHook

PROMPT = 80.0
"""Seconds within which every rank must know of the failure, far below the timeout."""


class Rewinding(StepHook):
    needs_rollback_point = True


def by_length(target: Tensor) -> float:
    return float(target.numel())


MADE: dict[str, tuple[str, dict[str, Any], str]] = {
    "loss_weight": ("chimera", {"loss_weight": by_length}, "ranks disagree on the loss_weight: rank 0 has none, rank 1 has a function"),
    "hooks": (
        "1f1b",
        {"hooks": [Rewinding()]},
        "ranks disagree on the hooks that let steps start over: rank 0 has none, rank 1 has Rewinding",
    ),
    "planning": (
        "auto",
        {"schedule": zb.Auto(memory=20_000)},
        "ranks disagree on the planning: rank 0 has auto with no memory limit, rank 1 has auto with a memory limit of 20000, 20000 bytes",
    ),
}


def made_apart(group: Any, case: str) -> tuple[float, str]:
    name, other, _ = MADE[case]
    options = {"schedule": name} | (other if group.rank() else {})
    began = time.monotonic()
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, num_microbatches=4, loss_fn=loss_fn, group=group, **options)
    return time.monotonic() - began, str(caught.value)


@pytest.mark.parametrize("case", MADE)
def test_arguments_of_a_pipeline(world: Ranks, case: str) -> None:
    for took, text in world.run(made_apart, case, ranks=2):
        assert text == MADE[case][2]
        assert took < PROMPT


def weighed_where_it_counts(group: Any) -> float:
    """Only the rank with the last stage weights losses, so no other rank needs a `loss_weight`."""
    weight = by_length if group.rank() == 1 else None
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, loss_weight=weight) as pipe:
        return pipe.step(*batch(4)).item()


def test_a_weight_is_compared_where_it_is_used(world: Ranks) -> None:
    first, second = world.run(weighed_where_it_counts, ranks=2)
    assert first == second


def clip_with(pipe: zb.Pipeline, rank: int, **other: Any) -> None:
    pipe.clip_grad_norm_(**({"max_norm": 1.0} | (other if rank else {})))


def profile_with(pipe: zb.Pipeline, rank: int, steps: Any) -> None:
    pipe.profile(*batch(4), steps=steps if rank else 1)


def validate_with(pipe: zb.Pipeline, rank: int, **other: Any) -> None:
    PostValidation(torch.optim.SGD(pipe.parameters(), lr=0.1), pipe, **({"max_norm": 1.0} | (other if rank else {})))


CALLED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "max_norm of text": (clip_with, {"max_norm": "much"}, "rank 1: clip_grad_norm_: max_norm must be a number, got 'much'"),
    "no max_norm": (clip_with, {"max_norm": None}, "rank 1: clip_grad_norm_: max_norm must be a number, got None"),
    "NaN": (
        clip_with,
        {"max_norm": float("nan")},
        "rank 1: clip_grad_norm_: max_norm must be at least 0 and norm_type an order such as 2 or inf, got nan and 2.0",
    ),
    "norm_type": (clip_with, {"norm_type": "two"}, "rank 1: clip_grad_norm_: norm_type must be a number, got 'two'"),
    "steps": (profile_with, {"steps": 2}, "ranks disagree on the steps of a profile: rank 0 has 1, rank 1 has 2"),
    "steps of text": (profile_with, {"steps": "2"}, "a profile needs at least 1 step, got '2'"),
    "no steps": (profile_with, {"steps": 0}, "a profile needs at least 1 step, got 0"),
    "PostValidation": (
        validate_with,
        {"max_norm": "1"},
        "rank 1: max_norm must be a number above 0, or None to clip nothing, got '1'",
    ),
    "scaler": (validate_with, {"scaler": 2.0}, "rank 1: scaler must be a torch.amp.GradScaler, or None, got 2.0"),
}


def called_apart(group: Any, case: str) -> tuple[float, str, bool]:
    call, other, _ = CALLED[case]
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        began = time.monotonic()
        with pytest.raises(zb.InputError) as caught:
            call(pipe, pipe.rank, **other)
        took = time.monotonic() - began
        return took, str(caught.value), pipe.step(*batch(4)).item() > 0


@pytest.mark.parametrize("case", CALLED)
def test_wrong_arguments_of_later_calls_leave_the_pipeline_usable(world: Ranks, case: str) -> None:
    for took, text, goes_on in world.run(called_apart, case, ranks=2):
        assert text == CALLED[case][2]
        assert took < PROMPT
        assert goes_on


def of_text(group: Any) -> float:
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        model = nn.ModuleList(pipe.modules.values())
        largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
        total: Any = pipe.clip_grad_norm_(1e9, "inf")  # type: ignore[arg-type]
        return total.item() - largest


def test_an_order_may_be_text_as_in_torch(world: Ranks) -> None:
    assert min(world.run(of_text, ranks=2)) == 0.0


def other_batches(group: Any) -> str:
    """The two ranks with a first stage get batches of different sizes, and targets as long as the first rank's."""
    inputs, targets = batch(4)
    with zb.Pipeline(build, "chimera", 4, loss_fn, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(inputs[: 8 - 2 * group.rank()], targets)
    return str(caught.value)


def test_both_ends_of_a_bidirectional_schedule_need_the_same_batch(world: Ranks) -> None:
    for text in world.run(other_batches, ranks=2):
        states(text, 8, "rank 1", 6)


def weigh_otherwise(group: Any) -> str:
    """Weights with the same sum that differ one by one."""
    weights = iter([1.0, 2.0, 3.0, 4.0] if group.rank() else [4.0, 3.0, 2.0, 1.0])
    with (
        zb.Pipeline(build, "chimera", 4, loss_fn, group=group, loss_weight=lambda _: next(weights)) as pipe,
        pytest.raises(zb.PipelineError) as caught,
    ):
        pipe.step(*batch(4))
    return str(caught.value)


def test_weights_are_compared_one_by_one(world: Ranks) -> None:
    for text in world.run(weigh_otherwise, ranks=2):
        states(text, 10, "microbatches", "rank")


def scaled_on_one_rank(group: Any, name: str, culprit: int) -> str:
    """Only rank `culprit` gives a scaler to the step; all unscale."""
    with zb.Pipeline(build, name, 4, loss_fn, group=group) as pipe:
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
        scaler.scale(torch.ones(()))
        pipe.step(*batch(4), scaler=scaler if pipe.rank == culprit else None)
        try:
            pipe.unscale_(scaler, torch.optim.SGD(pipe.parameters(), lr=1.0))
        except zb.PipelineError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(("name", "culprit", "lacking"), [("1f1b", 0, 1), ("chimera", 0, 1), ("chimera", 1, 0)])
def test_a_scaler_must_be_given_where_the_loss_is(world: Ranks, name: str, culprit: int, lacking: int) -> None:
    for text in world.run(scaled_on_one_rank, name, culprit, ranks=2):
        states(text, f"rank {lacking}", "scaler", "stage")


def test_a_scaler_is_enough_where_the_loss_is(world: Ranks) -> None:
    assert world.run(scaled_on_one_rank, "1f1b", 1, ranks=2) == ["", ""]


def enabled_on_some(group: Any, enabled: list[tuple[bool, bool]]) -> tuple[int, str, float]:
    """A step for each of `enabled`, which says on which of two ranks the scaler is enabled.

    Returns the number of completed steps, the error after them, and the seconds it took.
    """
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        for step, of_ranks in enumerate(enabled):
            scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, enabled=of_ranks[pipe.rank])
            pipe.step(*batch(4), scaler=scaler)
            began = time.monotonic()
            try:
                pipe.unscale_(scaler, optimizer)
            except zb.PipelineError as error:
                return step, str(error), time.monotonic() - began
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return len(enabled), "", 0.0


ALIKE = [(True, True), (False, False), (False, False), (True, True)]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ([], "the scalers of some ranks are disabled: rank 0 has one that is enabled, rank 1 has one that is disabled; make them alike"),
        (ALIKE, "the ranks make different calls: rank 0 is sharing which gradients are not finite"),
    ],
)
def test_scalers_disabled_on_only_some_ranks_are_reported(world: Ranks, before: list[tuple[bool, bool]], message: str) -> None:
    for steps, text, seconds in world.run(enabled_on_some, [*before, (True, False)], ranks=2):
        assert steps == len(before), text
        assert message in text
        assert seconds < PROMPT
