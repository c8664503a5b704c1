"""Finds out how a number of a batch follows from those of its microbatches: as a sum, or as a mean over samples, labels or tokens.

A loss function of the user does not say what it divides by. A few samples of the batch answer: the number of all of them together equals a
weighted sum of the numbers of each alone, and only the right weights give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

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
        if self.divisor is None:
            return [1.0] * len(parts)
        counts = [float(self.divisor(part)) for part in parts]
        total = sum(counts)
        return [count / total for count in counts] if total else [1 / len(parts)] * len(parts)


SUM = Rule("a sum", None)


def rules_of(inputs: Mapping[str, Any], num_samples: Callable[[Mapping[str, Any]], int], *, shifts: bool) -> list[Rule]:
    """Lists the rules that may apply to batches with these names, the likeliest first.

    Args:
        inputs: A batch.
        num_samples: Returns the number of samples of a batch.
        shifts: Whether the model predicts the next token, so that the first label of a sequence does not count.
    """
    labels = [_labels("shift_labels", 0)] if isinstance(inputs.get("shift_labels"), Tensor) else []
    if isinstance(inputs.get("labels"), Tensor):
        labels += sorted((_labels("labels", first) for first in (0, 1)), key=lambda rule: ("first" in rule.name) != shifts)
    mask = [_tokens(first) for first in (0, 1)] if isinstance(inputs.get("attention_mask"), Tensor) else []
    return [SUM, *labels, Rule("a mean over samples", num_samples), *mask]


def _labels(name: str, first: int) -> Rule:
    words = f"a mean over {name} other than -100" + (", without the first of each sequence" if first else "")
    return Rule(words, lambda inputs: int(_after(inputs[name], first).ne(-100).sum()))


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


def with_other_labels(batch: Mapping[str, Any], names: Sequence[str], num_classes: int) -> dict[str, Any] | None:
    """Returns the batch with random classes as labels, so that weights of classes show; None if the labels are not classes."""
    generator = torch.Generator("cpu").manual_seed(0)
    changed = dict(batch)
    for name in names:
        labels = batch.get(name)
        if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32) or not labels.numel():
            return None
        classes = max(num_classes, int(labels.max()) + 1)
        random = torch.randint(classes, labels.shape, generator=generator, device="cpu").to(labels)
        changed[name] = torch.where(labels < 0, labels, random)
    return changed if names else None


def with_varied_scales(output: Any, samples: Sequence[int]) -> Any:
    """Returns the output of a model with the numbers of each sample scaled differently: a fresh model gives all samples like losses."""

    def scaled(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.ndim or tensor.shape[0] != len(samples):
            return tensor
        rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
        sizes = rows.abs().amax(1).clamp(min=1e-6)
        factors = torch.tensor([2.0 * (1 + sample) for sample in samples]).to(tensor) / sizes
        return tensor * factors.view(-1, *[1] * (tensor.ndim - 1))

    return pytree.tree_map_only(Tensor, scaled, output)


def fits(rule: Rule, parts: Sequence[Mapping[str, Any]], numbers: Sequence[float], whole: float, tolerance: float) -> bool:
    """Returns whether a rule makes `whole` of the numbers of the parts. A part without weight does not count, even if its number is NaN."""
    shares = rule.shares(parts)
    terms = [share * number for share, number in zip(shares, numbers, strict=True) if share]
    size = max([abs(whole), *map(abs, terms)])
    return abs(sum(terms) - whole) <= tolerance * size or (whole != whole and any(term != term for term in terms))


def differ(rules: Sequence[Rule], parts: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the rules give the parts different shares."""
    shares = [rule.shares(parts) for rule in rules]
    return any(abs(a - b) > 1e-12 for other in shares[1:] for a, b in zip(other, shares[0], strict=True))
