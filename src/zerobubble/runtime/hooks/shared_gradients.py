"""Parameters that several stages or ranks hold: equal at the start, their gradients summed at the end of every step.

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
from zerobubble.runtime.hooks.shared_parameters import (
    ParameterInfos,
    ParameterName,
    SharedGroup,
    SharedParameter,
    parameter_infos,
    shared_groups,
)
from zerobubble.runtime.step.hook import StepHook, TrainingStep
from zerobubble.runtime.transport.control import Sending, Topic
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients
from zerobubble.runtime.values.memory import as_memory
from zerobubble.runtime.values.weight_caches import changing_weights

_DOING = "summing the gradients of a parameter that several ranks hold"
_EQUALIZING = "making what is tied or copied equal"


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
        peers: Peers,
        tied: tuple[tuple[ParameterName, ...], ...],
        gradients: Gradients = IN_GRAD,
    ) -> None:
        ranks_of = {stage: tuple(dict.fromkeys(route[stage] for route in placement.routes)) for stage in range(placement.num_stages)}
        self._copied = {stage: ranks for stage, ranks in ranks_of.items() if len(ranks) > 1}
        self._modules = modules
        self._copied_modules = {stage: module for stage, module in modules.items() if stage in self._copied}
        self._buffers = CopiedBuffers(self._copied_modules)
        self._peers = peers
        self._gradients = gradients
        self._tied = tied
        # The shared parameters of this rank, each under all its names.
        self._parameters: dict[ParameterName, nn.Parameter] = {}
        self._sums: list[_GroupSum] = []
        # During a step: the sums that are still to be sent, and the stages that may still add to them.
        self._unsent: list[_GroupSum] = []
        self._unfinished: set[int] = set()
        # What earlier steps left in the gradients, kept out of this step's sums.
        self._earlier: dict[nn.Parameter, Tensor | None] = {}
        self._stages: set[int] = set()
        self.counted_elsewhere: set[nn.Parameter] = set()

    @property
    def is_needed(self) -> bool:
        """Whether anything on this rank is shared."""
        return bool(self.completes_at_end or self._copied_modules)

    @changing_weights()
    def broadcast_initial_values(self, *, are_equal: bool = False) -> None:
        """Give every copy the values of the first: of a tied parameter, that named first; of a copied stage, that of the first route.

        Where they `are_equal` already, nothing is sent but what they are.

        Raises `InputError` with all faults, the same on every rank.
        """
        infos = self._agree_on_parameters()
        groups = shared_groups(self._tied, infos, self._copied)
        self._keep_own(groups, infos[self._peers.rank])
        pairs = {pair for group in groups for pair in permutations(group.ranks, 2)}
        self._peers.open_channels({Channel(source, destination, Stuff.WORK) for source, destination in pairs})
        if are_equal:
            return
        for group in groups:
            for shared in group.parameters:
                self._broadcast_parameter(shared, group.ranks)
        for stage, ranks in self._copied.items():
            if stage in self._modules:
                for buffer in self._modules[stage].buffers():
                    self._peers.replicate(buffer, ranks[0], _EQUALIZING, ranks)

    def _agree_on_parameters(self) -> list[ParameterInfos]:
        """What each rank tells of its parameters; raises `InputError` where ranks name others as tied, or copies of a stage differ."""
        mine = parameter_infos(self._modules) if self._tied or self._copied else {}
        with self._peers.collective("comparing what is tied and the copies of stages"):
            told = self._peers.gather_objects((self._tied, mine, self._buffer_shapes()))
        if any(tied != self._tied for tied, _, _ in told):
            listed = "; ".join(f"rank {rank} has {_text(tied)}" for rank, (tied, _, _) in zip(self._peers.members, told, strict=True))
            raise InputError(f"ranks disagree on tied: {listed}")
        infos = [theirs for _, theirs, _ in told]
        self._compare_copies(infos, [buffers for _, _, buffers in told])
        return infos

    def _buffer_shapes(self) -> dict[int, list[tuple[str, tuple[int, ...], str]]]:
        return {
            stage: [(name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in module.named_buffers()]
            for stage, module in self._copied_modules.items()
        }

    def _compare_copies(self, infos: list[ParameterInfos], buffers: list[dict[int, Any]]) -> None:
        for stage, ranks in sorted(self._copied.items()):
            first, *others = sorted(ranks)
            told = {rank: (_comparable(infos[rank], stage), buffers[rank][stage]) for rank in (first, *others)}
            for rank in others:
                if told[rank] != told[first]:
                    differ = "differ in their parameters or buffers, or in which they share"
                    raise InputError(f"the copies of stage {stage} on ranks {first} and {rank} {differ}")

    def _keep_own(self, groups: list[SharedGroup], infos: ParameterInfos) -> None:
        """Keep what concerns this rank, which told `infos`."""
        rank = self._peers.rank
        own = [group for group in groups if rank in group.ranks]
        by_name = {stage: dict(module.named_parameters(remove_duplicate=False)) for stage, module in self._modules.items()}
        shared_names = {name for group in own for shared in group.parameters for name in shared.names[rank]}
        self._parameters = {name: by_name[name.stage][name.name] for name, info in infos.items() if info.first_name in shared_names}
        self._sums = [_GroupSum(group, self._parameters, self._peers, self._gradients) for group in own]
        self._stages = {stage for group_sum in self._sums for stage in group_sum.stages}
        counted_here = {self._parameters.get(shared.counted_name) for group in own for shared in group.parameters}
        self.counted_elsewhere = set(self._parameters.values()) - counted_here
        self.completes_at_end = frozenset(self._parameters.values())

    def _broadcast_parameter(self, shared: SharedParameter, ranks: tuple[int, ...]) -> None:
        source, rank = shared.source, self._peers.rank
        held = [self._parameters[name].detach() for name in shared.names.get(rank, ())]
        if held:
            first = self._parameters[source.name].detach() if source.rank == rank else held[0]
            self._peers.replicate(first, source.rank, _EQUALIZING, ranks)
            for tensor in held:
                tensor.copy_(first)

    def on_step_begin(self, step: TrainingStep) -> None:
        """Take the gradients of earlier steps out of `.grad`."""
        self._refuse_other_parameters()
        self._buffers.look()
        for parameter in dict.fromkeys(self._parameters.values()):
            self._earlier[parameter] = self._gradients.of(parameter)
            self._gradients.put(parameter, None)
        self._unfinished = set(self._stages)
        self._unsent = list(self._sums)

    def _refuse_other_parameters(self) -> None:
        """Groups were made with the pipeline: raises `InputError` where a stage has other parameters now."""
        for stage in self._stages:
            now = dict(self._modules[stage].named_parameters(remove_duplicate=False))
            then = {name.name: parameter for name, parameter in self._parameters.items() if name.stage == stage}
            names = {*then, *(now if stage in self._copied else ())}
            other = [name for name in sorted(names) if now.get(name) is not then.get(name)]
            if other:
                raise InputError(
                    f"stage {stage} has not the parameters it had when the pipeline was made: {', '.join(other)} came, went or changed, "
                    "and other stages or ranks share them; make a new Pipeline"
                )

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Send what is complete now, in the order that all ranks keep."""
        self._unfinished.discard(stage)
        while self._unsent and not self._unsent[0].stages & self._unfinished:
            self._unsent.pop(0).send()

    def on_step_end(self, step: TrainingStep) -> None:
        """Give every copy the sum of this step's gradients, added to those of earlier steps.

        Raises `InputError` where the step changed a buffer of a copied stage.
        """
        self._buffers.refuse_changed()
        for group_sum in self._sums:
            group_sum.finish()
        for parameter, before in self._earlier.items():
            if before is not None:
                more = self._gradients.of(parameter)
                self._gradients.put(parameter, before if more is None else before.add_(more))
        self._earlier.clear()

    def on_close(self) -> None:
        """Let go of everything in flight."""
        for group_sum in self._sums:
            group_sum.clear()


