"""Sums the gradients of parameters that several stages or ranks hold, and makes the parameters equal at the start.

Stages with a copy on each route of a bidirectional schedule share parameters, and so do places that the user tied. Each rank sends its
gradients to the other holders as soon as its last pass that adds to them is over. Sends are in one order of groups on all ranks, and each
rank adds the contributions in one order of ranks: so nothing deadlocks, and all holders get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.program import Channel
from zerobubble.rules import ValueKind
from zerobubble.runtime.hooks.equal_optimizers import SharedWith, neighbors
from zerobubble.runtime.hooks.replicas import EarlierGradients
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
from zerobubble.runtime.transport.terms import each_has
from zerobubble.runtime.values.buffers import changing_weights
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients
from zerobubble.runtime.values.memory import as_memory

_DOING = "summing the gradients of a parameter that several ranks hold"
_EQUALIZING = "making what is tied or copied equal"


@dataclass(frozen=True, slots=True)
class GradientFlags:
    """Which shared parameters have a gradient on the sending rank, in the order of their group."""

    topic: ClassVar[Topic] = Topic.SHARED_GRADIENTS

    present: tuple[bool, ...]

    def numbers(self) -> tuple[float, ...]:
        return tuple(map(float, self.present))

    @classmethod
    def read(cls, numbers: Tensor) -> GradientFlags:
        return cls(tuple(map(bool, numbers.tolist())))


class SharedGradients(StepHook):
    """Sums the gradients of this rank's parameters that other ranks, or other stages of this rank, hold too.

    Gradients from before a step are excluded from the sum. Each rank sends the gradients of a stage as soon as they are ready, and adds up
    all of them at the end of the step. `counted_elsewhere` are the shared parameters that another rank or stage counts in the norm of the
    whole model. Call `broadcast_initial_values` once before the first step.
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
        self._peers = peers
        self._gradients = gradients
        self._tied = tied
        # The shared parameters of this rank, each under all its names.
        self._parameters: dict[ParameterName, nn.Parameter] = {}
        self._groups: list[SharedGroup] = []
        self._sums: list[_GroupSum] = []
        # During a step: the sums that are still to be sent, and the stages that may still add to them.
        self._unsent: list[_GroupSum] = []
        self._unfinished: set[int] = set()
        self._earlier = EarlierGradients(lambda: self.completes_at_end, gradients)
        self._stages: set[int] = set()
        self.counted_elsewhere: set[nn.Parameter] = set()
        self.names: set[str] = set()
        """The names in their stages of all parameters that several stages or ranks hold, also of other ranks."""

    @property
    def is_needed(self) -> bool:
        """Whether anything on this rank is shared."""
        return bool(self.completes_at_end or self._copied_modules)

    @property
    def copied_stages(self) -> list[int]:
        """The stages of this rank with a copy on another route."""
        return list(self._copied_modules)

    def why_shared(self) -> dict[nn.Parameter, str]:
        """Returns this rank's shared parameters, and for each why it is shared."""
        rank = self._peers.rank
        held = ((self._parameters[name], shared) for group in self._groups for shared in group.parameters for name in shared.names[rank])
        return {parameter: f"copies of it are {' and '.join(map(str, shared.others(rank)))}" for parameter, shared in held}

    @changing_weights()
    def broadcast_initial_values(self, *, are_equal: bool = False) -> None:
        """Copies values to all holders. A tied parameter starts as its first place does, a copied stage as on the first route.

        If they `are_equal` already, compares the parameters and sends no values. Raises `InputError` with all faults, the same on every
        rank.
        """
        infos = self._agree_on_parameters()
        groups = shared_groups(self._tied, infos, self._copied, self._peers.members)
        self._keep_own(groups, infos[self._peers.rank])
        held = (names for group in groups for shared in group.parameters for names in shared.names.values())
        self.names = {name.name for names in held for name in names}
        pairs = {pair for group in groups for pair in permutations(group.ranks, 2)}
        self._peers.open_channels({Channel(source, destination, ValueKind.WEIGHT_WORK) for source, destination in pairs})
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
        """Returns the parameters of each rank. Raises `InputError` if ranks disagree on `tied`, or if copies of a stage differ."""
        mine = parameter_infos(self._modules) if self._tied or self._copied else {}
        with self._peers.collective("comparing what is tied and the copies of stages"):
            gathered = self._peers.gather_objects((self._tied, mine, self._buffer_shapes()))
        if any(tied != self._tied for tied, _, _ in gathered):
            listed = each_has(self._peers.members, [_text(tied) for tied, _, _ in gathered])
            raise InputError("ranks disagree on tied: {listed}", listed=listed)
        infos = [theirs for _, theirs, _ in gathered]
        self._compare_copies(infos, [buffers for _, _, buffers in gathered])
        return infos

    def _buffer_shapes(self) -> dict[int, list[tuple[str, tuple[int, ...], str]]]:
        return {
            stage: [(name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in module.named_buffers()]
            for stage, module in self._copied_modules.items()
        }

    def _compare_copies(self, infos: list[ParameterInfos], buffers: list[dict[int, Any]]) -> None:
        for stage, ranks in sorted(self._copied.items()):
            first, *others = sorted(ranks)
            copies = {rank: (_comparable(infos[rank], stage), buffers[rank][stage]) for rank in (first, *others)}
            for rank in others:
                if copies[rank] != copies[first]:
                    differ = "differ in their parameters or buffers, or in which they share"
                    message = "the copies of stage {stage} on ranks {first} and {rank} {differ}"
                    numbers = self._peers.members
                    raise InputError(message, stage=stage, first=numbers[first], rank=numbers[rank], differ=differ)

    def _keep_own(self, groups: list[SharedGroup], infos: ParameterInfos) -> None:
        """Keeps the groups that include this rank, whose parameters are `infos`."""
        rank = self._peers.rank
        held_here = [group for group in groups if rank in group.ranks]
        by_name = {stage: dict(module.named_parameters(remove_duplicate=False)) for stage, module in self._modules.items()}
        shared_names = {name for group in held_here for shared in group.parameters for name in shared.names[rank]}
        self._parameters = {name: by_name[name.stage][name.name] for name, info in infos.items() if info.first_name in shared_names}
        self._groups = held_here
        self._sums = [_GroupSum(group, self._parameters, self._peers, self._gradients) for group in held_here]
        self._stages = {stage for group_sum in self._sums for stage in group_sum.stages}
        counted_here = {self._parameters.get(shared.counted_name) for group in held_here for shared in group.parameters}
        self.counted_elsewhere = set(self._parameters.values()) - counted_here
        self.completes_at_end = frozenset(self._parameters.values())

    def shared_with_others(self) -> Iterator[SharedWith]:
        """Yields what this rank shares with its neighbors in each group."""
        rank = self._peers.rank
        for group in self._groups:
            names = [shared.names[rank] for shared in group.parameters]
            held = [[self._parameters[name] for name in of_one] for of_one in names]
            for peer in neighbors(group.ranks, rank):
                there = [str(shared.names[peer][0]) for shared in group.parameters]
                yield SharedWith(self._peers, peer, held, [list(map(str, of_one)) for of_one in names], there)

    def _broadcast_parameter(self, shared: SharedParameter, ranks: tuple[int, ...]) -> None:
        source, rank = shared.source, self._peers.rank
        held = [self._parameters[name].detach() for name in shared.names.get(rank, ())]
        if held:
            first = self._parameters[source.name].detach() if source.rank == rank else held[0]
            self._peers.replicate(first, source.rank, _EQUALIZING, ranks)
            for tensor in held:
                tensor.copy_(first)

    def on_step_begin(self, step: TrainingStep) -> None:
        """Sets the gradients of earlier steps aside."""
        self._earlier.on_step_begin(step)
        self._unfinished = set(self._stages)
        self._unsent = list(self._sums)

    def refuse_other_parameters(self) -> None:
        """Raises `InputError` if a stage's parameters have changed since the pipeline was created, when the groups were made."""
        for stage in self._stages:
            now = dict(self._modules[stage].named_parameters(remove_duplicate=False))
            then = {name.name: parameter for name, parameter in self._parameters.items() if name.stage == stage}
            names = {*then, *(now if stage in self._copied else ())}
            other = [name for name in sorted(names) if now.get(name) is not then.get(name)]
            if other:
                raise InputError(
                    (
                        "stage {stage} has not the parameters it had when the pipeline was made: {other} came, went or changed, "
                        "and other stages or ranks share them; {remedy}"
                    ),
                    stage=stage,
                    other=", ".join(other),
                    remedy="put the former parameters back, and change their values in place; to train others, make a new pipeline and "
                    "optimizer",
                )

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Sends the groups that are complete now, in the same order on all ranks."""
        self._unfinished.discard(stage)
        while self._unsent and not self._unsent[0].stages & self._unfinished:
            self._unsent.pop(0).send()

    def on_step_end(self, step: TrainingStep) -> None:
        """Gives every holder the sum of this step's gradients, added to the gradients of earlier steps."""
        for group_sum in self._sums:
            group_sum.finish()
        self._earlier.give_back()

    def on_close(self) -> None:
        """Drops all messages in flight: they would keep connections open."""
        for group_sum in self._sums:
            group_sum.clear()


class _GroupSum:
    """This rank's part in the sum over one shared group.

    It adds up its own gradients from the last stage to the first, and then those of the ranks, the rank with the last stage first. This is
    the order of autograd on one device if stages lie on ranks in order. All ranks add in this order, so all get the same bits.
    """

    def __init__(self, group: SharedGroup, parameters: dict[ParameterName, nn.Parameter], peers: Peers, gradients: Gradients) -> None:
        self._peers = peers
        self._gradients = gradients
        self._ranks = group.ranks
        self._others = [rank for rank in group.ranks if rank != peers.rank]
        # For each shared parameter, its tensors on this rank.
        self._held = [[parameters[name] for name in shared.names[peers.rank]] for shared in group.parameters]
        self._own: list[Tensor | None] = []
        self.stages = group.stages[peers.rank]
        self._sending: list[tuple[Any, int]] = []
        self._sends: list[Sending] = []

    def send(self) -> None:
        """Starts sending to every other rank which gradients exist, and then these."""
        self._own = [self._as_added(_total([self._gradients.get(parameter) for parameter in held])) for held in self._held]
        present = GradientFlags(tuple(gradient is not None for gradient in self._own))
        for other in self._others:
            self._sends.append(self._peers.send_control(present, other))
            send = self._peers.sender(ValueKind.WEIGHT_WORK, other)
            self._sending += [(send(as_memory(gradient)), other) for gradient in self._own if gradient is not None]

    def _as_added(self, gradient: Tensor | None) -> Tensor | None:
        """Returns a gradient as every rank adds it: a sparse one becomes dense if other ranks get it."""
        return gradient.to_dense() if gradient is not None and gradient.is_sparse and self._others else gradient

    def finish(self) -> None:
        """Waits for the others' gradients and puts the sum into the gradient of each parameter, each a tensor of its own."""
        gradients_of = {self._peers.rank: self._own}
        for other in self._others:
            flags = self._peers.expect_control(GradientFlags, len(self._held), other).wait(_DOING)
            present = zip(self._held, flags.present, strict=True)
            gradients_of[other] = [self._receive(held[0], other) if is_present else None for held, is_present in present]
        for held, *gradients in zip(self._held, *(gradients_of[rank] for rank in self._ranks), strict=True):
            total = _total(gradients)
            for parameter in held:
                self._gradients.put(parameter, total if parameter is held[0] or total is None else total.clone())
        for work, other in self._sending:
            self._peers.wait(work, other, _DOING)
        for sending in self._sends:
            sending.wait(_DOING)
        self.clear()

    def _receive(self, like: Tensor, peer: int) -> Tensor:
        buffer = torch.empty_like(like, dtype=self._gradients.dtype, memory_format=torch.contiguous_format, requires_grad=False)
        self._peers.wait(self._peers.receiver(ValueKind.WEIGHT_WORK, peer)(buffer), peer, "receiving what is tied or copied")
        return buffer

    def clear(self) -> None:
        """Drops all messages in flight."""
        self._own = []
        self._sending.clear()
        self._sends.clear()


def _total(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the sum of the gradients that exist, in order; None if none does."""
    present = [gradient for gradient in gradients if gradient is not None]
    return sum(present[1:], present[0]) if present else None


def _comparable(infos: ParameterInfos, stage: int) -> list[Any]:
    """Returns the properties of a stage's parameters that its copies must share: all except whether they train."""
    return [(name.name, info._replace(requires_grad=True)) for name, info in infos.items() if name.stage == stage]


def _text(tied: tuple[tuple[ParameterName, ...], ...]) -> str:
    return ", ".join("[" + ", ".join(map(str, group)) + "]" for group in tied) or "none"
