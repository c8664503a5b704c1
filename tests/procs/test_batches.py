"""Batches of any size and shape, weighted losses, changing numbers of microbatches and gradient scaling match one device."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.refusals import states

PAD = -100


def stages_of(pipe: zb.Pipeline, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    return [build(s, pipe.schedule.num_stages, dtype=dtype) for s in range(pipe.schedule.num_stages)]


def same_gradients(pipe: zb.Pipeline, stages: list[nn.Module], tolerance: float = 0.0) -> bool:
    """Whether this rank's gradients equal those of the one-device stages, by default bit for bit."""
    for index, module in pipe.modules.items():
        for mine, theirs in zip(module.parameters(), stages[index].parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            if (mine.grad - theirs.grad).abs().max() > tolerance:
                return False
    return True


def weighted(stages: list[nn.Module], parts: list[tuple[Tensor, Tensor]], weights: list[float], loss: Any = loss_fn) -> Tensor:
    """The reference: each microbatch in turn, its loss multiplied by its share of the weights."""
    total = torch.zeros((), dtype=torch.float64)
    for (x, y), weight in zip(parts, weights, strict=True):
        share = loss(nn.Sequential(*stages)(x), y) * (weight / sum(weights))
        share.backward()
        total = total + share.detach()
    return total


def cut(inputs: Tensor, targets: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True))


def uneven(group: Any, name: str, samples: int) -> tuple[bool, bool, float, float]:
    """A step and an evaluation with an uneven batch: whether the bits match the reference, and the distance from the whole batch's loss."""
    with zb.Pipeline(build, name, 4, loss_fn, group=group) as pipe:
        stages = stages_of(pipe)
        inputs, targets = (part[:samples] for part in batch(8))
        parts = cut(inputs, targets, 4)
        sizes = [float(len(x)) for x, _ in parts]
        exact = True
        for _ in range(2):
            exact &= bool(pipe.step(inputs, targets) == weighted(stages, parts, sizes))
        whole = loss_fn(nn.Sequential(*stages)(inputs), targets)
        evaluated, outputs = pipe.eval_step(inputs, targets)
        assert evaluated is not None
        if outputs is not None:
            torch.testing.assert_close(outputs, nn.Sequential(*stages)(inputs))
        assert pipe.losses is not None
        each = torch.stack([loss_fn(nn.Sequential(*stages)(x), y) for x, y in parts]).detach()
        return exact, same_gradients(pipe, stages), abs(evaluated - whole).item(), (pipe.losses - each).abs().max().item()


@pytest.mark.parametrize(("name", "samples"), [("1f1b", 7), ("zb-h1", 13), ("zb-v", 5), ("dualpipe", 11)])
def test_a_batch_that_is_no_multiple_has_the_numbers_of_one_device(world: Ranks, name: str, samples: int) -> None:
    for loss, gradients, mean, each in world.run(uneven, name, samples, ranks=2):
        assert loss
        assert gradients or name == "dualpipe"  # which sums the gradients of two copies
        assert max(mean, each) <= 1e-14


def tokens_that_count(target: Tensor) -> Tensor:
    return (target != PAD).sum()


def with_padding(seed: int = 0) -> tuple[Tensor, Tensor]:
    """8 sequences in which only the first tokens count, and none in the last two."""
    inputs, targets = (part.clone() for part in batch(4, seed=seed))
    for row, length in enumerate((5, 3, 1, 2, 4, 5, 0, 0)):
        targets[row, length:] = PAD
    return inputs, targets


def by_tokens(group: Any, name: str) -> tuple[float, float, list[float], float]:
    """The distance of loss and gradients from one device with the whole batch, the losses, and the error of a weighted evaluation."""
    heard: list[tuple[int, float]] = []
    with zb.Pipeline(
        build, name, 4, loss_fn, group=group, loss_weight=tokens_that_count, on_loss=lambda j, loss: heard.append((j, loss.item()))
    ) as pipe:
        stages = stages_of(pipe)
        inputs, targets = with_padding()
        loss = pipe.step(inputs, targets)
        losses = pipe.losses
        assert losses is not None
        expected = loss_fn(nn.Sequential(*stages)(inputs), targets)
        expected.backward()
        worst = max(
            (mine.grad - theirs.grad).abs().max().item()
            for index, module in pipe.modules.items()
            for mine, theirs in zip(module.parameters(), stages[index].parameters(), strict=True)
            if mine.grad is not None and theirs.grad is not None
        )
        if heard:
            torch.testing.assert_close([value for _, value in sorted(heard)], [losses[j].item() for j, _ in sorted(heard)], equal_nan=True)
        evaluated, _ = pipe.eval_step(inputs, targets)
        assert evaluated is not None
        return abs(loss - expected).item(), worst, losses.tolist(), abs(evaluated - expected).item()


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_losses_count_by_their_tokens(world: Ranks, name: str) -> None:
    for loss, gradient, losses, evaluated in world.run(by_tokens, name, ranks=2):
        assert max(loss, gradient, evaluated) <= 1e-14
        assert [math.isnan(value) for value in losses] == [False, False, False, True]


def equal_weights(group: Any) -> bool:
    """Whether equal weights give the same bits as the plain mean."""
    found = []
    for weight in (None, lambda _: 0.3):
        with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, loss_weight=weight) as pipe:
            loss = pipe.step(*batch(4))
            found.append([loss, *(p.grad for p in pipe.parameters())])
            stages = stages_of(pipe)
            assert loss == one_device(stages, 4, *batch(4))
            assert same_gradients(pipe, stages)
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_equal_weights_keep_the_bits_of_the_mean(world: Ranks) -> None:
    assert all(world.run(equal_weights, ranks=2))


def listening(group: Any) -> list[tuple[int, float]]:
    heard: list[tuple[int, float]] = []
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, on_loss=lambda j, loss: heard.append((j, loss.item()))) as pipe:
        pipe.step(*batch(4))
        assert pipe.losses is not None
        assert heard in ([], list(enumerate(pipe.losses.tolist())))
    return heard


def test_on_loss_is_called_on_the_rank_with_the_loss(world: Ranks) -> None:
    first, last = world.run(listening, ranks=2)
    assert first == []
    assert [j for j, _ in last] == [0, 1, 2, 3]


def wrong_weights(group: Any, weights: list[float]) -> str:
    found = iter(weights)
    pipe = zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, loss_weight=lambda _: next(found))
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(4))
    return str(caught.value)


@pytest.mark.parametrize("weights", [[0.0] * 4, [1.0, -1.0, 1.0, 1.0], [1.0, math.nan, 1.0, 1.0]])
def test_weights_that_give_no_mean_are_reported(world: Ranks, weights: list[float]) -> None:
    shown = ", ".join(f"{weight:g}" for weight in weights)
    for text in world.run(wrong_weights, weights, ranks=2):
        states(text, "weights", "microbatches", shown)


def weights_apart(group: Any) -> str:
    """Two last stages whose ranks get targets of different weights."""
    inputs, targets = with_padding()
    if group.rank() == 1:
        targets = targets.clamp(min=0)
    pipe = zb.Pipeline(build, "chimera", 4, loss_fn, group=group, loss_weight=tokens_that_count)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(inputs, targets)
    return str(caught.value)


def test_last_stages_with_other_targets_are_reported(world: Ranks) -> None:
    for text in world.run(weights_apart, ranks=2):
        assert re.search(r"differ on ranks [01] and [01]: (20 and 40|40 and 20) in total", text)


def other_counts(group: Any, schedule: Any, counts: list[int]) -> bool:
    """Steps with different numbers of microbatches, including m < p, and evaluations between them; gradients accumulate over all."""
    with zb.Pipeline(build, schedule, counts[0], loss_fn, group=group) as pipe:
        stages = stages_of(pipe)
        exact = True
        for seed, count in enumerate(counts):
            inputs, targets = batch(count, seed=seed)
            found = None if count == counts[0] else count
            exact &= bool(pipe.step(inputs, targets, num_microbatches=found) == one_device(stages, count, inputs, targets))
            evaluated, _ = pipe.eval_step(inputs, targets, num_microbatches=found)
            assert evaluated is not None
            exact &= abs(evaluated - loss_fn(nn.Sequential(*stages)(inputs), targets)).item() < 1e-14
            pipe.eval_step(*batch(2), num_microbatches=2)
            assert len(pipe.timeline().rows[0]) == len(zb.make(pipe.schedule.name, group.size(), count).rows[0])
        return exact and same_gradients(pipe, stages, 1e-14)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h2", "zb-v", "interleaved-zb", "chimera"])
def test_the_number_of_microbatches_changes_between_steps(world: Ranks, name: str) -> None:
    assert all(world.run(other_counts, name, [4, 2, 8, 4, 1, 2], ranks=4))


def mine(ranks: int, microbatches: int) -> zb.Schedule:
    return zb.make("zb-h1", ranks, microbatches)


def test_a_function_gives_the_schedule_for_any_number(world: Ranks) -> None:
    assert all(world.run(other_counts, mine, [4, 3, 6], ranks=2))


def refuse(group: Any, schedule: Any, call: Callable[[zb.Pipeline, int], object], kind: type[zb.ZeroBubbleError] = zb.PipelineError) -> str:
    pipe = zb.Pipeline(build, schedule, 4, loss_fn, group=group)
    with pytest.raises(kind) as caught:
        call(pipe, group.rank())
    return str(caught.value)


def other_number(pipe: zb.Pipeline, _: int) -> None:
    pipe.step(*batch(2), num_microbatches=2)


def test_a_schedule_alone_has_one_number_of_microbatches(world: Ranks) -> None:
    for text in world.run(refuse, zb.make("1f1b", 2, 4), other_number, zb.InputError, ranks=2):
        states(text, "1f1b", 4, 2)
        states(text, "num_ranks", "num_microbatches", "Schedule")


def misspell(pipe: zb.Pipeline, _: int) -> None:
    try:
        pipe.step(batch(4)[0], target=batch(4)[1])  # type: ignore[call-arg]
    finally:
        pipe.eval_step(*batch(4))  # the pipeline stays open
        pipe.step(*batch(4))


def test_an_unknown_argument_is_wrong_input_as_anywhere(world: Ranks) -> None:
    for text in world.run(refuse, "zb-h1", misspell, zb.InputError, ranks=2):
        states(text, "target", "targets", "Pipeline.step")


def disagree_on_number(pipe: zb.Pipeline, rank: int) -> None:
    pipe.step(*batch(4), num_microbatches=2 if rank == 2 else None)


def disagree_on_method(pipe: zb.Pipeline, rank: int) -> None:
    (pipe.eval_step if rank == 1 else pipe.step)(*batch(4))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (disagree_on_number, "rank 1 begins a training step of 4 microbatches, rank 2 a training step of 2 microbatches"),
        (disagree_on_method, "rank 0 begins a training step of 4 microbatches, rank 1 an evaluation of 4 microbatches"),
    ],
)
def test_ranks_that_begin_different_steps_are_reported(world: Ranks, call: Any, words: str) -> None:
    (text,) = set(world.run(refuse, "zb-h1", call, ranks=3))
    assert words in text


def two_orders(group: Any) -> str:
    def by_rank(ranks: int, microbatches: int) -> zb.Schedule:
        return zb.make("1f1b" if microbatches == 4 or group.rank() else "gpipe", ranks, microbatches)

    return refuse(group, by_rank, other_number)


def test_ranks_whose_function_gives_other_orders_are_reported(world: Ranks) -> None:
    (text,) = set(world.run(two_orders, ranks=2))
    states(text, 2, "microbatches")


LENGTHS = (5, 3, 7, 4)


def by_microbatch(group: Any, name: str) -> tuple[bool, bool]:
    """Microbatches given as a list, with different lengths and sizes, in steps that alternate with whole batches."""
    with zb.Pipeline(build, name, 4, loss_fn, group=group) as pipe:
        stages = stages_of(pipe)
        exact = True
        for turn in range(3):
            parts = [
                tuple(part[: 1 + (j + turn) % 2] for part in batch(1, seed=j, length=length))
                for j, length in enumerate((*LENGTHS[turn:], *LENGTHS[:turn]))
            ]
            loss = pipe.step([x for x, _ in parts], [y for _, y in parts])
            exact &= bool(loss == weighted(stages, parts, [float(len(x)) for x, _ in parts]))
            loss = pipe.step(*batch(4, seed=turn))
            exact &= bool(loss == one_device(stages, 4, *batch(4, seed=turn)))
        _, outputs = pipe.eval_step([x for x, _ in parts])
        if outputs is not None:
            for output, (x, _) in zip(outputs, parts, strict=True):
                torch.testing.assert_close(output, nn.Sequential(*stages)(x))
        return exact, same_gradients(pipe, stages)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_microbatches_may_each_have_a_shape_of_their_own(world: Ranks, name: str) -> None:
    assert world.run(by_microbatch, name, ranks=2) == [(True, True)] * 2


def many_lengths(group: Any, name: str) -> bool:
    """More lengths than there are cached rings, then the first ones again, then more kinds of inputs than are cached."""
    with zb.Pipeline(build, name, 2, loss_fn, group=group) as pipe:
        stages = stages_of(pipe)
        exact = True
        for length in (*range(1, 13), *range(1, 4), 20, *range(21, 80), 1, 20):
            inputs, targets = batch(2, seed=length, length=length)
            exact &= bool(pipe.step(inputs, targets) == one_device(stages, 2, inputs, targets))
        return exact and same_gradients(pipe, stages, 1e-12)


SECOND_ROUTE = zb.Schedule(
    "all on the second route",
    zb.Placement.bidirectional(2),
    2,
    tuple(tuple(map(zb.Op.parse, row.split())) for row in ("1F0 1BW0 1F1 1BW1", "0F0 0F1 0BW0 0BW1")),
    (1, 1),
)
"""A schedule of two routes, of which no microbatch takes the first."""


class Scaled(nn.Module):
    """A stage whose output has a factor for each sample."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.inner(x) * scale[:, None, None]


def on_the_second_route(group: Any) -> list[bool]:
    """Whether steps of several sizes and lengths have one device's gradients, with named arguments split on both ranks."""
    exact = []
    with zb.Pipeline(lambda s, n: Scaled(build(s, n)), SECOND_ROUTE, 2, loss_fn, group=group) as pipe:
        stages = [Scaled(build(s, 2)) for s in range(2)]
        for step, length in enumerate((5, 3, 5, 8)):
            inputs, targets = (part[: 3 + step % 2] for part in batch(2, seed=step, length=length))
            scale = torch.rand(len(inputs), dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            pipe.step(inputs, targets, kwargs={"scale": scale})
            for x, y, own in zip(*(part.tensor_split(2) for part in (inputs, targets, scale)), strict=True):
                (loss_fn(stages[1](stages[0](x, own), own), y) * (len(x) / len(inputs))).backward()
            exact.append(same_gradients(pipe, [stage.inner for stage in stages], 1e-12))
    return exact


def test_steps_begin_where_microbatches_do(world: Ranks) -> None:
    assert world.run(on_the_second_route, ranks=2) == [[True] * 4] * 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.long)])
def test_lengths_change_more_often_than_is_remembered(world: Ranks, name: str) -> None:
    assert all(world.run(many_lengths, name, ranks=2))


def accumulate_unequal(group: Any) -> bool:
    """Two batches of different sizes in one update, each loss weighted by its share, as documented."""
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group) as pipe:
        stages = stages_of(pipe)
        whole = batch(6)
        for start, end in ((0, 8), (8, 12)):
            before = [p.grad for p in pipe.parameters()]
            for parameter in pipe.parameters():
                parameter.grad = None
            pipe.step(*(part[start:end] for part in whole))
            for parameter, grad in zip(pipe.parameters(), before, strict=True):
                assert parameter.grad is not None
                parameter.grad.mul_((end - start) / 12)
                if grad is not None:
                    parameter.grad.add_(grad)
        loss_fn(nn.Sequential(*stages)(whole[0]), whole[1]).backward()
        return same_gradients(pipe, stages, 1e-14)


def test_steps_of_other_sizes_add_up_to_one_batch(world: Ranks) -> None:
    assert all(world.run(accumulate_unequal, ranks=2))


def loud_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return 64 * loss_fn(logits, targets)


def scaled(group: Any, name: str) -> tuple[list[float], list[float], list[float], bool]:
    """30 steps with occasional overflows: scales, losses, one device's scales, and whether all weights are equal bit for bit."""
    make = {"init_scale": 2.0**126, "growth_interval": 4, "enabled": True}

    def single(stage: int, num_stages: int) -> nn.Module:
        return build(stage, num_stages, dtype=torch.float32)

    with zb.Pipeline(single, name, 4, loud_loss, group=group) as pipe:
        stages = stages_of(pipe, torch.float32)
        optimizers = [torch.optim.AdamW(p, lr=1e-2) for p in (pipe.parameters(), nn.ModuleList(stages).parameters())]
        scaler, theirs = (torch.amp.GradScaler(DEVICE.type, **make) for _ in range(2))
        scales, losses, expected = [], [], []
        for step in range(30):
            inputs, targets = batch(4, seed=step)
            losses.append(pipe.step(inputs, targets, scaler=scaler).item())
            pipe.unscale_(scaler, optimizers[0])
            scaler.step(optimizers[0])
            scaler.update()
            scales.append(scaler.get_scale())
            total = 0.0
            for x, y in cut(inputs, targets, 4):
                loss = loud_loss(nn.Sequential(*stages)(x), y) / 4
                theirs.scale(loss).backward()
                total += loss.item()
            theirs.unscale_(optimizers[1])
            theirs.step(optimizers[1])
            theirs.update()
            expected.append(theirs.get_scale())
            assert losses[-1] == pytest.approx(total, rel=1e-6)
            for optimizer in optimizers:
                optimizer.zero_grad()
        pairs = [
            pair for index, module in pipe.modules.items() for pair in zip(module.parameters(), stages[index].parameters(), strict=True)
        ]
        return scales, losses, expected, all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.long), "zb-v"])
def test_scaled_gradients_leave_out_the_steps_that_one_device_leaves_out(world: Ranks, name: str) -> None:
    for scales, losses, expected, same in world.run(scaled, name, ranks=2):
        assert same
        assert scales == expected
        falls = [step for step in range(1, 30) if scales[step] < scales[step - 1]]
        assert len(falls) >= 3, "infinities must occur, and more than once"
        assert max(losses) < 1000, "the loss is reported without the scale"


def only_on_one(group: Any) -> tuple[float, bool]:
    """An infinity only on the last rank; the first rank has nothing to train."""

    def first_frozen(stage: int, num_stages: int) -> nn.Module:
        return build(stage, num_stages).requires_grad_(stage > 0)

    with zb.Pipeline(first_frozen, "zb-h1", 4, loss_fn, group=group) as pipe:
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        pipe.step(*batch(4), scaler=scaler)
        before = [p.detach().clone() for p in pipe.parameters()]
        if group.rank() == 1:
            next(p for p in pipe.parameters()).grad.fill_(math.inf)
        pipe.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), all(torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True))


def test_an_infinity_on_one_rank_is_known_to_all(world: Ranks) -> None:
    assert world.run(only_on_one, ranks=2) == [(4.0, True)] * 2


def scales_apart(group: Any) -> str:
    def call(pipe: zb.Pipeline, rank: int) -> None:
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0 + rank)
        pipe.step(*batch(4), scaler=scaler)
        pipe.unscale_(scaler, torch.optim.SGD(pipe.parameters(), lr=1.0))

    return refuse(group, "1f1b", call)


def test_scalers_that_differ_are_reported(world: Ranks) -> None:
    for text in world.run(scales_apart, ranks=2):
        states(text, "rank 0", 8, "rank 1", 9)


def inference(group: Any, stages_per_rank: int) -> tuple[str, float, bool]:
    """An inference pipeline evaluates, keeps nothing, and raises an error for training that leaves it usable."""
    schedule = zb.make("forward-only", group.size(), 4, stages_per_rank)
    with zb.Pipeline(build, schedule, 4, loss_fn, group=group) as pipe:
        stages = stages_of(pipe)
        inputs, targets = batch(4)
        with pytest.raises(zb.InputError) as caught:
            pipe.step(inputs, targets)
        loss, outputs = pipe.eval_step(inputs, targets)
        assert loss is not None
        expected = nn.Sequential(*stages)(inputs)
        if outputs is not None:
            torch.testing.assert_close(outputs, expected)
        idle = all(span.op.kind is zb.Kind.F for _, span in pipe.timeline().spans())
        return str(caught.value), abs(loss - loss_fn(expected, targets)).item(), idle


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_a_forward_only_schedule_serves_evaluation(world: Ranks, stages_per_rank: int) -> None:
    for text, error, idle in world.run(inference, stages_per_rank, ranks=2):
        states(text, "forward-only", "eval_step")
        assert error <= 1e-14
        assert idle


class Positions(nn.Module):
    """A model with arguments of every kind: with the batch first, second, of size 1, and without one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.double()

    def forward(self, tokens: Tensor, rotary: Tensor, shift: Tensor, mask: Tensor, table: Tensor, scale: Tensor) -> Tensor:
        x = self.embed(tokens) + rotary.sum(0).unsqueeze(-1)  # rotary [3, B, S], shift [1, S], mask [1, 1, S, S], table [S, S]
        for layer in self.layers:
            x = layer((mask[:, 0] * table) @ x).tanh() * scale + shift.unsqueeze(-1)
        return x


def of_every_kind(samples: int) -> dict[str, Tensor]:
    """With three samples, most dimensions have size 3, so only names identify the dimension of the batch."""
    torch.manual_seed(1)
    drawn = {"rotary": (3, samples, 3), "shift": (1, 3), "mask": (1, 1, 3, 3), "table": (3, 3), "scale": ()}
    given = {name: torch.rand(size, dtype=torch.float64) for name, size in drawn.items()}
    return {"tokens": torch.randint(0, 11, (samples, 3)), **given}


BATCH_DIMS = {"rotary": 1, "table": None, "weights": None}


def weighted_mse(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return ((output - target["aims"]).square() * target["weights"]).mean()


def every_kind(group: Any, name: str, samples: int, by_kwargs: tuple[str, ...]) -> tuple[float, list[str]]:
    """The distance of a split model from one device, with some arguments by name on every rank, and gradients that only one side has."""
    model = Positions()
    plain = Positions()
    mine, theirs = of_every_kind(samples), of_every_kind(samples)
    leaves = ("rotary", "shift", "table")
    for leaf in leaves:
        mine[leaf].requires_grad_(leaf not in by_kwargs or group.rank() == 0)
        theirs[leaf].requires_grad_()
    aims = {"aims": torch.rand(samples, 3, 4, dtype=torch.float64), "weights": torch.rand(4, dtype=torch.float64)}
    kwargs = {each: mine[each] for each in by_kwargs}
    inputs = {each: value for each, value in mine.items() if each not in kwargs}
    options = {"loss_fn": weighted_mse, "group": group, "batch_dims": BATCH_DIMS}
    with zb.Pipeline(zb.split(model, example=of_every_kind(2)), name, 3, **options) as pipe:
        loss = pipe.step(inputs, aims, kwargs=kwargs)
        evaluated, _ = pipe.eval_step(inputs, aims, kwargs=kwargs)
        assert evaluated is not None
        expected = weighted_mse(plain(**theirs), aims)
        expected.backward()
        named = [each for module in pipe.modules.values() for each in module.named_parameters()]
        pairs = [(parameter.grad, plain.get_parameter(own).grad) for own, parameter in named]
        if group.rank() == 0:
            pairs += [(mine[leaf].grad, theirs[leaf].grad) for leaf in leaves]
        return max(
            *((a - b).abs().max().item() for a, b in pairs if a is not None and b is not None),
            (loss - expected).abs().item(),
            (evaluated - expected).abs().item(),
        ), [str(place) for place, (a, b) in enumerate(pairs) if (a is None) != (b is None)]


@pytest.mark.parametrize("by_kwargs", [(), ("rotary", "shift", "mask", "table", "scale")])
@pytest.mark.parametrize(("name", "samples"), [("1f1b", 3), ("zb-v", 7)])
def test_arguments_have_the_batch_in_any_dimension_or_none(world: Ranks, name: str, samples: int, by_kwargs: tuple[str, ...]) -> None:
    for error, one_sided in world.run(every_kind, name, samples, by_kwargs, ranks=2):
        assert error <= 1e-14
        assert not one_sided


def wrong_dims(group: Any, inputs: dict[str, Tensor], kwargs: dict[str, Tensor], batch_dims: dict[str, int | None]) -> str:
    with zb.Pipeline(zb.split(Positions(), example=of_every_kind(2)), "1f1b", 3, weighted_mse, group=group, batch_dims=batch_dims) as pipe:
        with pytest.raises(zb.PipelineError if kwargs else zb.InputError) as caught:
            pipe.step(inputs, {"aims": torch.rand(6, 3, 4)}, kwargs=kwargs if group.rank() == 1 else None)
        return str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "batch_dims", "words"),
    [
        ({}, {}, "must share their batch size, got [3, 6]"),
        ({}, {"rotary": 1}, "must share their batch size, got [3, 6]"),
        ({}, {"rotary": 3, "table": None}, "gives 'rotary' the batch dimension 3, counted from 0, which its shape (3, 6, 3)"),
        ({}, dict.fromkeys(of_every_kind(1)), "got no tensor with a batch"),
        ({"rotary": torch.ones(3, 4, 3)}, BATCH_DIMS, "its shape is (3, 4, 3) and the batch has 6 samples"),
        ({"others": torch.ones(1)}, BATCH_DIMS, "gives 'others' to stage 1 and not to the first stage"),
    ],
)
def test_dimensions_that_do_not_have_the_batch_are_refused(
    world: Ranks, kwargs: dict[str, Tensor], batch_dims: dict[str, int | None], words: str
) -> None:
    for text in world.run(wrong_dims, of_every_kind(6), kwargs, batch_dims, ranks=2):
        assert words in text


class Compared:
    """An object whose comparison is elementwise, as that of its tensor."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __eq__(self, other: object) -> Any:
        return self.logits == other.logits if isinstance(other, Compared) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class GivesObjects(nn.Module):
    """A last stage whose output contains objects other than tensors."""

    def forward(self, x: Tensor) -> Any:
        return {
            "logits": x,
            "array": x.detach().cpu().numpy(),
            "one number": x.detach().sum().reshape(1).cpu().numpy(),
            "namespace": SimpleNamespace(logits=x),
            "compared": Compared(x),
            "size": x.shape,
            "nan": math.nan,
            "name": "last",
            "shared": ONE_OBJECT,
            "rows": (len(x), None),
        }


