"""Facts about whole models that must agree if ranks cut one model, compared when ranks connect.

Ranks compare short digests of parameters, without reading all values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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
    known = {rank: facts for rank, facts in all_facts.items() if facts is not None}
    for what in dict.fromkeys(name for each in known.values() for name in each.facts):
        found = [each.facts.get(what, "none") for each in known.values()]
        if len(set(found)) > 1:
            remedy = "create the same model on every rank, with equal arguments of zb.split"
            return f"ranks disagree on the {what}: {each_has(known, found)}; {remedy}"
    names = dict.fromkeys(name for each in known.values() for name in each.kinds)
    for name in names:
        found = [each.kinds.get(name, "none of this name") for each in known.values()]
        if len(set(found)) > 1:
            remedy = "create the model from the same configuration on every rank"
            return f"ranks disagree on parameter {name!r}: {each_has(known, found)}; {remedy}"
    values = {rank: each.values for rank, each in known.items() if each.values is not None}
    return _other_values(values, names) if len(values) == len(known) else ""


def _other_values(given: Mapping[int, Mapping[str, str]], names: Mapping[str, None]) -> str:
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, values in given.items():
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
