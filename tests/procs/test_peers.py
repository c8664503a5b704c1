"""Ordinary models that other pipelines get silently wrong or reject without a clear error: correct results or one clear error here.

Other files cover further silent errors elsewhere: orders of messages (`test_lower`), sends swapped in a file
(`test_torch_runtime`), and splits of many kinds of modules (`test_split_matrix`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import batch, build, gradient_error, loss_fn, one_device
from tests.procs.ranks import Ranks, alone
from tests.procs.test_pipeline import evaluate, same_as_one_device
from tests.refusals import states
from tests.thinned import every_of

SPLITTING = ["zb-h1", "zb-v", "interleaved-zb"]


class FrozenBefore:
    """Stages before `first` do not train, so that nothing at the input of stage `first` needs a gradient."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        return build(stage, num_stages).requires_grad_(stage >= self.first)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "first"), every_of(5, ["1f1b", *SPLITTING], [1, 2, 3]))
def test_stages_train_behind_frozen_ones(world: Ranks, name: str, first: int) -> None:
    for worst in world.run(same_as_one_device, FrozenBefore(first), name, ranks=4):
        assert worst <= 1e-13


class Prompted(nn.Module):
    """A stage whose second output comes from a parameter alone, and reaches the loss in the next stages."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = build(stage, num_stages)
        torch.manual_seed(stage)
        self.prompt = nn.Linear(6, 6).double()
        self.start = nn.Parameter(torch.randn(1, 1, 6).double())
        self.last = stage == num_stages - 1

    def forward(self, x: Tensor, prompt: Tensor | None = None) -> Any:
        if prompt is not None:
            x = x + prompt
        y = self.inner(x)
        return y if self.last else (y, self.prompt(self.start))


@pytest.mark.parametrize("name", SPLITTING)
def test_parameters_apart_from_the_input_train(world: Ranks, name: str) -> None:
    for worst in world.run(same_as_one_device, Prompted, name, ranks=2):
        assert worst <= 1e-13


OUT_OF_ORDER = """zerobubble schedule 1
name out-of-order
placement custom: 0 1
microbatches 4
rank 0: 0F0 0F1 0F2 0F3 0B2 0B0 0W2 0B3 0B1 0W0 0W1 0W3
rank 1: 1F2 1F0 1B2 1B0 1F3 1W2 1F1 1B3 1W0 1B1 1W3 1W1
"""


def out_of_order(group: Any) -> tuple[float, Tensor | None, Tensor]:
    """The largest error of gradients and loss, the outputs of an evaluation on the last rank, and those of one device."""
    with zb.Pipeline(build, zb.Schedule.from_text(OUT_OF_ORDER), 4, loss_fn, group=group) as pipe:
        stages = [build(s, 2) for s in range(2)]
        inputs, targets = batch(4)
        worst = abs(pipe.step(inputs, targets) - one_device(stages, 4, inputs, targets)).item()
        worst = max(worst, gradient_error(pipe, stages))
        _, outputs = pipe.eval_step(inputs)
        return worst, outputs, nn.Sequential(*stages)(inputs).detach()


def test_forwards_out_of_order_on_the_last_stage_keep_their_own_losses(world: Ranks) -> None:
    (first, none, _), (last, outputs, expected) = world.run(out_of_order, ranks=2)
    assert max(first, last) <= 1e-13
    assert none is None
    torch.testing.assert_close(outputs, expected)


def test_a_bidirectional_v_evaluates_before_it_trains(world: Ranks) -> None:
    results = world.run(evaluate, "dualpipe-v", ranks=2)
    for loss, _, expected, _, kept in results:
        assert loss == pytest.approx(expected, rel=1e-12)
        assert kept
    assert [shape for _, _, _, shape, _ in results] == [[8, 5, 11], None]


def accumulated(group: Any, name: str) -> float:
    """The distance between the gradients of three equal steps and three times those of one."""
    with zb.Pipeline(build, name, 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        once = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        pipe.step(*batch(4))
        pipe.step(*batch(4))
        thrice = [p.grad for p in pipe.parameters() if p.grad is not None]
        return max(((a - 3 * b).norm() / b.norm()).item() for a, b in zip(thrice, once, strict=True))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_gradients_add_up_over_steps(world: Ranks, name: str) -> None:
    assert max(world.run(accumulated, name, ranks=2)) <= 1e-14


class Counted(nn.Module):
    """A stage with batch statistics, which counts its forwards and the calls of a hook on its input."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = build(stage, num_stages)
        self.statistics = nn.BatchNorm1d(5).double()
        self.last = stage == num_stages - 1
        self.forwards = self.hooked = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if x.requires_grad:
            x.register_hook(self._count)
        y: Tensor = self.inner(x)
        return y if self.last else self.statistics(y)

    def _count(self, _: Tensor) -> None:
        self.hooked += 1


