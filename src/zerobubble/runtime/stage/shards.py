"""The FSDP2-sharded weights of a stage, with gathers, frees and gradient reductions at points chosen by the schedule.

By default, FSDP2 gathers weights before each pass, frees them after it, and reduces gradients in every backward. A pipeline knows its order
of passes, so here the hooks of FSDP2 find the weights gathered, leave them in place, and accumulate unsharded gradients until the stage's
last pass.
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

_FSDP_METHODS = (
    *("unshard", "reshard", "set_is_last_backward", "set_requires_gradient_sync"),
    *("set_reshard_after_forward", "set_reshard_after_backward"),
)
"""The public methods of FSDP2 used here, available since torch 2.8."""
_STATE_ATTRIBUTES = ("_is_root", "_root_post_backward_final_callback")
_GROUP_ATTRIBUTES = ("device", "post_backward", "reduce_grads", "_post_reduce_event", "mesh_info", "comm_ctx")
"""Private attributes of FSDP2 used here: no public API starts a reduction at a chosen time."""
_MODEL_DIMENSIONS = ("tp", "ep")
"""Mesh dimensions along which a gathered weight stays sharded."""


class Part(NamedTuple):
    """A unit that FSDP2 gathers and reduces together: its FSDP `state`, and the gathered weights with gradients."""

    state: Any
    parameters: frozenset[nn.Parameter]


class Shards:
    """The FSDP2 units of stage `index`, which is `module`; all are gathered and freed together.

    `bytes` are those of the gathered weights, `parameters` the shards. Raises `InputError` if this version of torch lacks the needed
    control.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        from torch.distributed.fsdp import fully_shard  # lazy: few users need it

        self._parts = fsdp2_parts(module)
        lacking = [call for part in self._parts for call in _FSDP_METHODS if not hasattr(part, call)]
        if lacking:
            message = "stage {index} is sharded by fully_shard, which has no {lacking} in torch {version}"
            raise InputError(message, index=index, lacking=lacking[0], version=torch.__version__, remedy="use torch 2.8 or later")
        self._states = {part: fully_shard.state(part) for part in self._parts}  # type: ignore[attr-defined]
        unknown = [name for state in self._states.values() for name in _unknown(state)]
        if unknown:
            raise InputError(
                "stage {index} is sharded by fully_shard, whose {unknown} is missing in torch {version}",
                index=index,
                unknown=unknown[0],
                version=torch.__version__,
                remedy="use a version of torch that this version of zerobubble was tested with",
            )
        self.bytes = sum(_bytes(parameter, self._states[part]._mp_policy.param_dtype) for part, parameter in self._managed())
        self.parameters = tuple(parameter for _, parameter in self._managed())
        self._module = module
        self._at_rest: tuple[nn.Parameter, ...] = ()
        self._under_way: list[Any] = []
        self._syncs: dict[Any, bool] = {}
        self._gathered: tuple[Part, ...] = ()

    def _managed(self) -> list[tuple[Any, nn.Parameter]]:
        """Returns each parameter with the innermost sharded module around it."""
        innermost: dict[nn.Parameter, Any] = {}
        for part in self._parts:  # outer modules come first
            innermost.update(dict.fromkeys(part.parameters(), part))
        return [(part, parameter) for parameter, part in innermost.items()]

    def begin(self, *, trains: bool) -> None:
        """Begins a step: weights stay gathered or sharded as set here, and gradients accumulate until `start`."""
        self._gathered = ()
        if trains:  # all before any is set: modules given to fully_shard as a list share their state
            self._syncs = {part: all(group.reduce_grads for group in _groups(state)) for part, state in self._states.items()}
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
            if trains:
                part.set_requires_gradient_sync(False, recurse=False)
                part.set_is_last_backward(False)

    def gather(self) -> None:
        """Starts to gather the weights."""
        self._at_rest = self.at_rest()
        self._under_way = [part.unshard(async_op=True) for part in self._parts]

    def at_rest(self) -> tuple[nn.Parameter, ...]:
        """Returns the parameters as between steps, which an optimizer has: shards, and unsharded parameters."""
        return self._at_rest or tuple(self._module.parameters())

    def wait(self) -> None:
        """Waits for the gathered weights: the module then has plain parameters instead of its shards."""
        for handle in self._under_way:
            handle.wait()
        self._under_way = []
        if not self._gathered:
            self._gathered = self._parts_by_last_parameter()

    def _parts_by_last_parameter(self) -> tuple[Part, ...]:
        """Returns the parts in the order in which the last W's of the stage complete their gradients."""
        of_state: dict[Any, dict[nn.Parameter, int]] = {state: {} for state in self._states.values()}
        places = {parameter: place for place, parameter in enumerate(self._module.parameters())}
        for part, parameter in self._managed():
            if parameter.requires_grad:
                of_state[self._states[part]][parameter] = places[parameter]
        ordered = sorted(of_state.items(), key=lambda item: max(item[1].values(), default=-1))
        return tuple(Part(state, frozenset(parameters)) for state, parameters in ordered)

    def release(self) -> None:
        """Frees the gathered weights, including gathers in progress."""
        self.wait()
        for part in self._parts:
            part.reshard()
        self._at_rest = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The units reduced separately, in the order in which the last W's can complete them. Known after the first gather."""
        return self._gathered

    def start(self, part: Part, before: Reduction | None) -> Iterator[Reduction]:
        """Starts to reduce the complete gradients of `part` over the ranks, unless the user has disabled gradient synchronization.

        The results go to the gradients of the shards, after the reduction `before`.
        """
        for module, syncs in self._syncs.items():
            if self._states[module] is part.state:
                module.set_requires_gradient_sync(syncs, recurse=False)
        for group in reversed(_groups(part.state)):
            before = start_reduction(group, before)
            yield before

    def end_reductions(self) -> None:
        """Finishes the gradients of the shards, after the reductions of all parts were started and waited for."""
        self._syncs = {}
        for module, state in self._states.items():
            module.set_is_last_backward(True)
            if state._is_root:
                # FSDP2 runs this at the end of a backward pass, for all its units; torch.distributed.pipelining calls it too.
                state._root_post_backward_final_callback()

    def close(self) -> None:
        """Ends after the last step. That step may have failed, so this waits for nothing in progress."""
        self._under_way = []
        for part in self._parts:
            part.reshard()
        for part, syncs in self._syncs.items():
            part.set_requires_gradient_sync(syncs, recurse=False)
        self._syncs = {}


def shards_of(module: nn.Module, index: int) -> Shards | None:
    """Returns the FSDP2 units of a stage, None if there are none."""
    return Shards(module, index) if fsdp2_parts(module) else None


def _groups(state: Any) -> list[Any]:
    """Returns the parameter groups of a module: one, or several since torch 2.12."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _unknown(state: Any) -> list[str]:
    """Returns the private attributes of FSDP2 that are missing."""
    of_state = [f"FSDPState.{name}" for name in _STATE_ATTRIBUTES if not hasattr(state, name)]
    return of_state or [f"FSDPParamGroup.{name}" for group in _groups(state) for name in _GROUP_ATTRIBUTES if not hasattr(group, name)]


def _bytes(parameter: Tensor, gathered_as: torch.dtype | None) -> int:
    """Returns the bytes of a gathered weight."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    kept: int = prod(mesh.size(number) for number, name in enumerate(names) if name in _MODEL_DIMENSIONS)
    size: int = -(-parameter.numel() // kept)
    return size * (gathered_as or parameter.dtype).itemsize
