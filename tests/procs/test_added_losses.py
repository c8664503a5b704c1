"""Losses that any stage adds: the loss, its parts and all gradients match the same modules on one device.

Covers value, parts and gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.device import DEVICE
from tests.libraries import library
from tests.procs.models import OneDevice, batch, build, gradient_error, loss_fn
from tests.procs.programs import programs_of
from tests.procs.ranks import Ranks
from tests.procs.versions import needs_checkpoints_in_graphs
from tests.refusals import raises, states
from zerobubble.runtime.step.loss_report import AddedLossReport

PAD = -100


class Routed(nn.Module):
    """A stage whose router adds a balancing loss; the first and the last stage each add another one."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = build(stage, num_stages)
        self.router = nn.Linear(11 if stage == num_stages - 1 else 6, 3, dtype=torch.float64)
        self.stage, self.last = stage, num_stages - 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.balance(y)
        if self.stage == 0:
            zb.nn.add_loss("contrast", (y @ y.mT).logsumexp(-1).mean().reshape(1))
        if self.stage == self.last:
            zb.nn.add_loss("z", y.logsumexp(-1).square().mean())
        return y

    def balance(self, y: Tensor) -> None:
        zb.nn.add_loss("router", 0.1 * self.router(y).softmax(-1).mean((0, 1)).square().sum())


class Checkpointed(Routed):
    """The whole stage is recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class HalfFrozen(Routed):
    """The first stage trains nothing, the second only its router, whose loss reaches nothing before it."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.requires_grad_(stage != 0)
        self.inner.requires_grad_(stage > 1)

    def balance(self, y: Tensor) -> None:
        super().balance(y.detach() if self.stage == 1 else y)


class Apart(Routed):
    """Stage 1 passes detached values on, so only the loss that it adds trains it, and the main loss trains nothing before stage 2."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y.detach() if self.stage == 1 else y


def tokens_that_count(target: Tensor) -> Tensor:
    return (target != PAD).sum()


def padded(num_microbatches: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences with different numbers of tokens that count, and none in the last two."""
    inputs, targets = (part.clone() for part in batch(num_microbatches, seed=seed))
    for row in range(len(targets)):
        targets[row, row % 6 :] = PAD
    targets[-2:] = PAD
    return inputs, targets


def one_device(
    stages: Sequence[nn.Module], num_microbatches: int, inputs: Tensor, targets: Tensor, *, labeled: bool = False
) -> dict[str, Tensor]:
    """The reference: accumulates gradients over the microbatches; returns the loss as "", and the parts that were added to it.

    With `labeled` the first stage is given the targets, too.
    """
    total = tokens_that_count(targets)
    found: dict[str, Tensor] = {}
    for x, y in zip(inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches), strict=True):
        share = tokens_that_count(y).double() / total
        if share == 0:
            continue
        with zb.nn.collecting_losses() as added:
            output = nn.Sequential(*stages[1:])(stages[0](x, y) if labeled else stages[0](x))
        loss = share * (loss_fn(output, y) + sum(added.values()))
        if loss.requires_grad:
            loss.backward()
        for name, part in {"": loss, **{name: share * value for name, value in added.items()}}.items():
            found[name] = found.get(name, torch.zeros(())) + part.detach()
    return found


def difference(pipe: zb.Pipeline, loss: Tensor | None, expected: dict[str, Tensor]) -> float:
    """The largest difference of a step's loss and its parts from those of one device."""
    assert loss is not None
    found = {"": loss, **pipe.added_losses}
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().item() for name in found)


