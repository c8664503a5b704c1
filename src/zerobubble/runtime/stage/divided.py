"""Parameters of which each rank holds a part, as DTensors or as marked experts: along which dimensions, and the norms of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.transport.mesh import Layout
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.experts import ExpertMark, expert_marks


class DividedTensors:
    """What ranks divide of the parameters and buffers in this rank's `modules`.

    Raises `InputError` for tensors that are divided over other ranks than those along dimensions of the mesh.
    """

    def __init__(self, transport: Transport, layout: Layout, modules: Mapping[int, nn.Module]) -> None:
        self._dimensions: dict[Tensor, frozenset[str]] = {}
        self._holders: dict[frozenset[str], list[nn.Parameter]] = {}
        for module in modules.values():
            marks = expert_marks(module)
            tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            for name, tensor in tensors:
                if tensor in self._dimensions:
                    continue
                dimensions, parted = _dimensions(tensor, marks.get(name), layout)
                if dimensions:
                    self._dimensions[tensor] = dimensions
                if parted and isinstance(tensor, nn.Parameter):
                    self._holders.setdefault(parted, []).append(tensor)
        self._known = frozenset(parameter for parameters in self._holders.values() for parameter in parameters)
        _refuse_apart(frozenset().union(*self._holders), layout)
        self._peers = {dimensions: Peers(transport, layout.along[dimensions]) for dimensions in self._holders}
        self._lockstep = Peers(transport, layout.along[layout.lockstep]) if layout.lockstep else None

    def dimensions_of(self, tensor: Tensor) -> frozenset[str]:
        """The dimensions of the mesh along which a tensor is no copy of the others': whoever divides it takes care of it there."""
        return self._dimensions.get(tensor, frozenset())

    def is_any_along(self, dimension: str) -> bool:
        """Whether ranks along a dimension of the mesh hold other parts of some parameter."""
        return any(dimension in dimensions for dimensions in self._holders)

    def is_known(self, parameter: Tensor) -> bool:
        """Whether `whole_norms` gives the norm of the whole of a parameter from those of its parts."""
        return parameter in self._known

    def whole_norms(self, norms: Mapping[nn.Parameter, float], order: float) -> dict[nn.Parameter, float]:
        """The norms of whole gradients from those of this rank's parts; some may have a gradient on other ranks alone.

        All ranks that hold parts of the same parameters call it.
        """
        found = {}
        for dimensions, parameters in self._holders.items():
            peers, mine = self._peers[dimensions], [norms.get(parameter) for parameter in parameters]
            with peers.collective("adding up the norms of gradients that ranks divide"):
                told = peers.gather_objects(mine)
            for parameter, *parts in zip(parameters, *told, strict=True):
                there = [norm for norm in parts if norm is not None]
                if there:
                    found[parameter] = _joined(there, order)
        return found

    def largest(self, number: float, doing: str) -> float:
        """The largest of the numbers of all ranks that run the same passes; all of them call it."""
        if self._lockstep is None:
            return number
        with self._lockstep.collective(doing):
            told: list[float] = self._lockstep.gather_objects(number)
        return max(told)


def _dimensions(tensor: Tensor, mark: ExpertMark | None, layout: Layout) -> tuple[frozenset[str], frozenset[str]]:
    """The dimensions along which somebody takes care of a tensor, and those of them along which other ranks hold other parts of it."""
    if mark is not None:
        along = layout.dimensions_of(mark.mesh.mesh.flatten().tolist())
        return along, along
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return frozenset(), frozenset()
    parted: frozenset[str] = frozenset()
    for number, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            place = tuple(slice(None) if other == number else at for other, at in enumerate(mesh.get_coordinate()))
            parted |= layout.dimensions_of(mesh.mesh[place].tolist())
    return layout.dimensions_of(mesh.mesh.flatten().tolist()), parted


def _refuse_apart(dimensions: frozenset[str], layout: Layout) -> None:
    """Raise `InputError` where ranks that hold parts of parameters need not run the same passes."""
    apart = sorted(name for name in dimensions - layout.lockstep if len(layout.along[frozenset({name})]) > 1)
    if apart:
        raise InputError(
            f"parameters are divided along {', '.join(map(repr, apart))}, whose ranks may run other passes than each other: divide experts "
            "along a dimension of the mesh that is named 'ep', and other parameters along 'tp' or 'dp_shard'"
        )


def _joined(norms: list[float], order: float) -> float:
    """The norm of a vector from those of its parts."""
    if order == 0:
        return sum(norms)
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64, device="cpu"), order))
