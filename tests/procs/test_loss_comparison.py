"""A `loss_fn` that is no mean over samples is warned of, once, on the rank that computes it, and calls for this leave nothing behind."""

from __future__ import annotations

import itertools
import random
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks, alone
from tests.refusals import states
from zerobubble.runtime.step.loss_comparison import LossComparison
from zerobubble.testing import checked_device

M, B, CLASSES = 4, 16, 4
WEIGHTS = torch.tensor([1.0, 5.0, 2.0, 0.5], dtype=torch.float64)
IGNORED = -100


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, torch.where(target == 2, IGNORED, target))


def nt_xent(output: Tensor, _: Tensor) -> Tensor:
    z = nn.functional.normalize(output)
    similar = (z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return nn.functional.cross_entropy(similar, torch.arange(len(z)) ^ 1)


def dice(output: Tensor, target: Tensor) -> Tensor:
    p, t = output.softmax(-1)[:, 1], (target == 1).double()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def of_pairs(output: Tensor, target: Tensor) -> Tensor:
    one, other = output.chunk(2)
    return nn.functional.mse_loss(one, other) + nn.functional.cross_entropy(output, target)


def by_batch_size(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum") / B


def focal(output: Tensor, target: Tensor) -> Tensor:
    """Sums over all samples, and divides by the number of those with class 1, or by 1 if there are none."""
    positive = (target == 1).double()
    p = output[:, 0].sigmoid()
    return -((1 - p).log() * p.square() * (1 - positive) + p.log() * positive).sum() / positive.sum().clamp(min=1)


def num_positive(target: Tensor) -> Tensor:
    return (target == 1).sum()


def over_positive(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the samples with class 1, NaN without any."""
    return nn.functional.cross_entropy(output, torch.where(target == 1, target, IGNORED))


def over_positive_or_0(output: Tensor, target: Tensor) -> Tensor:
    return over_positive(output, target).nan_to_num()


def over_positive_places(output: Tensor, target: Tensor) -> Tensor:
    return over_positive_or_0(output, target) * num_positive(target) / len(target)


def with_positive(*counts: int) -> Tensor:
    """Targets of which so many of each microbatch have class 1, and others class 0."""
    return torch.cat([(torch.arange(B // M) < count).long() for count in counts])


class Centered(nn.Module):
    """Has a buffer that follows the mean of the outputs, and a loss that is no mean."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.center.lerp_(output.detach().mean(0), 0.1)
        return (output.mean(0) - self.center).norm() + nn.functional.cross_entropy(output, target)


NO_MEANS: dict[str, Callable[..., Tensor]] = {
    "weighted": nn.CrossEntropyLoss(weight=WEIGHTS),
    "ignore_index": ignoring,
    "NT-Xent": nt_xent,
    "dice": dice,
    "RMSE": lambda output, target: (output[:, 0] - target).square().mean().sqrt(),
    "pairs": of_pairs,
    "sum": by_batch_size,
    "centered": Centered(),
}


class Average(nn.Module):
    """A mean over samples that follows the mean of the outputs, which it does not use, and keeps its values."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES, dtype=torch.float64))
        self.kept: list[float] = []
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.center.lerp_(output.detach().mean(0), 0.1)
        loss = nn.functional.cross_entropy(output, target)
        self.kept.append(loss.item())
        self.calls += 1
        return loss * 0.5**self.calls


def drawing(draw: Callable[[], float]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: nn.functional.cross_entropy(output, target) * draw()


def of_views(output: Tensor, target: Tensor) -> Tensor:
    one, other = output.chunk(2)
    return nn.functional.mse_loss(one, other) + nn.functional.cross_entropy(one, target)


def of_parts(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["x"] @ output["prototypes"].T / output["temperature"], target)


def of_boxes(output: Tensor, target: list[Tensor]) -> Tensor:
    return sum((output[i] - box).abs().mean() for i, box in enumerate(target)) / len(target)  # type: ignore[return-value]


def of_two_samples(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.view(B // M, -1), target)


def gathering(output: Tensor, target: Tensor) -> Tensor:
    loss = nt_xent(output, target)
    torch.distributed.all_reduce(loss.detach().clone(), group=alone())
    return loss


def in_place(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy((output * 1).div_(2.0), target)


positions = itertools.count(1)
generator = torch.Generator().manual_seed(0)
MEANS: dict[str, Any] = {
    "mean": nn.CrossEntropyLoss(),
    "state": Average(),
    "in place": in_place,
    "torch": drawing(lambda: torch.rand(()).item()),
    "Python": drawing(random.random),
    "generator": drawing(lambda: torch.rand((), generator=generator).item()),
    "iterator": drawing(lambda: float(next(positions))),
    "other batch": of_two_samples,
    "collective": gathering,
}


class Net(nn.Module):
    def __init__(self, form: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, CLASSES, dtype=torch.float64)
        self.prototypes = nn.Parameter(torch.eye(CLASSES, dtype=torch.float64))
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.form = form

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.form == "views":
            return torch.cat([y, y.sin()])
        if self.form == "object":  # as models of Transformers return their own loss
            return SimpleNamespace(logits=y, loss=y.square().mean())
        return {"x": y, "prototypes": self.prototypes, "temperature": self.temperature} if self.form == "parts" else y


def data(seed: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(B, 6, generator=draws, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (B,), generator=draws)


def heard(
    loss_fn: Any, *, form: str = "", steps: int = 8, is_cut: bool = False, targets: Tensor | None = None, **options: Any
) -> list[str]:
    """Runs some steps, also with the same `targets` and on microbatches that the user has cut, and returns the warnings of the loss."""
    with warnings.catch_warnings(record=True) as caught, zb.Pipeline([Net(form)], "gpipe", M, loss_fn, group=alone(), **options) as pipe:
        warnings.simplefilter("always")
        for seed in range(steps):
            x, target = data(seed)
            target = target if targets is None else targets
            boxes = [list(part) for part in x[:, :CLASSES].split(B // M)]
            batch = (list(x.chunk(M)), list(target.chunk(M))) if is_cut else (x, boxes if loss_fn is of_boxes else target)
            pipe.step(*batch)
    return [str(each.message) for each in caught if issubclass(each.category, zb.errors.LossWarning)]


def warned_of(group: Any) -> dict[str, list[str]]:
    return {name: heard(loss_fn) for name, loss_fn in NO_MEANS.items()}


def not_warned_of(group: Any) -> dict[str, list[str]]:
    results = {name: heard(loss_fn) for name, loss_fn in MEANS.items()}
    results |= {"views": heard(of_views, form="views"), "parts": heard(of_parts, form="parts"), "boxes": heard(of_boxes)}
    results["of the model"] = heard(lambda output, target: output.loss, form="object")
    results["weighted"] = heard(NO_MEANS["weighted"], loss_weight=lambda target: WEIGHTS[target].sum())
    results["ignored"] = heard(ignoring, loss_weight=lambda target: (target != 2).sum())
    results["sums"] = heard(by_batch_size, scale="none")
    results["of own microbatches"] = heard(NO_MEANS["weighted"], is_cut=True)
    return results


def test_losses_that_are_no_means_are_warned_of_once(world: Ranks) -> None:
    (found,) = world.run(warned_of, ranks=1)
    assert {name: len(texts) for name, texts in found.items()} == dict.fromkeys(NO_MEANS, 1)
    outputs, targets = Net()(data(0)[0]), data(0)[1]
    first, last = slice(0, B // M), slice(B - B // M, B)
    mean = sum(dice(outputs[part], targets[part]).item() for part in (first, last)) / 2
    both = [*range(B)[first], *range(B)[last]]
    whole = dice(outputs[both], targets[both]).item()
    states(found["dice"][0], f"{whole:.6g}", f"{mean:.6g}", "loss_weight", "num_microbatches")


def test_means_and_what_cannot_be_compared_are_not_warned_of(world: Ranks) -> None:
    (found,) = world.run(not_warned_of, ranks=1)
    assert {name: texts for name, texts in found.items() if texts} == {}


def one_of(count: int, others: int) -> list[tuple[int, ...]]:
    """Counts of which one is different, at each place."""
    return [tuple(count if n == place else others for n in range(M)) for place in range(M)]


def with_counts(group: Any) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Warnings of losses that divide by a count: of those that differ from the loss of the whole batch, and of those that do not."""
    warned = {
        "weight 0": heard(focal, steps=1, targets=with_positive(2, 1, 0, 1), loss_weight=num_positive),
        "floor": heard(focal, targets=with_positive(2, 1, 0, 1), loss_weight=lambda target: num_positive(target).clamp(min=1)),
        "places": heard(over_positive_places, steps=1, targets=with_positive(2, 1, 0, 1), loss_weight=num_positive),
        "next to NaN": heard(over_positive, steps=2, targets=with_positive(2, 1, 0, 1), loss_weight=lambda target: (target == 1).any()),
        "second half": heard(focal, steps=1, targets=with_positive(1, 1, 3, 3)),
    }
    warned |= {f"{counts}": heard(focal, targets=with_positive(*counts)) for counts in one_of(3, 1)}
    warned |= {f"{counts} weighted": heard(focal, targets=with_positive(*counts), loss_weight=num_positive) for counts in one_of(0, 2)}
    others = {
        f"{counts} {loss_fn.__name__}": heard(loss_fn, targets=with_positive(*counts), loss_weight=num_positive)
        for loss_fn in (over_positive, over_positive_or_0)
        for counts in [*one_of(0, 2), (3, 0, 0, 1), (0, 0, 0, 1)]
    }
    others["always some"] = heard(focal, targets=with_positive(2, 1, 3, 1), loss_weight=num_positive)
    return warned, others


def test_a_count_with_a_floor_is_warned_of_wherever_it_is_0(world: Ranks) -> None:
    ((warned, others),) = world.run(with_counts, ranks=1)
    assert {name: len(texts) for name, texts in warned.items()} == dict.fromkeys(warned, 1)
    assert {name: texts for name, texts in others.items() if texts} == {}
    outputs, targets = Net()(data(0)[0]), with_positive(2, 1, 0, 1)
    first, third = slice(0, B // M), slice(2 * B // M, 3 * B // M)
    both = [*range(B)[first], *range(B)[third]]
    whole, kept = focal(outputs[both], targets[both]).item(), focal(outputs[first], targets[first]).item()
    states(warned["weight 0"][0], "0 and 2", f"{whole:.6g}", f"{kept:.6g}", "2 and 0", "scale='none'", "num_microbatches=1")


def trained(compares: bool) -> list[Any]:
    """What a loss with state leaves behind, with the random states after each step."""
    torch.manual_seed(1)
    random.seed(1)
    loss_fn = Average()
    found: list[Any] = []
    with zb.Pipeline([Net()], "zb-h1", M, loss_fn, group=alone()) as pipe:
        if not compares:
            pipe._steps.losses.comparison.is_on = False
        for seed in range(3):
            found += [pipe.step(*data(seed)).item(), torch.rand(()).item(), random.random()]
        found += [
            loss_fn.kept,
            loss_fn.calls,
            loss_fn.center.tolist(),
            [each.grad.tolist() for each in pipe.parameters() if each.grad is not None],
        ]
    return found


def left_behind(group: Any) -> tuple[list[Any], list[Any], int]:
    calls = 0
    compare = LossComparison.finish

    def counting(self: LossComparison) -> None:
        nonlocal calls
        calls += len(self._parts) == 2
        compare(self)

    LossComparison.finish = counting  # type: ignore[method-assign]
    return trained(compares=True), trained(compares=False), calls


def test_comparing_leaves_nothing_behind(world: Ranks) -> None:
    ((with_comparison, without, calls),) = world.run(left_behind, ranks=1)
    assert calls == 2
    assert with_comparison == without


def test_outputs_of_an_accelerator_are_kept_in_host_memory() -> None:
    with checked_device():
        comparison = LossComparison(ignoring, torch.device("cpu"), is_on=True)
        comparison.begin(dict.fromkeys(range(3), 1.0))
        comparison.before_loss()
        for seed in range(3):
            output, target = torch.zeros(B, CLASSES) + torch.arange(CLASSES) * seed, torch.arange(B) % (CLASSES - seed)
            comparison.note(seed, output, target, ignoring(output, target), size=B)
            kept = weakref.ref(output.untyped_storage())
            del output
            assert kept() is None
        assert [part.microbatch for part in comparison._parts] == [0, 2]
        with pytest.warns(zb.errors.LossWarning):
            comparison.finish()


def on_ranks(group: Any, schedule: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)))
    with (
        warnings.catch_warnings(record=True) as caught,
        zb.Pipeline(zb.split(model, example=data(0)[0]), schedule, M, nt_xent, group=group) as pipe,
    ):
        warnings.simplefilter("always")
        for seed in range(3):
            pipe.step(*data(seed))
        warnings.simplefilter("ignore", zb.errors.LossWarning)
    return [str(each.message) for each in caught if issubclass(each.category, zb.errors.LossWarning)]


@pytest.mark.parametrize(("schedule", "last"), [("1f1b", 1), ("zb-v", 0)])
def test_the_rank_of_the_last_stage_warns(world: Ranks, schedule: str, last: int) -> None:
    assert [len(texts) for texts in world.run(on_ranks, schedule, ranks=2)] == [int(rank == last) for rank in range(2)]
