"""Parameters that live in several places of the model: equal at the start, their gradients summed at the end of every step.

They are those of stages with a copy on each route of a bidirectional schedule, and those that the user tied. Each rank sends its
gradients when its last pass that adds to them is over, to the ranks that hold the same parameter and to no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.program import Channel
from zerobubble.rules import Stuff
from zerobubble.runtime.hooks.copied_buffers import CopiedBuffers
from zerobubble.runtime.hooks.shared_parameters import Outline, Place, SharedGroup, outline, shared_groups
from zerobubble.runtime.step.hook import StepHook, TrainingStep
from zerobubble.runtime.transport.control import Sending, Topic
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients
from zerobubble.runtime.values.memory import as_memory

_DOING = "summing the gradients of a parameter that several ranks hold"


@dataclass(frozen=True, slots=True)
class GradientFlags:
    """Which of the parameters that ranks share have a gradient on the rank that tells it, in the order of their group."""

    topic: ClassVar[Topic] = Topic.SHARED_GRADIENTS

    present: tuple[bool, ...]

    def numbers(self) -> tuple[float, ...]:
        return tuple(map(float, self.present))

    @classmethod
    def read(cls, numbers: Tensor) -> GradientFlags:
        return cls(tuple(map(bool, numbers.tolist())))


class SharedGradients(StepHook):
    """Sums the gradients of the parameters of this rank that other ranks, or other stages of this rank, hold too.

    Gradients that were there before a step are kept out of the sum. Each rank sends the gradients of a stage as soon as they are ready, and
    adds up those of all at the end of the step. `counted_elsewhere` are the shared parameters that another rank or stage already counts in
    the norm of the whole model. Call `broadcast_initial_values` once before the first step.
    """

    def __init__(
        self,
        placement: Placement,
        modules: dict[int, nn.Module],
        transport: Transport,
        tied: tuple[tuple[Place, ...], ...],
        gradients: Gradients = IN_GRAD,
    ) -> None:
        homes = {stage: tuple(dict.fromkeys(route[stage] for route in placement.routes)) for stage in range(placement.num_stages)}
        self._copied = {stage: ranks for stage, ranks in homes.items() if len(ranks) > 1}
        self._modules = modules
        self._buffers = CopiedBuffers({stage: module for stage, module in modules.items() if stage in self._copied})
        self._transport = transport
        self._gradients = gradients
        self._tied = tied
        self._known: dict[Place, nn.Parameter] = {}
        self._sums: list[_Sum] = []
        self._unsent: list[_Sum] = []
        self._open: set[int] = set()
        self._aside: dict[nn.Parameter, Tensor | None] = {}
        self._stages: set[int] = set()
        self.counted_elsewhere: set[nn.Parameter] = set()

    @property
    def is_needed(self) -> bool:
        """Whether anything on this rank is held in several places."""
        return bool(self.completes_at_end) or any(stage in self._copied for stage in self._modules)

    def broadcast_initial_values(self) -> None:
        """Give every copy the values of the first: of a tied parameter, that named first; of a copied stage, that of the first route.

        Raises `InputError` with all faults, the same on every rank.
        """
        needed = bool(self._tied or self._copied)
        with self._transport.collective("comparing what is tied and the copies of stages"):
            told = self._transport.gather_objects((self._tied, outline(self._modules) if needed else {}, self._buffer_shapes()))
        if any(tied != self._tied for tied, _, _ in told):
            raise InputError("ranks disagree on tied: " + "; ".join(f"rank {r} has {_text(tied)}" for r, (tied, _, _) in enumerate(told)))
        outlines = [outlined for _, outlined, _ in told]
        self._compare_copies(outlines, [buffers for _, _, buffers in told])
        groups = shared_groups(self._tied, outlines, self._copied)
        self._know(groups, outlines[self._transport.rank])
        pairs = {pair for shared_group in groups for pair in permutations(shared_group.ranks, 2)}
        self._transport.open_channels({Channel(source, destination, Stuff.WORK) for source, destination in pairs})
        for shared_group in groups:
            for row in shared_group.rows:
                held = [self._known[place].detach() for place in row.members.get(self._transport.rank, ())]
                first = self._known[row.source.place].detach() if row.source.rank == self._transport.rank else None
                self._spread(first, held, row.source.rank, shared_group.ranks)
        for stage, ranks in self._copied.items():
            for buffer in self._modules[stage].buffers() if stage in self._modules else ():
                self._spread(buffer if self._transport.rank == ranks[0] else None, [buffer], ranks[0], ranks)

    def _know(self, groups: list[SharedGroup], mine: Outline) -> None:
        """Keep what concerns this rank."""
        rank = self._transport.rank
        groups = [shared_group for shared_group in groups if rank in shared_group.ranks]
        by_name = {stage: dict(module.named_parameters(remove_duplicate=False)) for stage, module in self._modules.items()}
        bound = {place for shared_group in groups for row in shared_group.rows for place in row.members[rank]}
        self._known = {place: by_name[place.stage][place.name] for place, held in mine.items() if held.first in bound}
        self._sums = [_Sum(shared_group, self._known, self._transport, self._gradients) for shared_group in groups]
        self._stages = {stage for one in self._sums for stage in one.stages}
        counted = {self._known.get(row.counted) for shared_group in groups for row in shared_group.rows}
        self.counted_elsewhere = set(self._known.values()) - counted
        self.completes_at_end = frozenset(self._known.values())

    def _buffer_shapes(self) -> dict[int, list[tuple[str, tuple[int, ...], str]]]:
        copied = {stage: module for stage, module in self._modules.items() if stage in self._copied}
        return {stage: [(name, tuple(b.shape), str(b.dtype)) for name, b in module.named_buffers()] for stage, module in copied.items()}

    def _compare_copies(self, outlines: list[Outline], buffers: list[dict[int, Any]]) -> None:
        for stage, ranks in sorted(self._copied.items()):
            first, *others = sorted(ranks)
            told = {rank: (_without_training(outlines[rank], stage), buffers[rank][stage]) for rank in (first, *others)}
            for rank in others:
                if told[rank] != told[first]:
                    differ = "differ in their parameters or buffers, or in which they share"
                    raise InputError(f"the copies of stage {stage} on ranks {first} and {rank} {differ}")

    def _spread(self, first: Tensor | None, held: Sequence[Tensor], source: int, ranks: tuple[int, ...]) -> None:
        """Give `held` the values of `first`, which the rank `source` has, None elsewhere."""
        if not held:
            return
        if first is None:
            first = _receive(self._transport, held[0], source)
        else:
            for rank in ranks:
                if rank != source:
                    self._transport.wait(_send(self._transport, first, rank), rank, "sending what is tied or copied")
        for tensor in held:
            tensor.copy_(first)

    def on_step_begin(self, step: TrainingStep) -> None:
        """Take the gradients of earlier steps out of `.grad`."""
        self._refuse_new()
        self._buffers.look()
        for parameter in dict.fromkeys(self._known.values()):
            self._aside[parameter] = self._gradients.of(parameter)
            self._gradients.put(parameter, None)
        self._open = set(self._stages)
        self._unsent = list(self._sums)

    def _refuse_new(self) -> None:
        """The rows were made with the pipeline: raises `InputError` where a stage has other parameters now."""
        for stage in self._stages:
            now = dict(self._modules[stage].named_parameters(remove_duplicate=False))
            known = {place.name: parameter for place, parameter in self._known.items() if place.stage == stage}
            names = {*known, *(now if stage in self._copied else ())}
            other = [name for name in sorted(names) if now.get(name) is not known.get(name)]
            if other:
                raise InputError(
                    f"stage {stage} has not the parameters it had when the pipeline was made: {', '.join(other)} came, went or changed, "
                    "and other places share them; make a new Pipeline"
                )

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Send what is whole now, in the order that all ranks keep."""
        self._open.discard(stage)
        while self._unsent and not self._unsent[0].stages & self._open:
            self._unsent.pop(0).send()

    def on_step_end(self, step: TrainingStep) -> None:
        """Give every copy the sum of this step's gradients, added to what was set aside.

        Raises `InputError` where the step changed a buffer of a copied stage.
        """
        self._buffers.refuse_changed()
        for one in self._sums:
            one.finish()
        for parameter, before in self._aside.items():
            if before is not None:
                more = self._gradients.of(parameter)
                self._gradients.put(parameter, before if more is None else before.add_(more))
        self._aside.clear()

    def on_close(self) -> None:
        """Let go of everything in flight."""
        for one in self._sums:
            one.clear()


