"""What stands in a stage for the units that other stages hold."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.models.dataflow import OutputForm, UnitCall


class ForwardInProgress:
    """One forward of a stage: which calls of units there were, what came for some of them, and what those of this stage have made."""

    def __init__(self, received: Mapping[UnitCall, list[Tensor]]) -> None:
        self.received = received
        self.made: dict[UnitCall, list[Tensor]] = {}
        self._counts: dict[str, int] = defaultdict(int)

    def next_call(self, unit: str) -> UnitCall:
        """The call of `unit` that is now."""
        call = UnitCall(unit, self._counts[unit])
        self._counts[unit] += 1
        return call


class StandIn(nn.Module):
    """In the place of `unit`, without its parameters: gives what came for a call, or zeros where nobody needs its output.

    `forms` has the forms of the unit's outputs as they were seen on the example, and `progress` holds the forward that runs now. Other
    attributes of the unit, such as a layer's type, are those of the unit.
    """

    def __init__(self, name: str, unit: nn.Module, forms: Mapping[UnitCall, OutputForm], progress: list[ForwardInProgress]) -> None:
        super().__init__()
        self._name = name
        self._forms = forms
        self._progress = progress
        self._shapes: dict[tuple[Any, ...], Any] = {}
        self.__dict__["_unit"] = _without_memory(unit)  # past `nn.Module.__setattr__`, which would take its parameters for ours

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_unit"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        progress = self._progress[0]
        call = progress.next_call(self._name)
        if call in progress.received:
            return filled(self._forms[call], progress.received[call])
        return self._zeros(call, args, kwargs)

    def _zeros(self, call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        seen = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if seen not in self._shapes:
            self._shapes[seen] = self._shape_of(call, args, kwargs)
        device = tensors[0].device if tensors else torch.device("cpu")
        return pytree.tree_map_only(Tensor, lambda like: torch.zeros(like.shape, dtype=like.dtype, device=device), self._shapes[seen])

    def _shape_of(self, call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the unit for arguments of these shapes, in meta tensors."""
        on_meta_args, on_meta_kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), (args, kwargs))
        try:
            with torch.no_grad():
                return self.__dict__["_unit"](*on_meta_args, **on_meta_kwargs)
        except (NotImplementedError, RuntimeError):  # its code looks at numbers, which are none on meta
            form = self._forms[call]
            return pytree.tree_unflatten(list(form.leaves), form.structure)


def filled(form: OutputForm, tensors: list[Tensor]) -> Any:
    """An output of this form with these tensors."""
    leaves = list(form.leaves)
    for place, tensor in zip(form.places, tensors, strict=True):
        leaves[place] = tensor
    return pytree.tree_unflatten(leaves, form.structure)


def _without_memory(unit: nn.Module) -> nn.Module:
    """A copy of `unit` whose parameters and buffers take no memory."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(unit.parameters(), unit.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(unit, memo)
