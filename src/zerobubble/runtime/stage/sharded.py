"""Parameters sharded over ranks, as DTensors or as marked experts: the mesh dimensions of their shards, and norms of whole gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.transport.mesh import DATA, Layout
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.experts import ExpertMark, expert_marks


class ShardedTensors:
    """The sharded parameters and buffers in this rank's `modules`.

    Raises `InputError` for tensors that are sharded over ranks which are not those along dimensions of the mesh.
    """

    def __init__(self, transport: Transport, layout: Layout, modules: Mapping[int, nn.Module]) -> None:
        if any(DATA & names for names in layout.along):
            _let_fsdp2_sum(modules)
        self._dimensions: dict[Tensor, frozenset[str]] = {}
        self._parameters_along: dict[frozenset[str], list[nn.Parameter]] = {}
        for module in modules.values():
            marks = expert_marks(module)
            tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            for name, tensor in tensors:
                if tensor in self._dimensions:
                    continue
                dimensions, sharded = _dimensions(tensor, marks.get(name), layout)
                if dimensions:
                    self._dimensions[tensor] = dimensions
                if sharded and isinstance(tensor, nn.Parameter):
                    self._parameters_along.setdefault(sharded, []).append(tensor)
        self._sharded = frozenset(parameter for parameters in self._parameters_along.values() for parameter in parameters)
        _refuse_other_passes(frozenset().union(*self._parameters_along), layout)
        self._peers = {dimensions: Peers(transport, layout.along[dimensions]) for dimensions in self._parameters_along}
        self._lockstep = Peers(transport, layout.along[layout.lockstep]) if layout.lockstep else None

    def dimensions_of(self, tensor: Tensor) -> frozenset[str]:
        """Returns the mesh dimensions of a tensor's own mesh. The pipeline does not sum its gradients along these."""
        return self._dimensions.get(tensor, frozenset())

    def is_any_along(self, dimension: str) -> bool:
        """Returns whether a parameter is sharded along a mesh dimension."""
        return any(dimension in dimensions for dimensions in self._parameters_along)

    def is_sharded(self, parameter: Tensor) -> bool:
        """Returns whether a parameter is sharded, so that the norm of the whole parameter needs `whole_norms`."""
        return parameter in self._sharded

    def whole_norms(self, norms: Mapping[nn.Parameter, float], order: float) -> dict[nn.Parameter, float]:
        """Returns the norms of whole gradients, from those of this rank's shards; some have a gradient only on other ranks.

        Collective: all ranks with shards of the same parameters must call it.
        """
        whole = {}
        for dimensions, parameters in self._parameters_along.items():
            peers, mine = self._peers[dimensions], [norms.get(parameter) for parameter in parameters]
            with peers.collective("combining the norms of sharded gradients"):
                gathered = peers.gather_objects(mine)
            for parameter, *parts in zip(parameters, *gathered, strict=True):
                there = [norm for norm in parts if norm is not None]
                if there:
                    whole[parameter] = _joined(there, order)
        return whole

    def largest(self, number: float, doing: str) -> float:
        """Returns the maximum over all ranks that run the same passes. Collective: all of them must call it."""
        if self._lockstep is None:
            return number
        with self._lockstep.collective(doing):
            gathered: list[float] = self._lockstep.gather_objects(number)
        return max(gathered)


def _dimensions(tensor: Tensor, mark: ExpertMark | None, layout: Layout) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the mesh dimensions of a tensor's own mesh, and those of them along which it is sharded."""
    if mark is not None:
        along = layout.dimensions_of(mark.mesh.mesh.flatten().tolist())
        return along, along
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return frozenset(), frozenset()
    sharded: frozenset[str] = frozenset()
    for number, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            place = tuple(slice(None) if other == number else at for other, at in enumerate(mesh.get_coordinate()))
            sharded |= layout.dimensions_of(mesh.mesh[place].tolist())
    return layout.dimensions_of(mesh.mesh.flatten().tolist()), sharded


def _refuse_other_passes(dimensions: frozenset[str], layout: Layout) -> None:
    """Raises `InputError` if ranks with shards of the same parameter may run different passes."""
    others = sorted(name for name in dimensions - layout.lockstep if len(layout.along[frozenset({name})]) > 1)
    if others:
        raise InputError(
            "parameters are sharded along {others}, whose ranks may run different passes",
            others=", ".join(map(repr, others)),
            remedy="shard experts along a mesh dimension named 'ep', and other parameters along 'tp' or 'dp_shard'",
        )


def _joined(norms: list[float], order: float) -> float:
    """Returns the norm of a vector from those of its parts."""
    if order == 0:
        return sum(norms)
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64, device="cpu"), order))


def _let_fsdp2_sum(modules: Mapping[int, nn.Module]) -> None:
    """Makes FSDP2 sum gradients over ranks instead of averaging them: each rank's loss is its part of the mean over the whole batch."""
    for module in modules.values():
        for part in module.modules():
            # The second name is that of torch before 2.8.
            choose = getattr(part, "set_gradient_divide_factor", None) or getattr(part, "set_reduce_scatter_divide_factor", None)
            if choose is not None:
                choose(1.0)
            only_sums = getattr(part, "set_force_sum_reduction_for_comms", None)
            if only_sums is not None:  # else gradients of 32 and 16 bits are scaled in the collective, which gloo does not support
                only_sums(True)
