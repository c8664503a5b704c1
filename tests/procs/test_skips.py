"""Tensors stashed by one stage and popped by a later one match one device on every kind of placement."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.procs.models import batch, build, gradient_error, loss_fn, one_device
from tests.procs.programs import programs_of
from tests.procs.ranks import Ranks
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble.runtime.values.hold import carry
from zerobubble.runtime.values.payload import Stashed
from zerobubble.runtime.values.shapes import read_announcement, shapes_of, write_announcement

SCHEDULES = [("gpipe", 4), ("zb-h1", 4), ("interleaved-1f1b", 4), ("zb-v", 4), ("interleaved-zb", 4), ("chimera", 4), ("dualpipe", 8)]


class UNet(nn.Module):
    """Stages of the first half stash what they give, those of the second half add what their mirror stage gave, through a Linear."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = build(stage, num_stages)
        self.stage = stage
        self.mirror = num_stages - 1 - stage
        self.join = nn.Linear(12, 6, bias=False, dtype=torch.float64) if self.mirror < stage else None

    def forward(self, x: Tensor) -> Tensor:
        if self.join is not None:
            x = self.join(torch.cat([x, zb.nn.pop(f"level {self.mirror}")], -1))
        y: Tensor = self.inner(x)
        if self.join is None:
            zb.nn.stash(f"level {self.stage}", y)
        return y