def train(group: Any, make_stage: Any, schedule: Any, num_microbatches: int, split: str = "deferred") -> float:
    """The largest difference of losses, their parts, evaluations and gradients from one device over three steps."""
    heard: dict[int, float] = {}
    with zb.Pipeline(
        make_stage,
        schedule,
        num_microbatches,
        loss_fn,
        group=group,
        split=split,
        loss_weight=tokens_that_count,
        on_loss=lambda j, loss: heard.update({j: loss.item()}),
    ) as pipe:
        stages = [make_stage(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        worst = 0.0
        for seed in range(3):
            inputs, targets = padded(num_microbatches, seed)
            worst = max(worst, difference(pipe, pipe.step(inputs, targets), one_device(stages, num_microbatches, inputs, targets)))
            assert pipe.losses is not None
            losses = pipe.losses
            torch.testing.assert_close([losses[j].item() for j in heard], list(heard.values()), rtol=0, atol=0, equal_nan=True)
        worst = max(worst, gradient_error(pipe, stages))
        copies = [make_stage(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        return max(worst, difference(pipe, pipe.eval_step(inputs, targets)[0], one_device(copies, num_microbatches, inputs, targets)))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("1f1b", 1, 3), ("1f1b", 2, 4), ("zb-h1", 3, 5), ("zb-v", 4, 6), ("interleaved-1f1b", 2, 4), ("dualpipe-v", 2, 8), ("chimera", 4, 4)],
)
def test_added_losses_train_with_the_numbers_of_one_device(world: Ranks, name: str, ranks: int, microbatches: int) -> None:
    assert max(world.run(train, Routed, name, microbatches, ranks=ranks)) <= 1e-13


@pytest.mark.long
def test_added_losses_work_in_a_planned_schedule(world: Ranks) -> None:
    work = zb.Workload.uniform(3, (18.522, 18.086, 9.337), comm=0.601, held=0.941)
    best = zb.plan(work, 6, 2.5, placements="vee", evaluations=300)
    assert best.how.startswith("planned by"), "a schedule that no name gives"
    assert max(world.run(train, Routed, best.schedule, 6, ranks=3)) <= 1e-13


SPLITS = [("zb-h1", "deferred"), ("zb-v", "deferred"), ("1f1b", "whole"), ("zb-h1", "graph")]


@pytest.mark.sweep
@pytest.mark.parametrize("make_stage", [HalfFrozen, Apart])
@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_stages_that_nothing_else_trains(world: Ranks, name: str, split: str, make_stage: Any) -> None:
    assert max(world.run(train, make_stage, name, 4, split, ranks=2)) <= 1e-13


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "split"), [*SPLITS[:-1], pytest.param("zb-h1", "graph", marks=needs_checkpoints_in_graphs)])
def test_a_checkpointed_region_adds_once(world: Ranks, name: str, split: str) -> None:
    assert max(world.run(train, Checkpointed, name, 4, split, ranks=2)) <= 1e-13


def refusal(group: Any, make_stage: Any) -> str:
    with zb.Pipeline(make_stage, "zb-h1", 2, loss_fn, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(2))
    return str(caught.value)


class Reentrant(Routed):
    """Runs first without gradients, so that the losses it adds would train nothing."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) if self.stage == 0 else checkpoint(super().forward, x, use_reentrant=True)
        return y


class Sums(Routed):
    def balance(self, y: Tensor) -> None:
        zb.nn.add_loss("router", self.router(y))


class Changing(Routed):
    """Adds a loss only in every other microbatch."""

    calls = 0

    def balance(self, y: Tensor) -> None:
        self.calls += 1
        if self.calls > 2:
            super().balance(y)


FAULTS = {
    Reentrant: "rank 1 failed at 'run 1F0' (F of stage 1, microbatch 0): InputError: add_loss('router') is called "
    "where no gradient is recorded, under torch.no_grad or in a reentrant checkpoint; "
    "call it outside of it, or give the checkpoint use_reentrant=False",
    Sums: "rank 0 failed at 'run 0F0' (F of stage 0, microbatch 0): InputError: add_loss takes a floating-point tensor with one element, "
    "the mean over its microbatch, got (2, 5, 3) torch.float64 for 'router'",
}


@pytest.mark.parametrize("make_stage", FAULTS)
def test_faults_are_reported_on_every_rank(world: Ranks, make_stage: Any) -> None:
    assert set(world.run(refusal, make_stage, ranks=2)) == {FAULTS[make_stage]}


def changing(group: Any) -> str:
    with zb.Pipeline(Changing, "1f1b", 2, loss_fn, group=group) as pipe:
        pipe.step(*batch(2))
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(2))
    return str(caught.value)


def test_a_stage_adds_the_same_losses_in_every_step(world: Ranks) -> None:
    (text,) = set(world.run(changing, ranks=2))
    states(text, "router", "contrast")


def test_outside_of_a_pipeline_they_are_collected_or_refused() -> None:
    loss = torch.ones(1, requires_grad=True)
    with zb.nn.collecting_losses() as outer:
        zb.nn.add_loss("a", loss)
        with zb.nn.collecting_losses() as inner:
            zb.nn.add_loss("a", 2 * loss)
            zb.nn.add_loss("a", 3 * loss)
        zb.nn.add_loss("b", inner["a"])
        for _ in range(3):
            zb.nn.add_loss("half", torch.tensor(1 + 2**-7, dtype=torch.bfloat16))
    assert {name: value.tolist() for name, value in outer.items()} == {"a": 1.0, "b": 5.0, "half": 3 + 3 * 2**-7}
    with raises(zb.InputError, "add_loss", "a", "Pipeline"):
        zb.nn.add_loss("a", loss)
    with torch.no_grad():
        zb.nn.add_loss("a", loss)
    with raises(zb.InputError, "add_loss", "str", "float"):
        zb.nn.add_loss("a", 1.0)  # type: ignore[arg-type]


def test_a_report_shows_names() -> None:
    report = AddedLossReport({"router": 0.5, "ä b": -1.0, "": 1e300})
    assert AddedLossReport.read(torch.tensor(report.numbers(), dtype=torch.float64)) == report


def scaled(group: Any) -> float:
    """The distance from one device of two steps with a scaler, and of the values that a hook gets."""
    reports: list[dict[str, float]] = []
    telemetry = zb.hooks.Telemetry(lambda report: reports.append({"": report.loss, **report.added_losses}))
    with zb.Pipeline(Routed, "zb-h1", 4, loss_fn, group=group, hooks=[telemetry]) as pipe:
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        stages = [Routed(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        worst = 0.0
        for seed in range(2):
            expected = one_device(stages, 4, *batch(4, seed=seed))
            worst = max(worst, difference(pipe, pipe.step(*batch(4, seed=seed), scaler=scaler), expected))
            assert reports.pop() == pytest.approx({name: part.item() for name, part in expected.items()}, rel=1e-12)
        pipe.unscale_(scaler, optimizer)
        return max(worst, gradient_error(pipe, stages))


def test_a_scaler_scales_all_of_the_loss(world: Ranks) -> None:
    assert max(world.run(scaled, ranks=2)) <= 1e-13


def run_page(group: Any) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The losses of the page's program in a pipeline and on one device."""
    names = page()
    return names["train"](group), names["train_on_one_device"](group.size())


def page() -> dict[str, Any]:
    """The names that the programs of the page define."""
    names: dict[str, Any] = {}
    for program in programs_of("docs/losses.md"):
        exec(program, names)
    return names


def test_the_page_runs(world: Ranks) -> None:
    for mine, theirs in world.run(run_page, ranks=2):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
        assert mine[-1] < mine[0]


class Settings:
    """The fields of a Mixtral configuration that the page reads."""

    vocab_size = 50
    num_local_experts = 4
    num_experts_per_tok = 2
    router_aux_loss_coef = 0.05


def of_transformers(group: Any, name: str) -> float:
    """The distance between a step with the page's losses and Transformers' own loss with the number of items in the batch."""
    library("transformers")
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    names = page()
    loss_fn, num_items = names["causal_lm"](Settings)

    def build(stage: int, num_stages: int) -> nn.Module:
        layer: nn.Module = names["Layer"](stage, num_stages)
        return layer.double()

    tokens = torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    for row in range(8):
        labels[row, 2 + row % 4 :] = PAD
    with zb.Pipeline(build, name, 4, loss_fn, group=group, loss_weight=num_items) as pipe:
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        total = num_items(labels).double()
        expected = torch.zeros(())
        for x, y in zip(tokens.chunk(4), labels.chunk(4), strict=True):
            output = OneDevice(stages)(x)
            loss = ForCausalLMLoss(output["hidden"], y, vocab_size=50, num_items_in_batch=total)
            router = load_balancing_loss_func(output["router_logits"], 4, 2)
            loss = loss + num_items(y) / total * 0.05 * router
            loss.backward()
            expected = expected + loss.detach()
        return max(abs(pipe.step(tokens, labels) - expected).item(), gradient_error(pipe, stages))


@pytest.mark.long
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_losses_of_transformers_over_router_logits_that_grow(world: Ranks, name: str) -> None:
    assert max(world.run(of_transformers, name, ranks=2)) <= 1e-6


