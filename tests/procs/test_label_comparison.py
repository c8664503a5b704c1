"""A model that returns its own loss, a mean over labels that are not ignored, is warned of if weights do not count these labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks, alone
from tests.refusals import states

M, B, T, WORDS = 4, 16, 6, 5
IGNORED = -1


def mean_over_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return mean_over_labels(logits[:, :-1], labels[:, 1:])


def with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    return mean_over_labels(logits, labels) + 0.1 * logits.mean((0, 1)).square().sum()


def over_places(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") / labels.numel()


def over_samples(logits: Tensor, labels: Tensor) -> Tensor:
    of_places = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return (of_places.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)).mean()


def of_relative_places(logits: Tensor, places: Tensor) -> Tensor:
    return (logits.mean(-1) * torch.where(places == IGNORED, 0.5, 1.0) - places / 3).square().mean()


MEANS_OVER_LABELS: dict[str, Callable[..., Tensor]] = {"mean": mean_over_labels, "shifted": shifted, "penalty": with_penalty}
OTHERS: dict[str, Callable[..., Tensor]] = {"places": over_places, "samples": over_samples, "relative": of_relative_places}
FORMS: dict[str, Callable[..., Any]] = {
    "tuple": lambda logits, loss: (logits, loss),
    "object": lambda logits, loss: SimpleNamespace(logits=logits, loss=loss),
    "dict": lambda logits, loss: {"loss": loss, "logits": logits},
}
TAKEN: dict[str, Callable[..., Tensor]] = {
    "tuple": lambda output, _: output[1],
    "object": lambda output, _: output.loss,
    "dict": lambda output, _: output["loss"],
}


class Model(nn.Module):
    """A language model that returns its own loss, with dropout, a counter and a buffer."""

    seen: Tensor

    def __init__(self, loss: Callable[..., Tensor] | None, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, WORDS, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(()))
        self.loss, self.form, self.calls = loss, form, 0

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).tanh()
        self.calls += 1
        logits = self.head(x)
        return FORMS[self.form](logits, logits.mean() if self.loss is None else self.loss(logits, labels))


def batch(seed: int, *, ignores: bool = True, prompts: bool = False) -> tuple[Tensor, Tensor]:
    """With `prompts`, the first half of the samples ignores the first label."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (B, T), generator=draws)
    length = torch.randint(2, T + 1, (B, 1), generator=draws)
    labels = torch.where(torch.arange(T) < length, ids.roll(1, 0), IGNORED) if ignores else ids.clone()
    if prompts:
        labels[: B // 2, 0] = IGNORED
    return ids, labels


def heard(group: Any, loss: Any, form: str, *, loss_fn: Any = None, steps: int = 4, **options: Any) -> tuple[list[str], list[Any]]:
    """The warnings of the loss in some steps, and what these leave behind."""
    given = {"ignores": options.pop("ignores", True), "prompts": options.pop("prompts", False)}
    model = Model(loss, form)
    left: list[Any] = []
    with (
        warnings.catch_warnings(record=True) as caught,
        zb.Pipeline(zb.split(model, example=batch(0)), "gpipe", M, loss_fn or TAKEN[form], group=group, **options) as pipe,
    ):
        warnings.simplefilter("always")
        for seed in range(steps):
            ids, labels = batch(seed, **given)
            left += [pipe.step((ids, labels), labels).item(), torch.rand(()).item(), model.calls]
        left += [parameter.grad.tolist() for parameter in pipe.parameters() if parameter.grad is not None]
    return [str(each.message) for each in caught if issubclass(each.category, zb.errors.LossWarning)], left


def num_labels(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def outside(output: Any, labels: Tensor) -> Tensor:
    """A loss of the loop, on an output that cannot be joined."""
    return mean_over_labels(output.logits, labels)


def cases(group: Any) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    group = alone()
    warned = {f"{name} {form}": heard(group, loss, form)[0] for name, loss in MEANS_OVER_LABELS.items() for form in FORMS}
    warned["outside"] = heard(group, None, "object", loss_fn=outside)[0]
    others = {name: heard(group, loss, "tuple")[0] for name, loss in OTHERS.items()}
    others["weighted"] = heard(group, mean_over_labels, "tuple", loss_weight=num_labels)[0]
    weighted = {"loss_weight": lambda labels: num_labels(labels[:, 1:])}
    others["shifted and weighted"] = heard(group, shifted, "tuple", **weighted)[0]
    others["shifted and weighted, with prompts"] = heard(group, shifted, "tuple", prompts=True, **weighted)[0]
    others["none ignored"] = heard(group, mean_over_labels, "tuple", ignores=False)[0]
    others["summed"] = heard(group, mean_over_labels, "tuple", scale="none")[0]
    return warned, others


def test_a_mean_over_labels_that_a_model_returns_is_warned_of_once(world: Ranks) -> None:
    ((warned, others),) = world.run(cases, ranks=1)
    assert {name: len(texts) for name, texts in warned.items()} == dict.fromkeys(warned, 1)
    assert {name: texts for name, texts in others.items() if texts} == {}
    counts = [int(num_labels(part)) for part in batch(0)[1].chunk(M)][:2]
    states(warned["mean tuple"][0], *map(str, counts), "labels !=", "loss_weight", str(IGNORED))
    states(warned["shifted object"][0], "labels[..., 1:]")


def on_ranks(group: Any) -> tuple[tuple[list[str], list[Any]], tuple[list[str], list[Any]]]:
    found = heard(group, mean_over_labels, "tuple")
    compare = zb.runtime.step.loss_comparison.LossComparison.finish
    zb.runtime.step.loss_comparison.LossComparison.finish = lambda self: self.clear()  # type: ignore[method-assign]
    try:
        return found, heard(group, mean_over_labels, "tuple")
    finally:
        zb.runtime.step.loss_comparison.LossComparison.finish = compare  # type: ignore[method-assign]


def test_the_rank_of_the_last_stage_warns_and_its_calls_leave_nothing_behind(world: Ranks) -> None:
    found = world.run(on_ranks, ranks=2)
    assert [len(compared[0]) for compared, _ in found] == [0, 1]
    assert [compared[1] for compared, _ in found] == [without[1] for _, without in found]
