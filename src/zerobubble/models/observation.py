"""What the units of a model get from each other, found out by running the code around them, with stand-ins for all units.

The law: nothing here has the numbers of a unit, or runs one. The code around the units runs on the arguments as they are; a unit gives an
output of the right form, which comes from that call alone, and `Following` sees where it goes. Where that code would look at a number that
comes from a unit, it is refused; so what is found holds whatever numbers the units give.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from zerobubble.errors import InputError
from zerobubble.models.assembly import assemble, place
from zerobubble.models.dataflow import Called, Dataflow, DirectParameter, OutputForm, Sources, UnitCall, kind_of
from zerobubble.models.following import Following, storage_of
from zerobubble.models.skeleton import Seen, Skeleton
from zerobubble.models.stand_in import Current, StandIn, blank, blank_like, device_of
from zerobubble.models.units import Units, join
from zerobubble.runtime.values.added_losses import collecting_losses

_REMEMBERED = 64
"""For how many kinds of arguments the dataflow is remembered."""


class ObservedModel:
    """A model without its numbers, which tells the dataflow of a forward. Stages share it, in whatever threads they run."""

    def __init__(self, model: nn.Module, units: Units) -> None:
        self.skeletons = {name: Skeleton(name, unit) for name, unit in units.units.items()}
        self._current = Current()
        self._parameters: dict[str, Tensor] = {}
        self._model = assemble(model, units, self._stand_in, self._blank_parameter)
        self._flows: OrderedDict[Any, Dataflow] = OrderedDict()
        self._lock = threading.Lock()

    def _stand_in(self, name: str, unit: nn.Module) -> nn.Module:
        stand_in = StandIn(self.skeletons[name], self._current)
        for own, parameter in unit._parameters.items():
            if parameter is not None:
                place(stand_in, own, self._blank_parameter(join(name, own), parameter))
        return stand_in

    def _blank_parameter(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        made = nn.Parameter(blank_like(parameter, parameter.device), requires_grad=False)
        self._parameters[name] = made
        return made

    def flow(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Dataflow:
        """The dataflow of a forward with such arguments: of this structure, of these types and with these constants.

        Raises `InputError` where stages that do not hold all units could not run the model's code.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (training, repr(structure), *map(_kind_of, leaves))  # torch 2.6 cannot hash a structure
        with self._lock:
            if key not in self._flows:
                self._flows[key] = self._observe(args, kwargs, training)
                while len(self._flows) > _REMEMBERED:
                    self._flows.popitem(last=False)
            return self._flows[key]

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Dataflow:
        following = Following(self._model.named_buffers())
        for name, parameter in self._parameters.items():
            following.come_from(parameter, frozenset({DirectParameter(name)}))
        self._current.forward = observed = _Observed(following)
        self._model.train(training)
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        try:
            with torch.random.fork_rng(), torch.no_grad(), following, collecting_losses() as added:
                output = self._model(*args, **kwargs)
                sources = following.sources_in(dict(output) if isinstance(output, Mapping) else output)
        finally:
            del self._current.forward
            for buffer, before in buffers:
                buffer.copy_(before)
        _refuse_losses(added)
        return observed.dataflow(sources)


class _Observed:
    """A forward that is observed: each call of a unit with what was seen of it."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._counts: dict[str, int] = defaultdict(int)
        self._calls: dict[UnitCall, tuple[Sources, OutputForm, Seen, list[int]]] = {}

    def stand_in(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = stand_in.skeleton.name
        call = UnitCall(name, self._counts[name])
        self._counts[name] += 1
        sources = self._following.sources_in((args, kwargs))
        seen = stand_in.skeleton.seen(args, kwargs, training=stand_in.training)
        leaves = pytree.tree_leaves((args, kwargs))
        for changed in seen.changed:
            self._following.was_changed(leaves[changed], name)
        output = blank(seen.form, device_of(args, kwargs), writable=True)
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._following.come_from(tensor, frozenset({call}))
        with _disable_current_modes():
            given = OutputForm.of(pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), (args, kwargs)))
        self._calls[call] = (sources, given, seen, [storage_of(tensor) for tensor in tensors])
        return output

    def dataflow(self, output: Sources) -> Dataflow:
        """All that was seen, with the sources of the model's output."""
        calls = {}
        for call, (sources, given, seen, storages) in self._calls.items():
            changed = any(self._following.has_written_to(storage) for storage in storages)
            calls[call] = Called(call, sources, given, seen.form, seen.flops, changed)
        return Dataflow(calls, output)


def _refuse_losses(added: Mapping[str, Tensor]) -> None:
    if added:
        raise InputError(
            f"the model's code around its parts adds {', '.join(map(repr, added))} to the loss, and that code runs on every stage; call "
            "add_loss in one of the parts, such as a block, or let the model return what loss_fn needs for it"
        )


def _kind_of(leaf: Any) -> Any:
    return kind_of(leaf, lambda tensor: (tensor.dtype, tensor.dim()))