class Predicting(Routed):
    """The first stage has its own head; its mean over zero tokens is NaN in a microbatch of weight zero."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.head = nn.Linear(6, 11, dtype=torch.float64) if stage == 0 else None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        if self.head is not None:
            assert labels is not None
            zb.nn.add_loss("further", 0.3 * loss_fn(self.head(y), labels))
        return y


def predicting(group: Any, name: str) -> float:
    """The distance from one device of a step in which the first stage's rank gets targets, too."""
    inputs, targets = padded(4, seed=0)
    with zb.Pipeline(Predicting, name, 4, loss_fn, group=group, loss_weight=tokens_that_count) as pipe:
        stages = [Predicting(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        loss = pipe.step(inputs, targets, kwargs={"labels": targets} if 0 in pipe.modules else None)
        expected = one_device(stages, 4, inputs, targets, labeled=True)
        return max(difference(pipe, loss, expected), gradient_error(pipe, stages))


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_head_of_the_first_stage_and_a_microbatch_without_tokens(world: Ranks, name: str) -> None:
    assert max(world.run(predicting, name, ranks=2)) <= 1e-13


def in_two_threads(first: Any, second: Any) -> None:
    other = threading.Thread(target=first.run)
    other.start()
    second.run()
    other.join()


def validated(group: Any, *, in_threads: bool) -> float:
    """The distance of the weights from one device after steps that restart if they were clipped, or whose passes overlap."""
    name, overlap = ("dualpipe", in_two_threads) if in_threads else ("zb-h2", None)
    with zb.Pipeline(Routed, name, 4, loss_fn, group=group, overlap=overlap) as pipe:
        stages = [Routed(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        optimizer = zb.PostValidation(torch.optim.SGD(pipe.parameters(), lr=0.1), pipe, max_norm=1.0)
        everything = [parameter for stage in stages for parameter in stage.parameters()]
        expected = torch.optim.SGD(everything, lr=0.1)
        worst = 0.0
        for seed in range(3):
            found = pipe.step(*batch(4, seed=seed))
            worst = max(worst, difference(pipe, found, one_device(stages, 4, *batch(4, seed=seed))))
            nn.utils.clip_grad_norm_(everything, 1.0)
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
        optimizer.settle()
        for index, module in pipe.modules.items():
            for mine, theirs in zip(module.parameters(), stages[index].parameters(), strict=True):
                worst = max(worst, (mine - theirs).abs().max().item())
        return worst


@pytest.mark.parametrize("in_threads", [False, True])
def test_steps_that_start_over_and_passes_in_threads(world: Ranks, in_threads: bool) -> None:
    assert max(world.run(partial(validated, in_threads=in_threads), ranks=2)) <= 1e-12


class Stack(nn.Module):
    """Blocks that each add a loss, in a model not written for pipelining; with `adds`, the code around them adds one, too."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(StackBlock() for _ in range(4))
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.adds:
            zb.nn.add_loss("size", x.square().mean())
        return x


class StackBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        zb.nn.add_loss("mean", x.mean().square())
        return x


def cut_by_itself(group: Any, name: str) -> float:
    """The distance from one device of three steps with batches of two lengths."""
    model, oracle = Stack(adds=False).double(), Stack(adds=False).double()
    with zb.Pipeline(zb.split(model, example=torch.zeros(2, 6).double()), name, 2, nn.functional.mse_loss, group=group) as pipe:
        worst = 0.0
        for step, length in enumerate((4, 4, 8)):
            x = torch.randn(length, 6, generator=torch.Generator().manual_seed(step)).double()
            total = torch.zeros(()).double()
            for part in x.chunk(2):
                with zb.nn.collecting_losses() as added:
                    output = oracle(part)
                loss = (nn.functional.mse_loss(output, part) + sum(added.values())) / 2
                loss.backward()
                total += loss.detach()
            worst = max(worst, abs(pipe.step(x, x) - total).item())
        theirs = dict(oracle.named_parameters())
        for module in pipe.modules.values():
            for parameter_name, mine in module.named_parameters():
                expected = theirs[parameter_name].grad
                assert mine.grad is not None
                assert expected is not None
                worst = max(worst, (mine.grad - expected).abs().max().item())
        return worst


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_blocks_of_a_split_model_may_add_losses(world: Ranks, name: str) -> None:
    assert max(world.run(cut_by_itself, name, ranks=2)) <= 1e-13


def test_code_that_runs_on_every_stage_adds_none() -> None:
    with raises(zb.InputError, "size", "add_loss"):
        zb.split(Stack(adds=True), example=torch.zeros(2, 6))
