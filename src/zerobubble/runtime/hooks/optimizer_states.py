"""Refuses the state of an optimizer that the rank of other stages saved: torch loads states by number, so it would be of other parameters.

If an optimizer steps the stages of a second pipeline, with the model cut elsewhere, another rank has the state of parameters that have
moved. It is refused, too.

Each parameter group of an optimizer that steps stages of a rank gets an entry that identifies these stages and parameters.
`optimizer.state_dict()` contains the entry, and `load_state_dict` keeps it, as it keeps all entries of a group. The next step compares it.
Optimizers without a pipeline ignore it.

Cost per step: one list of identities for each group.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zerobubble.errors import InputError
from zerobubble.runtime.step.optimizers import SAVED_BY
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.units import counted, named


class _Group(NamedTuple):
    """The ids of a group's parameters, the ids of parameters that other ranks train (`elsewhere`), its entry, and its pipelines."""

    parameters: list[int]
    entry: dict[str, Any]
    elsewhere: frozenset[int]
    runners: tuple[weakref.ref[StepRunner], ...]

    @classmethod
    def of(cls, parameters: Sequence[Tensor], runners: Sequence[StepRunner]) -> _Group:
        names = {id(parameter): name for runner in runners for name, parameter in _named(runner)}
        identities = list(map(id, parameters))
        elsewhere = frozenset(identities) - names.keys()
        return cls(identities, _entry_of(identities, names, runners), elsewhere, tuple(map(weakref.ref, runners)))

    def is_of(self, runners: Sequence[StepRunner]) -> bool:
        """Whether these pipelines trained the group."""
        return [runner() for runner in self.runners] == list(runners)


_groups: weakref.WeakKeyDictionary[Optimizer, dict[int, _Group]] = weakref.WeakKeyDictionary()


def refuse_other_stages_state(optimizer: Optimizer, runners: Sequence[StepRunner]) -> None:
    """Raises `InputError` if `optimizer`, which steps stages of these `runners`, has loaded the state of other stages.

    Otherwise, marks its groups as holding the state of these stages.
    """
    group_of = _groups.setdefault(optimizer, {})
    for number, group in enumerate(optimizer.param_groups):
        parameters = list(map(id, group["params"]))
        before, entry = group_of.get(number), group.get(SAVED_BY)
        if before is None or before.parameters != parameters or not before.is_of(runners):
            group_of[number] = _Group.of(group["params"], runners)
            if before is not None:
                _refuse_moved(optimizer, number, before, group_of[number])
        is_loaded = before is None or entry is not before.entry
        if entry is not None and is_loaded and entry != group_of[number].entry:
            _refuse(optimizer, number, entry, group_of[number].entry)
        group[SAVED_BY] = group_of[number].entry


def _refuse_moved(optimizer: Optimizer, number: int, before: _Group, now: _Group) -> None:
    """Raises `InputError` if an earlier pipeline trained parameters of this rank on another, which has their state."""
    with_state = set(map(id, optimizer.state))
    moved = (before.elsewhere & frozenset(now.parameters)) - now.elsewhere - with_state
    if moved and with_state:
        raise InputError(
            "group {number} of {optimizer} lacks the state of {got}, which another rank trained in an earlier pipeline",
            optimizer=type(optimizer).__name__,
            number=number,
            got=counted(len(moved), "parameter"),
            remedy="make an optimizer of pipe.parameters() for each pipeline, and restore the states with zb.save and zb.load",
        )


def _entry_of(parameters: Sequence[int], names: Mapping[int, str], runners: Sequence[StepRunner]) -> dict[str, Any]:
    """Returns what identifies the stages of this rank and their parameters in a group, as plain values that any program can load."""
    text = "\n".join(names.get(parameter, "") for parameter in parameters)
    stages = sorted({stage for runner in runners for stage in runner.modules})
    return {"stages": stages, "parameters": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _named(runner: StepRunner) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that optimizers of this rank hold. The name of a shard includes its rank."""
    for index, stage in runner.programs.now.stages.items():
        module = runner.modules[index]
        at_rest = module.parameters() if stage.shards is None else stage.shards.at_rest()
        for (name, _), parameter in zip(module.named_parameters(), at_rest, strict=True):
            rank = f" of rank {dist.get_rank()}" if runner.sharded.is_sharded(parameter) else ""
            yield f"{index}.{name}{rank}", parameter


def _refuse(optimizer: Optimizer, number: int, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    is_same = saved.get("stages") == mine["stages"]
    raise InputError(
        "group {number} of {optimizer} has the state {of_saved}, and this rank trains {of_mine}",
        optimizer=type(optimizer).__name__,
        number=number,
        of_saved="of other parameters" if is_same else f"that the rank of {named('stage', saved.get('stages', ()))} saved",
        of_mine=f"{named('stage', mine['stages'])}{' with these' * is_same}",
        remedy="load on each rank the file that this rank saved, or call zb.save and zb.load, which restore states by name",
    )
