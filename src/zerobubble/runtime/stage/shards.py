"""The weights of a stage that FSDP2 divides over ranks with other data: gathered, let go and their gradients reduced when we say.

FSDP2 by itself gathers weights for a pass and lets them go after it, and reduces gradients in every backward pass. A pipeline knows its
order of passes, so here hooks of FSDP2 find the weights there, leave them there, and add gradients up in full until the stage's last pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.layers.eligibility import fsdp2_parts
from zerobubble.runtime.stage.reduction import Reduction, start_reduction

_CALLS = (
    *("unshard", "reshard", "set_is_last_backward", "set_requires_gradient_sync"),
    *("set_reshard_after_forward", "set_reshard_after_backward"),
)
"""What FSDP2 must be able to do; it can from torch 2.8 on."""
_OF_STATE = ("_is_root", "_root_post_backward_final_callback")
_OF_GROUP = ("device", "post_backward", "reduce_grads", "_post_reduce_event")
"""What is used of FSDP2 that it does not promise: there is no other way to reduce gradients when we say."""
_MODEL = ("tp", "ep")
"""Dimensions of a mesh along which a rank keeps its part of a weight when it is gathered."""


class Part(NamedTuple):
    """What FSDP2 gathers and reduces together: its own `state` of it, and the gathered weights whose gradients it has."""

    state: Any
    parameters: frozenset[nn.Parameter]


class Shards:
    """What FSDP2 divides of the stage `index`, which is `module`: all of it is gathered and let go together.

    `bytes` are those of the weights when they are gathered, `parameters` the shards. Raises `InputError` where this torch cannot be told
    what to do when.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        from torch.distributed.fsdp import fully_shard  # few need it

        self._parts = fsdp2_parts(module)
        lacking = [call for part in self._parts for call in _CALLS if not hasattr(part, call)]
        if lacking:
            raise InputError(
                f"stage {index} is divided by fully_shard, which has no {lacking[0]} in torch {torch.__version__}: use torch 2.8 or later"
            )
        self._states = {part: fully_shard.state(part) for part in self._parts}  # type: ignore[attr-defined]
        unknown = [name for state in self._states.values() for name in _unknown(state)]
        if unknown:
            raise InputError(
                f"stage {index} is divided by fully_shard, whose {unknown[0]} is no longer there in torch {torch.__version__}: "
                "use a version of torch that this version of zerobubble was tested with"
            )
        self.bytes = sum(_bytes(parameter, self._states[part]._mp_policy.param_dtype) for part, parameter in self._managed())
        self.parameters = tuple(parameter for _, parameter in self._managed())
        self._module = module
        self._at_rest: tuple[nn.Parameter, ...] = ()
        self._under_way: list[Any] = []
        self._syncs: dict[Any, bool] = {}
        self._gathered: tuple[Part, ...] = ()

    def _managed(self) -> list[tuple[Any, nn.Parameter]]:
        """The parameters with the innermost module that was divided around each."""
        innermost: dict[nn.Parameter, Any] = {}
        for part in self._parts:  # outer ones come first
            innermost.update(dict.fromkeys(part.parameters(), part))
        return [(part, parameter) for parameter, part in innermost.items()]

    def begin(self, *, trains: bool) -> None:
        """A step begins: weights stay where they are put, and gradients are added up until `reduce`."""
        self._gathered = ()
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
            if trains:
                self._syncs[part] = all(group.reduce_grads for group in _groups(self._states[part]))
                part.set_requires_gradient_sync(False, recurse=False)
                part.set_is_last_backward(False)

    def gather(self) -> None:
        """Start to gather the weights."""
        self._at_rest = self.at_rest()
        self._under_way = [part.unshard(async_op=True) for part in self._parts]

    def at_rest(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the module as they are between steps, which an optimizer has: shards, and what is not divided."""
        return self._at_rest or tuple(self._module.parameters())

    def wait(self) -> None:
        """Wait until they are there: the module then has plain parameters in the place of its shards."""
        for handle in self._under_way:
            handle.wait()
        self._under_way = []
        if not self._gathered:
            self._gathered = self._parts_by_last_parameter()

    def _parts_by_last_parameter(self) -> tuple[Part, ...]:
        """The parts in the order in which the last W's of the stage complete their gradients."""
        of_state: dict[Any, dict[nn.Parameter, int]] = {state: {} for state in self._states.values()}
        places = {parameter: place for place, parameter in enumerate(self._module.parameters())}
        for part, parameter in self._managed():
            if parameter.requires_grad:
                of_state[self._states[part]][parameter] = places[parameter]
        ordered = sorted(of_state.items(), key=lambda item: max(item[1].values(), default=-1))
        return tuple(Part(state, frozenset(parameters)) for state, parameters in ordered)

    def let_go(self) -> None:
        """Free the gathered weights, and what is under way of them."""
        self.wait()
        for part in self._parts:
            part.reshard()
        self._at_rest = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is reduced apart, in the order in which the last W's of a stage can complete it. Known when the weights were gathered."""
        return self._gathered

    def start(self, part: Part, before: Reduction | None) -> Iterator[Reduction]:
        """Start to sum the gradients of `part`, which are complete, over the ranks, unless the user has turned it off for now.

        They are then on their way into those of the shards, behind the reduction `before`.
        """
        for module, syncs in self._syncs.items():
            if self._states[module] is part.state:
                module.set_requires_gradient_sync(syncs, recurse=False)
        for group in reversed(_groups(part.state)):
            before = start_reduction(group, before)
            yield before

    def end_reductions(self) -> None:
        """Have the sums in the gradients of the shards: those of all parts have been started and waited for."""
        self._syncs = {}
        for module, state in self._states.items():
            module.set_is_last_backward(True)
            if state._is_root:
                # What FSDP2 does at the end of a backward pass, for all that it divides; torch's own pipelining calls it, too.
                state._root_post_backward_final_callback()

    def close(self) -> None:
        """There are no more steps; the last one may have failed, so nothing that is under way is waited for."""
        self._under_way = []
        for part in self._parts:
            part.reshard()
        for part, syncs in self._syncs.items():
            part.set_requires_gradient_sync(syncs, recurse=False)
        self._syncs = {}


def shards_of(module: nn.Module, index: int) -> Shards | None:
    """What FSDP2 divides of a stage, None where it divides nothing."""
    return Shards(module, index) if fsdp2_parts(module) else None


def _groups(state: Any) -> list[Any]:
    """What FSDP2 gathers and reduces together for a module: one group, or several from torch 2.12 on."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _unknown(state: Any) -> list[str]:
    """What is used of FSDP2 for a module and is not there."""
    of_state = [f"FSDPState.{name}" for name in _OF_STATE if not hasattr(state, name)]
    return of_state or [f"FSDPParamGroup.{name}" for group in _groups(state) for name in _OF_GROUP if not hasattr(group, name)]


def _bytes(parameter: Tensor, gathered_as: torch.dtype | None) -> int:
    """The bytes of a weight when it is gathered over the ranks with other data."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    kept: int = prod(mesh.size(number) for number, name in enumerate(names) if name in _MODEL)
    size: int = -(-parameter.numel() // kept)
    return size * (gathered_as or parameter.dtype).itemsize