def first_steps(group: Any, name: str) -> tuple[list[tuple[int, int, int]], float]:
    """Per step (forwards, hook calls, batches in the statistics) of this rank's stages, and the error of their statistics."""
    counts = []
    with zb.Pipeline(Counted, name, 4, loss_fn, group=group) as pipe:
        stages: list[nn.Module] = [Counted(s, 2) for s in range(2)]
        for step in range(3):
            pipe.step(*batch(4, seed=step))
            one_device(stages, 4, *batch(4, seed=step))
            (module,) = pipe.modules.values()
            counts.append((module.forwards, module.hooked, int(module.statistics.num_batches_tracked)))
        ((index, module),) = pipe.modules.items()
        pairs = zip(module.buffers(), stages[index].buffers(), strict=True)
        return counts, max((mine.double() - theirs.double()).abs().max().item() for mine, theirs in pairs)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_every_step_runs_each_microbatch_once_from_the_first_on(world: Ranks, name: str) -> None:
    (first, first_error), (last, last_error) = world.run(first_steps, name, ranks=2)
    assert first == [(4, 0, 4), (8, 0, 8), (12, 0, 12)]
    assert last == [(4, 4, 0), (8, 8, 0), (12, 12, 0)]
    assert max(first_error, last_error) <= 1e-15


def averaging(group: Any, name: str) -> str:
    def wrapped(stage: int, num_stages: int) -> nn.Module:
        return nn.parallel.DistributedDataParallel(build(stage, num_stages), process_group=alone())

    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(wrapped, name, 4, loss_fn, group=group)
    return str(caught.value)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_module_that_averages_gradients_itself_is_refused(world: Ranks, name: str) -> None:
    for rank, text in enumerate(world.run(averaging, name, ranks=2)):
        assert f"stage {rank} holds a DistributedDataParallel" in text
        states(text, "group", "average")


def shapes_change(group: Any, name: str) -> float:
    """The largest error over steps with other lengths and batch sizes, longer ones after shorter ones."""
    worst = 0.0
    with zb.Pipeline(build, name, 4, loss_fn, group=group) as pipe:
        stages = [build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for step, (length, copies) in enumerate([(3, 1), (7, 1), (5, 3), (3, 1)]):
            inputs, targets = (part.repeat(copies, 1) for part in batch(4, seed=step, length=length))
            worst = max(worst, abs(pipe.step(inputs, targets) - one_device(stages, 4, inputs, targets)).item())
        return max(worst, gradient_error(pipe, stages))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_lengths_and_batch_sizes_may_change_from_step_to_step(world: Ranks, name: str) -> None:
    assert max(world.run(shapes_change, name, ranks=2)) <= 1e-13


class Spoilt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * math.nan


def not_a_number(group: Any) -> float:
    with zb.Pipeline(
        lambda s, n: nn.Sequential(build(s, n), Spoilt()) if s == 0 else build(s, n), "zb-h1", 4, loss_fn, group=group
    ) as pipe:
        return pipe.step(*batch(4)).item()


def test_nan_reaches_the_loss_of_every_rank(world: Ranks) -> None:
    assert all(math.isnan(loss) for loss in world.run(not_a_number, ranks=2))


class Narrow(nn.Module):
    """Expects another width than the previous stage returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x}


class Odd(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": {x}}


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class Unsteady(nn.Module):
    """Its output has one token less in its second step."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls <= 4 else x[:, :-1]


class Wrong(NamedTuple):
    """A faulty step on three ranks, and parts of its error on every rank."""

    words: tuple[str, ...]
    behind: Callable[[], nn.Module] = nn.Identity
    """What stands behind stage 0."""
    front: Callable[[], nn.Module] = nn.Identity
    """What stands in front of stage 1."""
    data: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]] = lambda inputs, targets: (inputs, targets)
    reduction: str = "mean"
    weight: Callable[[Tensor], Tensor] | None = None


