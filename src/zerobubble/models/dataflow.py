"""What the units of a model get from each other, found out by running the model once on an example.

Every tensor is followed from where it comes to where it is used: an operation that reads a tensor hands on where that came from. The
output of a unit comes from that unit alone, whatever the unit was given. So for each call of a unit, and for the model's output, it is
known whose outputs reach it through the code between the units, and which inputs and parameters of the model do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from zerobubble.models.units import Units


class UnitCall(NamedTuple):
    """The output of a unit, at the `number`-th call of it in one forward, from 0 on."""

    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.unit!r}" if self.number == 0 else f"call {self.number} of {self.unit!r}"


class DirectParameter(NamedTuple):
    """A parameter of the model that code between the units uses, by its name."""

    name: str


Source = UnitCall | DirectParameter
"""Where a tensor comes from. What comes from the model's inputs or from nowhere has no source: every stage has the inputs."""
Sources = frozenset[Source]


class OutputForm(NamedTuple):
    """How the output of a call is put together: its `structure`, with a shape and type in the place of each tensor.

    `leaves` has a meta tensor for each tensor and every other leaf as it is.
    """

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def places(self) -> list[int]:
        """Where among the leaves the tensors are."""
        return [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Called:
    """What was seen of one call of a unit.

    `sources` are those of its arguments, `form` that of its output, `flops` the floating-point operations of its forward. `changed_later`
    tells that code behind the call changed its output in place.
    """

    call: UnitCall
    sources: Sources
    form: OutputForm
    flops: int
    changed_later: bool


@dataclass(frozen=True)
class Dataflow:
    """The calls of the units in their order, and the sources of the model's output."""

    calls: tuple[Called, ...]
    output: Sources


def follow(model: nn.Module, units: Units, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Dataflow:
    """Run `model` once with these positional and named `arguments`, without gradients. Buffers and torch's random state are put back."""
    following = _Following()
    seen: list[_Seen] = []
    positional, named = arguments
    with _unchanged(model), torch.no_grad(), _watched(units, following, seen), following:
        of_units = {id(parameter) for unit in units.units.values() for parameter in unit.parameters()}
        for name, parameter in model.named_parameters():
            if id(parameter) not in of_units:
                following.come_from(parameter, frozenset({DirectParameter(name)}))
        output = model(*positional, **named)
        of_output = following.sources_in(dict(output) if isinstance(output, Mapping) else output)
    return Dataflow(tuple(one.called() for one in seen), of_output)


class _Following(TorchDispatchMode):
    """Keeps where each tensor comes from, for as long as it lives; what was written into a storage holds for all its views."""

    def __init__(self) -> None:
        super().__init__()
        self._of_tensors: Any = WeakTensorKeyDictionary()
        self._of_storages: dict[int, Sources] = {}

    def come_from(self, tensor: Tensor, sources: Sources) -> None:
        """`tensor` comes from these `sources` and no others."""
        self._of_tensors[tensor] = sources

    def sources_in(self, pytree_of_tensors: Any) -> Sources:
        """The sources of all tensors in a pytree."""
        leaves = pytree.tree_leaves(pytree_of_tensors)
        return frozenset().union(*(self._sources_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)))

    def _sources_of(self, tensor: Tensor) -> Sources:
        written: Sources = self._of_storages.get(_storage(tensor), frozenset())
        found: Sources = self._of_tensors.get(tensor, frozenset())
        return found | written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        sources = self.sources_in(given)
        output = func(*args, **(kwargs or {}))
        if sources:
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self._of_tensors[leaf] = self._sources_of(leaf) | sources
            for argument, schema in zip(args, func._schema.arguments, strict=False):
                if schema.alias_info is not None and schema.alias_info.is_write and isinstance(argument, Tensor):
                    self._of_storages[_storage(argument)] = self._sources_of(argument) | sources
        return output


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1


class _Seen:
    """A call of a unit that was watched, with its output until the model is done."""

    def __init__(self, call: UnitCall, sources: Sources, output: Any, flops: int) -> None:
        self._call = call
        self._sources = sources
        self._flops = flops
        leaves, self._structure = pytree.tree_flatten(output)
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
        self._leaves = [torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def called(self) -> Called:
        form = OutputForm(tuple(self._leaves), self._structure)
        changed = any(tensor._version != version for tensor, version in zip(self._tensors, self._versions, strict=True))
        return Called(self._call, self._sources, form, self._flops, changed)


@contextmanager
def _watched(units: Units, following: _Following, seen: list[_Seen]) -> Iterator[None]:
    """Inside, every call of a unit is noted in `seen`, and its output comes from that call."""
    counts: dict[str, int] = defaultdict(int)
    busy: list[str] = []

    def watch(name: str, unit: nn.Module) -> None:
        forward = unit.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if busy:  # a unit that calls another
                return forward(*args, **kwargs)
            sources = following.sources_in((args, kwargs))
            busy.append(name)
            try:
                with FlopCounterMode(display=False) as counter:
                    output = forward(*args, **kwargs)
            finally:
                busy.pop()
            call = UnitCall(name, counts[name])
            counts[name] += 1
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor):
                    following.come_from(leaf, frozenset({call}))
            seen.append(_Seen(call, sources, output, counter.get_total_flops()))
            return output

        unit.__dict__["forward"] = run

    for name, unit in units.units.items():
        watch(name, unit)
    try:
        yield
    finally:
        for unit in units.units.values():
            unit.__dict__.pop("forward", None)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """What runs inside leaves buffers and torch's random state as they are."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
