"""Facts about whole models that must agree if ranks cut one model, compared when ranks connect.

Ranks compare short digests of parameters, without reading all values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zerobubble.runtime.transport.terms import each_has, named
from zerobubble.runtime.values.memory import spaced_elements
from zerobubble.runtime.values.stateful import is_stateful, is_wrapper


class ModelFacts(NamedTuple):
    """Facts of a rank: `facts` by name, and digests of the `kinds` and `values` of parameters by name.

    `values` are None if they may differ between ranks: if each has trained a part of the model before.
    """

    facts: Mapping[str, str]
    kinds: Mapping[str, str]
    values: Mapping[str, str] | None


@runtime_checkable
class KnowsModel(Protocol):
    """Builds stages of a model that every rank has as a whole, as returned by `zb.split`."""

    def model_facts(self, num_stages: int) -> ModelFacts:
        """Returns the facts of this rank, for a cut into `num_stages` stages."""
        ...


def differences(all_facts: Mapping[int, ModelFacts | None]) -> str:
    """Describes the first fact or parameter in which ranks of one pipeline differ, empty if they agree."""
    present = {rank: facts for rank, facts in all_facts.items() if facts is not None}
    for what, values in _disagreement({rank: facts.facts for rank, facts in present.items()}, "none"):
        return f"ranks disagree on the {what}: {values}; create the same model on every rank, with equal arguments of zb.split"
    kinds_of = {rank: facts.kinds for rank, facts in present.items()}
    for name, values in _disagreement(kinds_of, "none of this name"):
        return f"ranks disagree on parameter {name!r}: {values}; create the model from the same configuration on every rank"
    digests = {rank: facts.values for rank, facts in present.items() if facts.values is not None}
    return _other_values(digests, dict.fromkeys(chain.from_iterable(kinds_of.values()))) if len(digests) == len(present) else ""


def _disagreement(tables: Mapping[int, Mapping[str, str]], absent: str) -> Iterator[tuple[str, str]]:
    """Yields the names with different values in the ranks' tables, with the ranks of each value."""
    for name in dict.fromkeys(chain.from_iterable(tables.values())):
        values = [table.get(name, absent) for table in tables.values()]
        if len(set(values)) > 1:
            yield name, each_has(tables, values)


def _other_values(digests: Mapping[int, Mapping[str, str]], names: Mapping[str, None]) -> str:
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, values in digests.items():
            groups.setdefault(values[name], []).append(rank)
        if len(groups) > 1:
            groups_of_ranks = " and ".join(named(ranks) for ranks in sorted(groups.values(), key=len))
            return (
                f"parameter {name!r} differs between {groups_of_ranks}; stages of different models do not form a model: call "
                "torch.manual_seed with the same number on all ranks before creating the model, or load the same weights on all"
            )
    return ""


def kinds(model: nn.Module) -> dict[str, str]:
    """Returns the shape, dtype and `requires_grad` of each parameter."""
    return {name: f"{list(p.shape)} of {p.dtype}{'' if p.requires_grad else ', frozen'}" for name, p in model.named_parameters()}


def digest(parameter: Tensor) -> str:
    """Returns a digest of the values of a parameter; empty if it is sharded, or of a layout or dtype without element access."""
    sample = sampled(parameter)
    return "" if sample is None else hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:8]


def sampled(parameter: Tensor) -> Tensor | None:
    """Returns values of a parameter, on the CPU; None if they cannot be read."""
    has_elements = type(parameter) in (Tensor, nn.Parameter) or (is_stateful(parameter) and not is_wrapper(parameter))
    is_plain = has_elements and parameter.layout is torch.strided and not parameter.is_quantized
    if not is_plain or parameter.is_meta or not parameter.numel():
        return None
    try:
        sample = spaced_elements(parameter)
    except (NotImplementedError, RuntimeError):  # 8-bit dtypes, without element access
        return None
    return sample.to("cpu", torch.complex128 if sample.is_complex() else torch.float64)
