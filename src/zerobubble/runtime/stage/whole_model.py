"""What ranks that cut one model must have alike: its parameters, their values, and the cut. Compared when they connect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class ModelFacts(NamedTuple):
    """What a rank has: `facts` in words, by what they are called; `kinds` and `values` of parameters by name, as a few digits.

    `values` are None where ranks may have others: where a model was trained in parts before.
    """

    facts: Mapping[str, str]
    kinds: Mapping[str, str]
    values: Mapping[str, str] | None


@runtime_checkable
class KnowsModel(Protocol):
    """What builds stages of a model that every rank has as a whole, such as `zb.split` gives."""

    def model_facts(self, num_stages: int) -> ModelFacts:
        """What this rank has, for a cut into so many stages."""
        ...

    def was_connected(self) -> None:
        """Ranks have compared what they have, and will train their parts of it from here on."""
        ...


def differences(told: Mapping[int, ModelFacts | None]) -> str:
    """Where ranks of one pipeline that know their model differ, by the first fact or parameter; empty where they do not."""
    known = {rank: facts for rank, facts in told.items() if facts is not None}
    for what in dict.fromkeys(name for each in known.values() for name in each.facts):
        found = {rank: each.facts.get(what, "none") for rank, each in known.items()}
        if len(set(found.values())) > 1:
            return (
                f"ranks disagree on the {what}: {_listed(found)}; make the same model on every rank, and give zb.split the same arguments"
            )
    names = dict.fromkeys(name for each in known.values() for name in each.kinds)
    for name in names:
        found = {rank: each.kinds.get(name, "none of this name") for rank, each in known.items()}
        if len(set(found.values())) > 1:
            return f"ranks disagree on parameter {name!r}: {_listed(found)}; make the model of the same configuration on every rank"
    values = {rank: each.values for rank, each in known.items() if each.values is not None}
    return _other_values(values, names) if len(values) == len(known) else ""


def _other_values(told: Mapping[int, Mapping[str, str]], names: Mapping[str, None]) -> str:
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, values in told.items():
            groups.setdefault(values[name], []).append(rank)
        if len(groups) > 1:
            apart = " and other ones than ".join(_ranks(ranks) for ranks in sorted(groups.values(), key=len))
            return (
                f"parameter {name!r} has other values on {apart}; stages of different models make none: call torch.manual_seed with one "
                "number on all ranks before the model is made, or load the same weights on all"
            )
    return ""


def _listed(found: Mapping[int, str]) -> str:
    return ", ".join(f"rank {rank} has {value}" for rank, value in found.items())


def _ranks(ranks: Sequence[int]) -> str:
    told = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {told}" if len(ranks) == 1 else f"ranks {told}"
