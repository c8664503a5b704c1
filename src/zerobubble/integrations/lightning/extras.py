"""Joins what `training_step` returns for microbatches, in addition to the loss, into what it returns for the batch.

How a value follows from those of microbatches is found by comparison with one call for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zerobubble.integrations.lightning.comparison import Fault
from zerobubble.integrations.lightning.logs import Parts, likely_rule, reduced
from zerobubble.integrations.loss_rules import are_near
from zerobubble.runtime.frameworks import join_outputs

RULES = ("joined", "mean", "weights", "sum", "rows", "first")
"""Joined as outputs of the network; a mean over samples, or like the loss; a sum; concatenated lists; or equal in all microbatches."""


def joined(extras: Sequence[Mapping[Any, Any]], parts: Parts, rules: Mapping[str, str], place: str = "") -> dict[Any, Any]:
    """Returns the values of the batch. `rules` has one of `RULES` for values that `learn_rules` has compared, by their places."""
    found = {}
    for name in dict.fromkeys(name for of_one in extras for name in of_one):
        values = [of_one[name] for of_one in extras if name in of_one]
        inside = f"{place}[{name!r}]"
        if all(isinstance(value, Mapping) for value in values):
            found[name] = joined(values, parts, rules, inside)
        else:
            found[name] = _by(rules.get(inside) or _likely_rule(values, parts), values, parts)
    return found


def learn_rules(
    extras: Sequence[Mapping[Any, Any]],
    runs: Sequence[Mapping[Any, Any]],
    parts: Parts,
    rules: dict[str, str],
    tolerance: float,
    place: str = "",
) -> Fault | None:
    """Sets the rules with which `extras` of microbatches give those of the whole batch. Returns a fault for a value without a rule.

    Args:
        extras: The values of microbatches.
        runs: The values of two equal runs for the whole batch. A number of Python that differs between them, such as a time, is averaged.
        parts: The sizes and weights of the microbatches.
        rules: The rules by the places of values.
        tolerance: The relative difference that rounding explains.
        place: The place of the values.
    """
    for name, value in runs[0].items():
        values, inside = [of_one.get(name) for of_one in extras], f"{place}[{name!r}]"
        again = runs[1].get(name)
        if isinstance(value, Mapping) and all(isinstance(of_one, Mapping) for of_one in values):
            fault = learn_rules(values, (value, again), parts, rules, tolerance, inside)  # type: ignore[arg-type]
            if fault is not None:
                return fault
            continue
        tried = (rules.get(inside) or _likely_rule(values, parts), *RULES)
        fitting = next((rule for rule in tried if _are_alike(_by(rule, values, parts), value, tolerance)), None)
        if fitting is not None:
            rules[inside] = fitting
        elif not isinstance(value, float) or value == again:
            return Fault(inside, kind="returned")
        else:
            rules[inside] = "mean"
    return None


def _likely_rule(values: Sequence[Any], parts: Parts) -> str:
    if len(values) == 1:
        return "first"
    return (likely_rule(values, parts) or "mean") if all(map(_is_number, values)) else "joined"


def _by(rule: str, values: Sequence[Any], parts: Parts) -> Any:
    """Returns the value of the batch by a rule; without an answer, a list of all values."""
    if rule == "first":
        return values[0] if all(_are_alike(value, values[0], 0.0) for value in values) else list(values)
    if rule == "rows" and all(isinstance(value, (list, tuple)) for value in values):
        return type(values[0])(item for value in values for item in value)
    if rule in ("mean", "weights", "sum") and all(map(_is_number, values)) and len(values) == len(parts.sizes):
        return _of_numbers(rule, values, list(parts.weights if rule == "weights" else parts.sizes))
    return join_outputs(values, parts.sizes, takes_first=True) if rule == "joined" else list(values)


def _of_numbers(rule: str, values: Sequence[Any], weights: list[float]) -> Any:
    first = values[0]
    number = reduced([torch.as_tensor(value).double() for value in values], weights, "sum" if rule == "sum" else "mean")
    if isinstance(first, Tensor):
        return number.to(first.dtype if first.is_floating_point() or rule == "sum" else number.dtype)
    return int(number) if isinstance(first, int) and float(number).is_integer() else float(number)


def _is_number(value: Any) -> bool:
    return value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_alike(one: Any, other: Any, tolerance: float) -> bool:
    """Returns whether two values have the same form, and numbers that differ by rounding. Objects of other classes are not compared."""
    (leaves, form), (others, other_form) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return form == other_form and all(_are_equal(a, b, tolerance) for a, b in zip(leaves, others, strict=True))


def _are_equal(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.ndim:
        if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
            return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        size = float(other.detach().abs().max()) if other.numel() else 0.0
        return torch.allclose(one.detach(), other.detach(), rtol=0, atol=tolerance * size, equal_nan=True)
    if _is_number(one) and _is_number(other):
        return isinstance(one, Tensor) == isinstance(other, Tensor) and are_near(float(one), float(other), tolerance, [float(other)])
    return type(one) is type(other) and (not isinstance(one, (str, bytes, bool)) or one == other)