ONE_OBJECT = SimpleNamespace(pad=PAD)


def outputs_of_any_class(group: Any) -> Any:
    """The outputs of an evaluation with microbatches of 2 and 1 samples, and with two equal ones."""
    with zb.Pipeline(lambda s, _: nn.Linear(2, 2) if s == 0 else GivesObjects(), "1f1b", 2, loss_fn, group=group) as pipe:
        uneven = pipe.eval_step(torch.ones(3, 2))[1]
        alike = pipe.eval_step(torch.ones(2, 2))[1]
        return None if uneven is None else (uneven, alike)


def test_outputs_of_any_class_are_joined_or_listed(world: Ranks) -> None:
    first, (uneven, alike) = world.run(outputs_of_any_class, ranks=2)
    assert first is None
    assert [len(uneven["logits"]), len(alike["logits"])] == [3, 2]
    for name in ("array", "one number"):
        assert [type(one) for found in (uneven, alike) for one in found[name]] == [np.ndarray] * 4
    assert [type(one) for found in (uneven, alike) for one in found["namespace"]] == [SimpleNamespace] * 4
    assert [type(one) for found in (uneven, alike) for one in found["compared"]] == [Compared] * 4
    assert uneven["size"] == [torch.Size([2, 2]), torch.Size([1, 2])]
    assert alike["size"] == torch.Size([1, 2])
    assert math.isnan(uneven["nan"])
    assert uneven["name"] == "last"
    assert uneven["shared"].pad == PAD
    assert [uneven["rows"], alike["rows"]] == [([2, 1], None), (1, None)]


class GivesLayouts(nn.Module):
    """A last stage with outputs whose batch is in other dimensions."""

    def forward(self, x: Tensor) -> Any:
        n = len(x)
        return {
            "second": x.expand(7, n, 2),
            "third": x.T.expand(5, 2, n),
            "tokens": x.repeat_interleave(3, 0)[:, :1],
            "selected": x[x[:, 0] > 0],
            "statistics": x.sum(0).repeat(3)[:5],
            "either": x.repeat(3, 1)[:, None].expand(-1, n, -1),
        }


def outputs_of_layouts(group: Any, size: int, dims: dict[str, int | None] | None = None) -> Any:
    x = torch.linspace(-1, 1, 2 * size, dtype=torch.float64).view(size, 2)
    with zb.Pipeline(lambda s, _: nn.Identity() if s == 0 else GivesLayouts(), "1f1b", 2, loss_fn, group=group, batch_dims=dims) as pipe:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, joined = pipe.eval_step(x)
        return joined, GivesLayouts()(x), [str(warning.message) for warning in caught if "dimension" in str(warning.message)]


@pytest.mark.parametrize("size", [5, 8])
def test_outputs_are_joined_along_their_batch(world: Ranks, size: int) -> None:
    _, (joined, whole, warned) = world.run(outputs_of_layouts, size, ranks=2)
    for name in ("second", "third", "tokens", "selected"):
        assert torch.equal(joined[name], whole[name]), name
    assert [type(joined[name]) for name in ("statistics", "either")] == [list, list]
    assert len(warned) == 1


def test_outputs_are_joined_along_the_dimension_named(world: Ranks) -> None:
    _, (joined, whole, warned) = world.run(outputs_of_layouts, 4, {"outputs": 1}, ranks=2)
    assert torch.equal(joined["tokens"], whole["tokens"])
    assert [joined[name].shape for name in ("second", "either")] == [whole["second"].shape, (6, 4, 2)]
    assert not warned


def test_outputs_are_joined_along_the_first_dimension_if_it_is_named(world: Ranks) -> None:
    _, (joined, whole, warned) = world.run(outputs_of_layouts, 4, {"outputs": 0}, ranks=2)
    assert [joined[name].shape for name in ("second", "either")] == [whole["second"].shape, (12, 2, 2)]
    assert not warned


def test_the_program_of_the_documentation_runs(tmp_path: Path) -> None:
    printed = run_forked(programs_of("docs/batches.md")[0], tmp_path, 2)
    assert [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)] == pytest.approx([4, 4, 4], abs=0.5)


class OfViews(nn.Module):
    """A model whose only argument is a list of views of the samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))

    def forward(self, views: list[Tensor]) -> Tensor:
        x = sum(self.layers[0](view) for view in views)
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return x


def of_views(group: Any, schedule: str) -> tuple[str, float, float]:
    """The error for as many views as microbatches, and the losses of both remedies, for 4 views of 8 samples."""
    draws = torch.Generator().manual_seed(0)
    views = list(torch.randn(4, 8, 4, generator=draws, dtype=torch.float64))
    target = torch.randn(8, 4, generator=draws, dtype=torch.float64)
    with zb.Pipeline(zb.split(OfViews(), example=(views,)), schedule, 4, nn.functional.mse_loss, group=group) as pipe:
        with pytest.raises(zb.InputError) as caught:
            pipe.step(views, target)
        as_tuple = pipe.step((views,), target)
        parts = [([view[part] for view in views],) for part in torch.arange(8).chunk(4)]
        return str(caught.value), as_tuple.item(), pipe.step(parts, list(target.chunk(4))).item()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_as_many_views_as_microbatches_are_no_microbatches(world: Ranks, schedule: str) -> None:
    draws = torch.Generator().manual_seed(0)
    views = list(torch.randn(4, 8, 4, generator=draws, dtype=torch.float64))
    expected = nn.functional.mse_loss(OfViews()(views), torch.randn(8, 4, generator=draws, dtype=torch.float64)).item()
    for text, *losses in world.run(of_views, schedule, ranks=2):
        states(text, 4, 8, "(views,)")
        assert losses == pytest.approx([expected, expected], rel=1e-12)
