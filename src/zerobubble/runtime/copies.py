"""Stages that live on several ranks, one copy a route: equal at the start, their gradients summed at the end of every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.rules import Stuff
from zerobubble.runtime.gradients import Gradients
from zerobubble.runtime.messages.transport import Transport, wait

_TOPIC = 4


class Copies:
    """The stages of this rank that other ranks hold too, `ranks[stage]` in the order of their routes.

    A rank that holds a stage on two routes has one module for both. Gradients that were there before a step are kept out of the sum.
    """

    def __init__(self, placement: Placement, modules: dict[int, nn.Module], transport: Transport, gradients: Gradients) -> None:
        self._transport = transport
        self._gradients = gradients
        homes = {stage: tuple(dict.fromkeys(route[stage] for route in placement.routes)) for stage in modules}
        self.ranks = {stage: ranks for stage, ranks in homes.items() if len(ranks) > 1}
        self._modules = modules
        self._aside: dict[nn.Parameter, Tensor | None] = {}

    def level(self) -> None:
        """Give every copy the parameters and buffers of the one on the first route; raises `InputError` where their shapes differ."""
        owners: dict[Tensor, str] = {}
        mine = {stage: _outline(stage, self._modules[stage], owners) for stage in sorted(self.ranks)}
        told = self._transport.gather_objects(mine)
        for stage in sorted({stage for outlines in told for stage in outlines}):
            first, *others = [rank for rank, outlines in enumerate(told) if stage in outlines]
            for rank in others:
                if told[rank][stage] != told[first][stage]:
                    differ = "differ in their parameters or buffers, or in which they share"
                    raise InputError(f"the copies of stage {stage} on ranks {first} and {rank} {differ}")
        for stage, ranks in sorted(self.ranks.items()):
            tensors = [t.detach() for t in (*self._modules[stage].parameters(), *self._modules[stage].buffers())]
            if ranks[0] == self._transport.rank:
                for rank in ranks[1:]:
                    for work in [self._send(tensor, rank) for tensor in tensors]:
                        wait(work, rank, f"sending stage {stage} to its copy")
            else:
                for tensor in tensors:
                    tensor.copy_(self._receive(tensor, ranks[0]))

    def set_aside(self) -> None:
        """Before a step: take the gradients of earlier steps out of `.grad`."""
        for parameter in self._parameters():
            self._aside[parameter] = self._gradients.of(parameter)
            self._gradients.put(parameter, None)

    def sum(self) -> None:
        """After a step: give every copy the sum of this step's gradients, added to what was set aside; a shared parameter counts once."""
        summed: set[nn.Parameter] = set()
        for stage, ranks in sorted(self.ranks.items()):
            parameters = [p for p in self._modules[stage].parameters() if p.requires_grad and p not in summed]
            self._sum_stage(parameters, ranks)
            summed.update(parameters)
        for parameter, before in self._aside.items():
            if before is not None:
                more = self._gradients.of(parameter)
                self._gradients.put(parameter, before if more is None else before.add_(more))
        self._aside.clear()

    def _parameters(self) -> Iterable[nn.Parameter]:
        return dict.fromkeys(p for stage in self.ranks for p in self._modules[stage].parameters())

    def _sum_stage(self, parameters: list[nn.Parameter], ranks: tuple[int, ...]) -> None:
        """Every copy sends its gradients to all others and adds them up in the order of the routes, so that all get the same bits."""
        rank, others = self._transport.rank, [other for other in ranks if other != self._transport.rank]
        mine = [self._gradients.of(parameter) for parameter in parameters]
        present = [float(gradient is not None) for gradient in mine]
        telling = [self._transport.tell(present, other, _TOPIC) for other in others]
        sending = [(self._send(gradient, other), other) for other in others for gradient in mine if gradient is not None]
        parts = {rank: mine}
        for other in others:
            work, flags = self._transport.listen(len(parameters), other, _TOPIC)
            wait(work, other, "summing the gradients of a stage's copies")
            parts[other] = [
                self._receive(p, other, self._gradients.dtype) if flag else None for p, flag in zip(parameters, flags.tolist(), strict=True)
            ]
        for parameter, *gradients in zip(parameters, *(parts[home] for home in ranks), strict=True):
            found = [gradient for gradient in gradients if gradient is not None]
            self._gradients.put(parameter, sum(found[1:], found[0].clone()) if found else None)
        for work, other in [*sending, *((work, other) for (work, _), other in zip(telling, others, strict=True))]:
            wait(work, other, "summing the gradients of a stage's copies")

    def _send(self, tensor: Tensor, peer: int) -> Any:
        return self._transport.sender(Stuff.GRADIENT, peer)(tensor.contiguous())

    def _receive(self, like: Tensor, peer: int, dtype: torch.dtype | None = None) -> Tensor:
        room = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
        wait(self._transport.receiver(Stuff.GRADIENT, peer)(room), peer, "receiving from a stage's copy")
        return room


def _outline(stage: int, module: nn.Module, owners: dict[Tensor, str]) -> list[tuple[str, tuple[int, ...], str, str]]:
    """Names, shapes and types of what a stage holds, and the first place of the rank that each is held in, which `owners` knows."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tuple(tensor.shape), str(tensor.dtype), owners.setdefault(tensor, f"{stage} {name}")) for name, tensor in named]