class _Sum:
    """This rank's part in the sum over one shared group.

    It adds up its own gradients first, from the last stage to the first, and then the ranks', that of the last stage first: the order of
    autograd where stages lie on ranks in order. All ranks add in this order, so all get the same bits.
    """

    def __init__(self, shared_group: SharedGroup, known: dict[Place, nn.Parameter], transport: Transport, gradients: Gradients) -> None:
        self._transport = transport
        self._gradients = gradients
        self._ranks = shared_group.ranks
        self._others = [rank for rank in shared_group.ranks if rank != transport.rank]
        self._rows = [[known[place] for place in row.members[transport.rank]] for row in shared_group.rows]
        self._own: list[Tensor | None] = []
        self.stages = shared_group.stages[transport.rank]
        self._sending: list[tuple[Any, int]] = []
        self._telling: list[Sending] = []

    def send(self) -> None:
        """Start sending which gradients there are, then these, to every other rank."""
        self._own = [self._ready(_added([self._gradients.of(parameter) for parameter in row])) for row in self._rows]
        present = GradientFlags(tuple(gradient is not None for gradient in self._own))
        for other in self._others:
            self._telling.append(self._transport.tell(present, other))
            self._sending += [(_send(self._transport, gradient, other), other) for gradient in self._own if gradient is not None]

    def _ready(self, gradient: Tensor | None) -> Tensor | None:
        """A gradient as every rank adds it: a sparse one is made dense where it goes to others."""
        return gradient.to_dense() if gradient is not None and gradient.is_sparse and self._others else gradient

    def finish(self) -> None:
        """Wait for the others' gradients and leave the sum in `.grad`, a tensor for each parameter."""
        parts = {self._transport.rank: self._own}
        for other in self._others:
            flags = self._transport.listen(GradientFlags, len(self._rows), other).wait(_DOING)
            told = zip(self._rows, flags.present, strict=True)
            parts[other] = [_receive(self._transport, row[0], other, self._gradients.dtype) if flag else None for row, flag in told]
        for row, *gradients in zip(self._rows, *(parts[rank] for rank in self._ranks), strict=True):
            total = _added(gradients)
            for parameter in row:
                self._gradients.put(parameter, total if parameter is row[0] or total is None else total.clone())
        for work, other in self._sending:
            self._transport.wait(work, other, _DOING)
        for sending in self._telling:
            sending.wait(_DOING)
        self.clear()

    def clear(self) -> None:
        """Let go of everything in flight."""
        self._own = []
        self._sending.clear()
        self._telling.clear()


def _added(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are there, in order."""
    found = [gradient for gradient in gradients if gradient is not None]
    return sum(found[1:], found[0]) if found else None


def _send(transport: Transport, tensor: Tensor, peer: int) -> Any:
    return transport.sender(Stuff.WORK, peer)(as_memory(tensor))


def _receive(transport: Transport, like: Tensor, peer: int, dtype: torch.dtype | None = None) -> Tensor:
    room = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
    transport.wait(transport.receiver(Stuff.WORK, peer)(room), peer, "receiving what is tied or copied")
    return room


def _without_training(outlined: Outline, stage: int) -> list[Any]:
    return [(place.name, held[:-1]) for place, held in outlined.items() if place.stage == stage]


def _text(tied: tuple[tuple[Place, ...], ...]) -> str:
    return ", ".join("[" + ", ".join(map(str, group)) + "]" for group in tied) or "none"