class Masked(nn.Module):
    """Later stages need the tokens and their embedding: integers and a tensor with a gradient of several consumers, kept to the end."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = build(stage, num_stages)
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            zb.nn.stash("tokens", x)
            y: Tensor = self.inner(x)
            zb.nn.stash("start", y * 2)
            return y
        mask = (zb.nn.pop("tokens", keep=True) % 3 > 0).unsqueeze(-1)
        z: Tensor = self.inner(x + mask * zb.nn.pop("start", keep=True))
        return z


def train(group: Any, make_stage: Callable[[int, int], nn.Module], name: str, microbatches: int) -> tuple[float, float, bool]:
    """The largest difference of losses, evaluations and gradients from one device; rank 0's costs; whether the profile left gradients."""
    worst = 0.0
    with zb.Pipeline(make_stage, name, microbatches, loss_fn, group=group) as pipe:
        stages = [make_stage(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        worst = max(worst, compare_evaluation(pipe, stages, microbatches))
        for step, length in enumerate((5, 5, 3)):
            inputs, targets = batch(microbatches, seed=step, length=length)
            loss = pipe.step(inputs, targets)
            worst = max(worst, abs(loss - one_device(stages, microbatches, inputs, targets)).item())
        before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        costs = pipe.profile(*batch(microbatches), steps=1)
        kept = all(map(torch.equal, before, [p.grad for p in pipe.parameters() if p.grad is not None]))
        worst = max(worst, gradient_error(pipe, stages))
        return worst, min(costs.forward), kept


def compare_evaluation(pipe: zb.Pipeline, stages: list[nn.Module], microbatches: int) -> float:
    inputs, targets = batch(microbatches, seed=9)
    _, outputs = pipe.eval_step(inputs, targets)
    with torch.no_grad():
        expected = nn.Sequential(*stages)(inputs)
    return 0.0 if outputs is None else (outputs - expected).abs().max().item()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("make_stage", "name", "microbatches"), every(5, ((make_stage, *shape) for make_stage in (UNet, Masked) for shape in SCHEDULES))
)
def test_skips_train_with_the_numbers_of_one_device(world: Ranks, make_stage: Any, name: str, microbatches: int) -> None:
    for worst, forward, kept in world.run(train, make_stage, name, microbatches, ranks=4):
        assert worst <= 1e-13
        assert forward > 0
        assert kept


class OddBit(nn.Module):
    """A skip over one microbatch's whole model, without which gradients would differ at once; equal to the last bit in any order."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(4, 4)
        self.stage, self.last = stage, num_stages - 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.stage == 0:
            zb.nn.stash("x", y)
        return y * zb.nn.pop("x", keep=self.stage < self.last) if self.stage else y


def to_the_bit(group: Any, name: str) -> bool:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with zb.Pipeline(OddBit, name, 1, nn.functional.mse_loss, group=group) as pipe:
        stages = [OddBit(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        pipe.step(x, x)
        nn.functional.mse_loss(nn.Sequential(*stages)(x), x).backward()
        pairs = [(p.grad, q.grad) for s, m in pipe.modules.items() for p, q in zip(m.parameters(), stages[s].parameters(), strict=True)]
        return all(p is not None and q is not None and torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_several_consumers_add_up_as_autograd_adds_them(world: Ranks, name: str) -> None:
    assert all(world.run(to_the_bit, name, ranks=4))


class Faulty(nn.Module):
    """Stages that do, besides their work, what `acts` says for them."""

    def __init__(self, stage: int, act: str) -> None:
        super().__init__()
        self.inner = build(stage, 4)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        for word in self.act.split():
            verb, name = word.split(":")
            if verb == "stash":
                zb.nn.stash(name, y)
            else:
                y = y + 0 * zb.nn.pop(name, keep=verb == "keep")
        return y


class Acts:
    def __init__(self, *acts: str) -> None:
        self.acts = acts

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        return Faulty(stage, self.acts[stage])


def refusal(group: Any, acts: Acts) -> str:
    with zb.Pipeline(acts, "zb-h1", 4, loss_fn, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(4))
    return str(caught.value)


FAULTS = {
    "nobody": (
        Acts("stash:skip", "", "pop:skop", ""),
        "rank 2 failed at 'run 2F0' (F of stage 2, microbatch 0): InputError: "
        "stage 2 pops 'skop', which nobody stashed before, or which was popped without keep=True; "
        "did you mean 'skip'? on their way are 'skip'",
    ),
    "twice popped": (
        Acts("stash:a", "pop:a", "pop:a", ""),
        "rank 2 failed at 'run 2F0' (F of stage 2, microbatch 0): InputError: "
        "stage 2 pops 'a', which nobody stashed before, or which was popped without keep=True; "
        "nothing is on its way",
    ),
    "twice stashed": (
        Acts("stash:a", "stash:a", "", "pop:a"),
        "rank 1 failed at 'run 1F0' (F of stage 1, microbatch 0): InputError: "
        "stage 1 stashes 'a', which is on its way already; pop it before, or take another name",
    ),
    "never popped": (
        Acts("stash:a stash:b", "", "pop:b", ""),
        "rank 3 failed at 'run 3F0' (F of stage 3, microbatch 0): InputError: stage 3, the last, ends with 'a' still on the way; "
        "pop what is stashed in the stage that needs it last",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported_on_every_rank(world: Ranks, fault: str) -> None:
    acts, text = FAULTS[fault]
    assert set(world.run(refusal, acts, ranks=4)) == {text}


class Renaming(nn.Module):
    """Stage 0 stashes under a name that changes after the first step of two microbatches."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.stage = stage
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        name = "early" if self.calls < 2 else "late"
        self.calls += 1
        if self.stage > 0:
            return y + zb.nn.pop(name)
        zb.nn.stash(name, y)
        return y


def renamed(group: Any) -> str:
    x = torch.ones(2, 2)
    with zb.Pipeline(Renaming, "1f1b", 2, nn.functional.mse_loss, group=group) as pipe:
        pipe.step(x, x)
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(x, x)
        return str(caught.value)


def test_names_may_not_change_with_the_same_shapes(world: Ranks) -> None:
    (text,) = set(world.run(renamed, ranks=2))
    states(text, "rank 0", "failed")
    states(text, "late", "early")


class Checkpointed(nn.Module):
    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = build(stage, num_stages)
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.work, x, use_reentrant=False)
        return y

    def work(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.stage == 0:
            zb.nn.stash("x", y)
            return y
        return y * zb.nn.pop("x").sum()


def recompute(group: Any) -> str:
    with zb.Pipeline(Checkpointed, "1f1b", 2, loss_fn, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(2))
    return str(caught.value)


def test_a_checkpointed_region_may_not_pop(world: Ranks) -> None:
    (text,) = set(world.run(recompute, ranks=2))
    states(text, "'run 1BW0'", "InputError", "pop('x')")


def test_outside_of_a_pipeline_they_wait_in_the_thread() -> None:
    one, other = torch.ones(1), torch.zeros(2)
    zb.nn.stash("x", one)
    zb.nn.stash("x", other)
    assert zb.nn.pop("x", keep=True) is other
    assert zb.nn.pop("x") is other
    with raises(zb.InputError, "pop", "x", "nothing"):
        zb.nn.pop("x")
    with raises(zb.InputError, "stash", "str", "int"):
        zb.nn.stash("x", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [(), ("skip",), ("a name with more than seven letters", "ä", ""), ("",)])
def test_a_note_shows_names(names: tuple[str, ...]) -> None:
    tensors = tuple(torch.zeros(k + 1) for k in range(len(names) + 1))
    structure = Stashed(None, names) if names else None
    assert read_announcement(write_announcement(shapes_of(tensors), structure, torch.device("cpu"))) == (shapes_of(tensors), structure)


def run_page(group: Any) -> tuple[list[float], float]:
    """The losses of the page's first program; how far the second's outputs on the last rank are from one device."""
    names: dict[str, Any] = {}
    for program in programs_of("docs/skips.md"):
        exec(program, names)
    tokens = torch.arange(24).reshape(4, 6) % 10
    with zb.Pipeline(names["Block"], "1f1b", 4, nn.functional.mse_loss, group=group) as pipe:
        _, outputs = pipe.eval_step(tokens)
    error = 0.0 if outputs is None else (outputs - names["one_device"](tokens)).abs().max().item()
    return names["train"](group), error


@pytest.mark.long
def test_the_page_runs(world: Ranks) -> None:
    for losses, error in world.run(run_page, ranks=4):
        assert losses[-1] < losses[0]
        assert error <= 1e-6


def in_two_threads(first: Any, second: Any) -> None:
    other = threading.Thread(target=first.run)
    other.start()
    second.run()
    other.join()


def overlapped(group: Any) -> float:
    with zb.Pipeline(UNet, "dualpipe", 8, loss_fn, group=group, overlap=in_two_threads) as pipe:
        stages = [UNet(s, 4) for s in range(4)]
        pipe.step(*batch(8))
        one_device(stages, 8, *batch(8))
        errors = [
            (p.grad - q.grad).abs().max().item()
            for stage, module in pipe.modules.items()
            for p, q in zip(module.parameters(), stages[stage].parameters(), strict=True)
            if p.grad is not None and q.grad is not None
        ]
        assert len(errors) == len(list(pipe.parameters()))
        return max(errors)


def test_overlapped_passes_in_threads_keep_their_own(world: Ranks) -> None:
    assert max(world.run(overlapped, ranks=4)) <= 1e-13


def test_a_message_without_skips_is_what_the_stage_gave() -> None:
    inputs, outputs = (torch.ones(1),), (torch.ones(2),)
    given: list[Any] = []
    assert carry(lambda tensors, _: given.append(tensors) or outputs, inputs, None, 0, trains=True) is outputs  # type: ignore[func-returns-value]
    assert given[0] is inputs