class _GroupSum:
    """This rank's part in the sum over one shared group.

    It adds up its own gradients first, from the last stage to the first, and then the ranks', that of the last stage first: the order of
    autograd where stages lie on ranks in order. All ranks add in this order, so all get the same bits.
    """

    def __init__(self, group: SharedGroup, parameters: dict[ParameterName, nn.Parameter], peers: Peers, gradients: Gradients) -> None:
        self._peers = peers
        self._gradients = gradients
        self._ranks = group.ranks
        self._others = [rank for rank in group.ranks if rank != peers.rank]
        # For each shared parameter, those of this rank that are it.
        self._held = [[parameters[name] for name in shared.names[peers.rank]] for shared in group.parameters]
        self._own: list[Tensor | None] = []
        self.stages = group.stages[peers.rank]
        self._sending: list[tuple[Any, int]] = []
        self._telling: list[Sending] = []

    def send(self) -> None:
        """Start sending which gradients there are, then these, to every other rank."""
        self._own = [self._as_added(_total([self._gradients.of(parameter) for parameter in held])) for held in self._held]
        present = GradientFlags(tuple(gradient is not None for gradient in self._own))
        for other in self._others:
            self._telling.append(self._peers.send_control(present, other))
            self._sending += [(_send(self._peers, gradient, other), other) for gradient in self._own if gradient is not None]

    def _as_added(self, gradient: Tensor | None) -> Tensor | None:
        """A gradient as every rank adds it: a sparse one is made dense where it goes to others."""
        return gradient.to_dense() if gradient is not None and gradient.is_sparse and self._others else gradient

    def finish(self) -> None:
        """Wait for the others' gradients and leave the sum in `.grad`, a tensor for each parameter."""
        found = {self._peers.rank: self._own}
        for other in self._others:
            flags = self._peers.expect_control(GradientFlags, len(self._held), other).wait(_DOING)
            found[other] = [self._receive(held[0], other) if there else None for held, there in zip(self._held, flags.present, strict=True)]
        for held, *gradients in zip(self._held, *(found[rank] for rank in self._ranks), strict=True):
            total = _total(gradients)
            for parameter in held:
                self._gradients.put(parameter, total if parameter is held[0] or total is None else total.clone())
        for work, other in self._sending:
            self._peers.wait(work, other, _DOING)
        for sending in self._telling:
            sending.wait(_DOING)
        self.clear()

    def _receive(self, like: Tensor, peer: int) -> Tensor:
        return _receive(self._peers, like, peer, self._gradients.dtype)

    def clear(self) -> None:
        """Let go of everything in flight."""
        self._own = []
        self._sending.clear()
        self._telling.clear()


def _total(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are there, in order."""
    found = [gradient for gradient in gradients if gradient is not None]
    return sum(found[1:], found[0]) if found else None


def _send(peers: Peers, tensor: Tensor, peer: int) -> Any:
    return peers.sender(Stuff.WORK, peer)(as_memory(tensor))


def _receive(peers: Peers, like: Tensor, peer: int, dtype: torch.dtype | None = None) -> Tensor:
    room = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
    peers.wait(peers.receiver(Stuff.WORK, peer)(room), peer, "receiving what is tied or copied")
    return room


def _comparable(infos: ParameterInfos, stage: int) -> list[Any]:
    """What the copies of a stage must have in common of their parameters: all but whether they train."""
    return [(name.name, info._replace(requires_grad=True)) for name, info in infos.items() if name.stage == stage]


def _text(tied: tuple[tuple[ParameterName, ...], ...]) -> str:
    return ", ".join("[" + ", ".join(map(str, group)) + "]" for group in tied) or "none"
