"""Finds out how a number of a batch follows from those of its microbatches: as a sum, or as a mean over samples, labels or tokens.

A loss function of the user does not say what it divides by. A few samples of the batch answer: the number of all of them together equals a
weighted sum of the numbers of each alone, and only the right weights give it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""The label that losses of PyTorch ignore by default."""
OFTEN_IGNORED = (IGNORED, -1)
"""The labels that losses often ignore, by `ignore_index`."""
MOST_SAMPLES = 4
"""The number of samples that a probe compares, without those with the largest and smallest labels."""


class Rule(NamedTuple):
    """How the number of a batch follows from those of its parts.

    Attributes:
        name: The rule in words.
        divisor: Returns what the mean of a part divides by, up to a factor; None for a sum.
    """

    name: str
    divisor: Callable[[Mapping[str, Any]], float] | None

    def shares(self, parts: Sequence[Mapping[str, Any]]) -> list[float]:
        """Returns the factor of the number of each part in that of the batch."""
        return shares_of([None if self.divisor is None else float(self.divisor(part)) for part in parts])


def shares_of(divisors: Sequence[float | None]) -> list[float]:
    """Returns the factor of each part in a sum, whose parts have no divisor, or in a mean."""
    counts = [count for count in divisors if count is not None]
    if not counts:
        return [1.0] * len(divisors)
    total = sum(counts)
    return [count / total for count in counts] if total else [1 / len(counts)] * len(counts)


SUM = Rule("a sum", None)


def rules_of(
    inputs: Mapping[str, Any], num_samples: Callable[[Mapping[str, Any]], int], *, shifts: bool, ignored: Sequence[int] = OFTEN_IGNORED
) -> list[Rule]:
    """Lists the rules that may apply to batches with these names, the likeliest first.

    Args:
        inputs: A batch.
        num_samples: Returns the number of samples of a batch.
        shifts: Whether the model predicts the next token, so that the first label of a sequence does not count.
        ignored: The labels that a loss may ignore.
    """
    labels = [_labels("shift_labels", 0, IGNORED)] if isinstance(inputs.get("shift_labels"), Tensor) else []
    if isinstance(inputs.get("labels"), Tensor):
        firsts = sorted((0, 1), key=lambda first: bool(first) != shifts)
        labels += [_labels("labels", first, value) for value in ignored for first in firsts]
    mask = [_tokens(first) for first in (0, 1)] if isinstance(inputs.get("attention_mask"), Tensor) else []
    return [SUM, *labels, Rule("a mean over samples", num_samples), *mask]


def _labels(name: str, first: int, ignored: int) -> Rule:
    words = f"a mean over {name} other than {ignored}" + (", without the first of each sequence" if first else "")
    return Rule(words, lambda inputs: int(_after(inputs[name], first).ne(ignored).sum()))


def _tokens(first: int) -> Rule:
    words = "a mean over the tokens of attention_mask" + (", without the first of each sequence" if first else "")
    return Rule(words, lambda inputs: int(_after(inputs["attention_mask"], first).ne(0).sum()))


def _after(tensor: Tensor, first: int) -> Tensor:
    return tensor[..., first:] if tensor.ndim > 1 else tensor


def extremes(batch: Mapping[str, Any], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Returns the smallest and the largest of the labels of a batch by name, where a sample has one class or position as its label.

    Losses may ignore one of these, such as the position after the last token, for an answer outside of the text.
    """
    labels = {name: batch[name] for name in names if isinstance(batch.get(name), Tensor)}
    return {name: (int(of.min()), int(of.max())) for name, of in labels.items() if of.ndim == 1 and of.numel() and of.dtype == torch.int64}


def telling_samples(samples: Sequence[Mapping[str, Any]], rules: Iterable[Rule], labels: Iterable[str] = ()) -> list[int]:
    """Returns the indices of a few samples in which the counts of the rules differ most, and of those with extreme `labels`."""
    chosen: dict[int, None] = {}
    values = [[float(sample[name]) for sample in samples] for name in labels]
    for counts in (*values, *([rule.divisor(sample) for sample in samples] for rule in rules if rule.divisor is not None)):
        chosen |= dict.fromkeys((counts.index(max(counts)), counts.index(min(counts))))
    chosen |= dict.fromkeys(range(len(samples)))
    return sorted(list(chosen)[: MOST_SAMPLES + 2 * len(values)])


def with_other_labels(
    samples: Mapping[str, Any], batch: Mapping[str, Any], names: Sequence[str], num_classes: int
) -> dict[str, Any] | None:
    """Returns samples of a batch with random classes as labels, so that weights of classes show; None if the labels are not classes.

    The classes are the labels of the batch, and all of `num_classes` if the labels are not others. Negative labels stay.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    changed = dict(samples)
    for name in names:
        labels, of_batch = samples.get(name), batch.get(name)
        if not isinstance(labels, Tensor) or not isinstance(of_batch, Tensor) or labels.dtype not in (torch.int64, torch.int32):
            return None
        classes = torch.unique(of_batch[of_batch >= 0]).cpu()
        if not len(classes):
            return None
        has_row_per_class = labels.ndim > 1 and labels.shape[1] == num_classes and int(classes.max()) <= 1
        legal = torch.arange(num_classes) if int(classes.max()) < num_classes and not has_row_per_class else classes
        random = legal[torch.randint(len(legal), labels.shape, generator=generator, device="cpu")].to(labels)
        changed[name] = torch.where(labels < 0, labels, random)
    return changed if names else None


class Comparison(NamedTuple):
    """The numbers of samples alone and of all of them together.

    Attributes:
        group: The number of the samples' group in a probe.
        numbers: By name, the numbers of each sample alone, and then of all.
        tolerance: The relative difference that rounding explains.
        sums: Whether it holds for sums only, or for means only; None for both.
    """

    group: int
    numbers: Sequence[Mapping[str, float]]
    tolerance: float
    sums: bool | None = None

    def of(self, name: str) -> tuple[list[float], float]:
        """Returns the numbers of each sample alone, and of all of them."""
        *alone, whole = (numbers.get(name, 0.0) for numbers in self.numbers)
        return alone, whole

    def fits(self, rule: Rule, name: str, samples: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether a rule makes the number of all `samples` of the others. One without weight does not count, even if it is NaN."""
        if self.sums not in (None, rule.divisor is None):
            return True
        alone, whole = self.of(name)
        terms = [share * number for share, number in zip(rule.shares(samples), alone, strict=True) if share]
        return are_near(sum(terms), whole, self.tolerance, terms)


def are_near(value: float, whole: float, tolerance: float, sizes: Sequence[float]) -> bool:
    """Returns whether the difference of two numbers is rounding of terms of these sizes. NaN equals NaN, and infinity itself."""
    if not (math.isfinite(value) and math.isfinite(whole)):
        return value == whole or (math.isnan(value) and math.isnan(whole))
    return abs(value - whole) <= tolerance * max(abs(whole), *map(abs, sizes), 0.0)


def differ(rules: Sequence[Rule], parts: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the rules give the parts different shares."""
    return shares_differ([rule.shares(parts) for rule in rules])


def shares_differ(shares: Sequence[Sequence[float]]) -> bool:
    """Returns whether several rules give parts different shares."""
    return any(abs(a - b) > 1e-12 for other in shares[1:] for a, b in zip(other, shares[0], strict=True))