WRONG = {
    "another width": Wrong(
        (
            "rank 1 failed at 'run 1F0' (F of stage 1, microbatch 0): RuntimeError: ",
            "mat1 and mat2 shapes cannot be",
            "stage 1 was given (2, 5, 6) float64 by stage 0",
        ),
        front=Narrow,
    ),
    "a name between stages that the next does not take": Wrong(
        (
            "rank 1 failed at 'run 1F0' (F of stage 1, microbatch 0): TypeError",
            "argument 'hidden'",
            "stage 1 was given a dict of 'hidden': (2, 5, 6) float64 by stage 0",
        ),
        Named,
    ),
    "an object between stages": Wrong(
        ("rank 0 failed at 'run 0F0' (F of stage 0, microbatch 0): TypeError: the output of stage 0['hidden'] is a set",),
        Odd,
    ),
    "its input changed in place": Wrong(
        (
            "rank 1 failed at 'run 1F0' (F of stage 1, microbatch 0): RuntimeError",
            "a leaf Variable that requires grad",
            "let it work on x.clone()",
        ),
        front=InPlace,
    ),
    "another shape in the second step": Wrong(
        ("rank 1 failed at", "the activation of stage 1, microbatch 0 is (2, 4, 6) float64, but was (2, 5, 6) float64", "pad it"),
        front=Unsteady,
    ),
    "no targets": Wrong(
        ("rank 2 failed before its first pass", "targets are missing", "rank 2 holds the last stage", "pipe.eval_step(x)"),
        data=lambda x, _: (x, None),
    ),
    "no inputs": Wrong(("rank 0: inputs are missing", "rank 0 holds the first stage"), data=lambda _, y: (None, y)),
    "too few sequences": Wrong(("rank 0", "rank 2", "batch size 3", "4 microbatches"), data=lambda x, y: (x[:3], y[:3])),
    "targets of another length": Wrong(
        ("rank 2 failed at 'run 2F0' (F of stage 2, microbatch 0): ValueError", "output=(2, 5, 11) float64", "target=(2, 4) int64"),
        data=lambda x, y: (x, y[:, 1:]),
    ),
    "a weight of what targets do not have": Wrong(
        ("rank 2 failed before its first pass: IndexError", "loss_weight", "target=(2, 5) int64"),
        weight=lambda target: target[:, :, 0].sum(),
    ),
    "a loss for each token": Wrong(
        ("rank 2 failed at 'run 2F0' (F of stage 2, microbatch 0)", "loss_fn must return a tensor with one element"), reduction="none"
    ),
}


def go_wrong(group: Any, key: str) -> str:
    """The error of two steps in which something is wrong as `WRONG[key]` says."""
    wrong = WRONG[key]

    def make_stage(stage: int, num_stages: int) -> nn.Module:
        around = {0: (nn.Identity, wrong.behind), 1: (wrong.front, nn.Identity)}
        front, behind = around.get(stage, (nn.Identity, nn.Identity))
        return nn.Sequential(front(), build(stage, num_stages), behind())

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=wrong.reduction)

    def train(pipe: zb.Pipeline) -> None:
        pipe.step(*wrong.data(*batch(4)))
        pipe.step(*wrong.data(*batch(4)))

    pipeline = zb.Pipeline(make_stage, "zb-h1", 4, loss, loss_weight=wrong.weight, group=group)
    with pipeline as pipe, pytest.raises((zb.InputError, zb.PipelineError)) as caught:
        train(pipe)
    return str(caught.value)


@pytest.mark.sweep
@pytest.mark.parametrize("key", WRONG)
def test_what_is_wrong_is_reported_in_the_same_words_on_every_rank(world: Ranks, key: str) -> None:
    (text,) = set(world.run(go_wrong, key, ranks=3))
    assert all(words in text for words in WRONG[key].words), text


def unlike(group: Any) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "zb-h1", 4 + 2 * torch.distributed.get_rank(group), loss_fn, group=group)
    return str(caught.value)


def test_different_numbers_of_microbatches_are_reported(world: Ranks) -> None:
    for text in world.run(unlike, ranks=2):
        assert text.endswith("rank 0 has zb-h1 of 4 microbatches, rank 1 has zb-h1 of 6 microbatches")


class Remembering(nn.Module):
    """Puts what it remembers through a Linear, and changes the memory in place with the next microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.register_buffer("memory", torch.zeros(6).double())

    def forward(self, x: Tensor) -> Tensor:
        self.memory.add_(x.detach().mean((0, 1)))
        y: Tensor = x + self.linear(self.memory)
        return y


AFTER_B = """zerobubble schedule 1
name b-f-w
placement custom: 0 1
microbatches 2
rank 0: 0F0 0F1 0B0 0B1 0W0 0W1
rank 1: 1F0 1B0 1F1 1W0 1B1 1W1
"""


def change_what_waits(group: Any) -> str:
    def make_stage(stage: int, num_stages: int) -> nn.Module:
        return nn.Sequential(Remembering(), build(stage, num_stages)) if stage == 1 else build(stage, num_stages)

    pipe = zb.Pipeline(make_stage, zb.Schedule.from_text(AFTER_B), 2, loss_fn, group=group)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(2))
    return str(caught.value)


def test_a_tensor_changed_between_b_and_w_is_reported(world: Ranks) -> None:
    (text,) = set(world.run(change_what_waits, ranks=2))
    states(text, "rank 1", "'run 1W0'", "InputError", "(1, 6)")
    states(text, "x.clone()", "layer")
