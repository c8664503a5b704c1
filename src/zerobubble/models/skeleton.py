"""A unit without its numbers: what its output looks like, found out without memory for its parameters."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from zerobubble.errors import InputError
from zerobubble.models.dataflow import OutputForm, kind_of
from zerobubble.runtime.values.added_losses import collecting_losses

_REMEMBERED = 64
"""For how many shapes of arguments a unit remembers what it gives."""


class Seen(NamedTuple):
    """What a unit does with arguments of some shapes: the `form` of its output, the floating-point operations, and which it changes.

    `changed` are the places of the tensors among its arguments that it changes in place.
    """

    form: OutputForm
    flops: int
    changed: tuple[int, ...]


class Skeleton:
    """Unit `name` of a model, whose parameters take no memory."""

    def __init__(self, name: str, unit: nn.Module) -> None:
        self.name = name
        self.unit = _with_tensors(unit, lambda tensor: torch.empty_like(tensor, device="meta"))
        self._remembered: OrderedDict[tuple[Any, ...], Seen] = OrderedDict()

    def seen(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Seen:
        """What the unit gives for arguments of these shapes.

        Raises `InputError` for a unit that cannot be run without its numbers, and for one that leaves tensors elsewhere than in its output.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (training, repr(structure), *map(_shape_of, leaves))
        if key not in self._remembered:
            self.unit.train(training)
            with _disable_current_modes(), torch.no_grad():
                self._remembered[key] = self._find_out(leaves, structure)
            while len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        return self._remembered[key]

    def _find_out(self, leaves: list[Any], structure: pytree.TreeSpec) -> Seen:
        try:
            return self._run(self.unit, [_meta(leaf) for leaf in leaves], structure)
        except (NotImplementedError, RuntimeError):  # its code looks at numbers, of which there are none on the meta device
            with torch.random.fork_rng():
                # Strides as real ones, which grouped products ask for; pages of zeros that are only read take no memory.
                unit = _with_tensors(self.unit, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
                return self._run(unit, [_zeros(leaf) for leaf in leaves], structure)

    def _run(self, unit: nn.Module, leaves: list[Any], structure: pytree.TreeSpec) -> Seen:
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        with FlopCounterMode(display=False) as counter, _Made(leaves) as made, collecting_losses():
            output = unit(*args, **kwargs)
        form = OutputForm.of(pytree.tree_map_only(Tensor, _meta, output))
        del output
        if made.left_outside_of(unit):
            raise InputError(
                f"part {self.name!r} leaves tensors elsewhere than in its output: in one of its arguments, or with a hook or a global "
                "variable that records them (use_cache, output_router_logits, output_hidden_states and output_attentions of Transformers "
                "do); stages that do not have this part would lack them: switch that off, or let the part return what others need"
            )
        changed = tuple(
            place
            for place, (leaf, version) in enumerate(zip(leaves, versions, strict=True))
            if isinstance(leaf, Tensor) and leaf._version != version
        )
        return Seen(form, counter.get_total_flops(), changed)


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the tensors that were made inside, as long as they live."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = {id(leaf) for leaf in given}  # an operation in place gives what it was given
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return output

    def left_outside_of(self, unit: nn.Module) -> bool:
        """Whether some of them still live, but for those that `unit` itself keeps and those that it was given."""
        if not self._living(unit):
            return False
        gc.collect()
        return bool(self._living(unit))

    def _living(self, unit: nn.Module) -> list[Tensor]:
        living = [tensor for tensor in (ref() for ref in self._made) if tensor is not None and id(tensor) not in self._given]
        if not living:
            return []
        kept = {id(leaf) for part in unit.modules() for leaf in pytree.tree_leaves(list(part.__dict__.values()))}
        return [tensor for tensor in living if id(tensor) not in kept]


def _with_tensors(unit: nn.Module, like: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of `unit` with other parameters and buffers, none of which trains."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(unit.parameters(), unit.buffers()):
        other = like(tensor)
        memo[id(tensor)] = nn.Parameter(other, requires_grad=False) if isinstance(tensor, nn.Parameter) else other
    return copy.deepcopy(unit, memo)


def _shape_of(leaf: Any) -> Any:
    return kind_of(leaf, lambda tensor: (tensor.shape, tensor.dtype))


def _meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf


def _zeros(leaf: Any) -> Any:
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf
