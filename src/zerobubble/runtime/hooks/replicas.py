"""Ranks that hold the same stages and are given other data: equal at the start, their gradients summed while passes still compute.

The loss of each is a part of the mean over the whole batch, so the sum of their gradients is that of the whole batch, whatever share of it
each was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.hooks.fully_sharded import let_fsdp2_sum
from zerobubble.runtime.stage.divided import DividedTensors
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep
from zerobubble.runtime.transport.endpoint import Summing
from zerobubble.runtime.transport.mesh import Layout
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.memory import like_parameter, local_part
from zerobubble.runtime.values.weight_caches import changing_weights

BUCKET_BYTES = 16 << 20
"""Gradients travel together up to this size if nobody says otherwise: large enough that a message's latency does not count."""
_DOING = "summing gradients over replicas"


class EarlierGradients(StepHook):
    """Keeps what earlier steps left in the gradients of this rank's `modules` out of the sums of a step, until `give_back`."""

    def __init__(self, modules: Mapping[int, nn.Module], gradients: Gradients) -> None:
        self._modules = modules
        self._gradients = gradients
        self._kept: dict[nn.Parameter, Tensor] = {}

    def on_step_begin(self, step: TrainingStep) -> None:
        """Take the gradients out."""
        self._kept = {}
        for parameter in trained(self._modules):
            gradient = self._gradients.of(parameter)
            if gradient is not None:
                self._kept[parameter] = gradient
                self._gradients.put(parameter, None)

    def give_back(self) -> None:
        """Add them to those of the step."""
        for parameter, before in self._kept.items():
            more = self._gradients.of(parameter)
            self._gradients.put(parameter, before if more is None else before.add_(more))
        self._kept = {}


class _Bucket(NamedTuple):
    """Parameters whose gradients are summed together, over the replicas along these `dimensions` of the mesh."""

    dimensions: frozenset[str]
    parameters: Sequence[nn.Parameter]


class _Sum(NamedTuple):
    """Gradients of a stage on their way, summed over `peers`."""

    stage: int
    work: Summing
    peers: Peers


class Replicas(StepHook):
    """Sums the gradients of this rank over the ranks that hold the same and are given other data; `peers` are all that are.

    Gradients leave in buckets of up to `bucket_bytes`, and few buckets are in memory at once: each bucket of a stage when its gradients are
    complete and the buckets before it have left, after those of the stages before it in `order`. Gradients that several stages share leave
    at the end of the step. Along the dimensions over which a parameter is `divided` nothing is summed: FSDP2 does that itself, and of
    experts, which are sent the tokens of all these ranks, each rank has the gradient of the whole already.
    """

    takes_gradients_early = True

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        modules: Mapping[int, nn.Module],
        divided: DividedTensors,
        gradients: Gradients,
        order: Sequence[int],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        let_fsdp2_sum(modules)
        self.peers = Peers(transport, layout.along[layout.data])
        self.earlier = EarlierGradients(modules, gradients)
        self._modules = modules
        self._gradients = gradients
        held = nn.ModuleList(modules.values())
        self._left = {parameter: layout.data - divided.dimensions_of(parameter) for parameter in held.parameters()}
        self._left_of_buffers = {buffer: layout.data - divided.dimensions_of(buffer) for buffer in held.buffers()}
        everything = {*self._left.values(), *self._left_of_buffers.values()}
        self._peers = {some: Peers(transport, layout.along[some]) for some in sorted(everything, key=sorted) if some}
        summed = [dimensions for dimensions in self._peers if dimensions in self._left.values()]
        # The same two ranks may be neighbours along several sets of dimensions.
        self._sums = {dimensions: self._peers[dimensions].sums(number) for number, dimensions in enumerate(summed)}
        self._under_way: list[_Sum] = []
        self._order = [*order, *sorted(modules.keys() - set(order), reverse=True)]
        self._bucket_bytes = bucket_bytes
        self._pipeline: AttachedPipeline | None = None
        # Of the step: the stages with sums that have not been started, in their order, with their buckets; the stages that have no pass
        # left; and the parameters whose gradients are complete.
        self._unstarted: dict[int, list[_Bucket]] = {}
        self._over: set[int] = set()
        self._complete: set[nn.Parameter] = set()
        self.completes_at_end = frozenset(parameter for parameter in trained(modules) if self._left[parameter])

    @changing_weights()
    def broadcast_initial_values(self) -> None:
        """Give all replicas the parameters and buffers of the first; raises `InputError`, the same on all, where they differ in form."""
        mine = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in (*self._left, *self._left_of_buffers)]
        with self.peers.collective("comparing replicas"):
            told = self.peers.gather_objects(mine)
        if any(theirs != told[0] for theirs in told):
            ranks = " and ".join(map(str, self.peers.members))
            raise InputError(f"ranks {ranks} are replicas and hold parameters or buffers of other shapes or types: build the same on each")
        for tensor, left in [*self._left.items(), *self._left_of_buffers.items()]:
            if left:
                self._peers[left].replicate(local_part(tensor.detach()), 0, "giving replicas the values of the first")

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Remember whose sums are recorded."""
        self._pipeline = pipeline

    def on_step_begin(self, step: TrainingStep) -> None:
        """No gradient of this step is complete, and which ones will be summed together is known."""
        self._over.clear()
        self._complete.clear()
        apart = _of_one_stage(self._modules) - self._completed_at_end()
        own = {stage: [one for one in trained({stage: self._modules[stage]}) if one in apart] for stage in self._order}
        self._unstarted = {stage: self._in_buckets(parameters) for stage, parameters in own.items()}

    def _completed_at_end(self) -> AbstractSet[nn.Parameter]:
        """Parameters whose gradients hooks before this one complete at the end of the step."""
        attached = () if self._pipeline is None else self._pipeline.hooks
        before = attached[: attached.index(self)] if self in attached else attached
        return frozenset().union(*(hook.completes_at_end for hook in before))

    def _in_buckets(self, parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
        """The buckets of these parameters in the order in which they can leave."""
        found = []
        for dimensions in self._sums:
            own = [parameter for parameter in parameters if self._left.get(parameter) == dimensions]
            found += [_Bucket(dimensions, bucket) for bucket in _buckets(own, self._gradients.dtype, self._bucket_bytes)]
        place = {parameter: number for number, parameter in enumerate(parameters)}
        return sorted(found, key=lambda bucket: place[bucket.parameters[-1]])

    def on_gradients_complete(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Start summing the gradients of `parameters`, once what comes before them is on its way.

        So all replicas start the same sums in one order, whatever schedules they play.
        """
        self._complete.update(parameters)
        self._start_complete()

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Start summing what is left of the gradients of a stage, once what comes before them is on its way."""
        if stage not in self._unstarted:  # it is the second call, for parameters that several stages share
            self._start(stage, self._in_buckets(parameters))
            return
        apart = _of_one_stage(self._modules)
        self._unstarted[stage] += self._in_buckets([parameter for parameter in parameters if parameter not in apart])
        self._over.add(stage)
        self._start_complete()

    def _start_complete(self) -> None:
        """Start the sums whose turn it is."""
        while self._unstarted:
            stage, buckets = next(iter(self._unstarted.items()))
            while buckets and (stage in self._over or self._complete.issuperset(buckets[0].parameters)):
                self._start(stage, [buckets.pop(0)])
            if stage not in self._over:
                return
            del self._unstarted[stage]

    def _start(self, stage: int, buckets: Iterable[_Bucket]) -> None:
        for dimensions, parameters in buckets:
            for parameter in parameters:
                if _is_sparse(self._gradients.of(parameter)):
                    raise InputError(_SPARSE.format(parameter=self._name_of(stage, parameter)))
            work = self._sums[dimensions].start(partial(self._gather, parameters), partial(self._scatter, parameters))
            self._under_way.append(_Sum(stage, work, self._peers[dimensions]))

    def on_step_end(self, step: TrainingStep) -> None:
        """Wait for the sums, which leaves them in the gradients, and record when they were made."""
        for stage, work, peers in self._under_way:
            peers.wait(work, (peers.rank or peers.size) - 1, _DOING)  # who is before this rank in the ring
            if work.times is not None and self._pipeline is not None:
                self._pipeline.record_reduction(stage, *work.times)
        self._under_way.clear()
        self.earlier.give_back()

    def _name_of(self, stage: int, parameter: nn.Parameter) -> str:
        """What an error calls a parameter: one of `stage`, or of those that several stages share."""
        places = sorted(self._modules.items(), key=lambda place: place[0] != stage)
        of, name = next((of, name) for of, module in places for name, each in module.named_parameters() if each is parameter)
        return f"parameter {name!r} of stage {of}"

    def _gather(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return _flat(parameters, [self._gradients.of(parameter) for parameter in parameters], self._gradients.dtype)

    def _scatter(self, parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
        sizes = [local_part(parameter).numel() for parameter in parameters]
        *sums, there = torch.split(flat, [*sizes, len(sizes)])
        for parameter, total, is_there in zip(parameters, sums, there.tolist(), strict=True):
            gradient = self._gradients.of(parameter)
            if gradient is not None:
                local = local_part(gradient)
                local.copy_(total.view(local.shape))
            elif is_there:
                self._gradients.put(parameter, like_parameter(parameter, total.clone()))

    def on_close(self) -> None:
        """Let go of everything in flight."""
        self._unstarted.clear()
        self._under_way.clear()
        for sums in self._sums.values():
            sums.close()


def trained(modules: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    """The parameters of `modules` that train, each once."""
    return [parameter for parameter in nn.ModuleList(modules.values()).parameters() if parameter.requires_grad]


def _of_one_stage(modules: Mapping[int, nn.Module]) -> set[nn.Parameter]:
    """The parameters that only one of this rank's stages holds."""
    times = Counter(parameter for module in modules.values() for parameter in module.parameters())
    return {parameter for parameter, count in times.items() if count == 1}


def _buckets(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None, most: int) -> list[list[nn.Parameter]]:
    """The parameters in their order, by type of gradient, as many together as take up to `most` bytes; a larger one goes alone."""
    open_buckets: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    found: list[list[nn.Parameter]] = []
    for parameter in parameters:
        kind = dtype or parameter.dtype
        bucket, held = open_buckets.get(kind, ([], most))
        size = local_part(parameter).numel() * kind.itemsize
        if held + size > most:
            bucket, held = [], 0
            found.append(bucket)
        bucket.append(parameter)
        open_buckets[kind] = bucket, held + size
    return found


def _flat(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], dtype: torch.dtype | None) -> Tensor:
    """What travels for these parameters: their gradients, then a number for each that is 0 where nobody has one."""
    first = local_part(parameters[0])
    there = torch.tensor([float(gradient is not None) for gradient in gradients], dtype=dtype or first.dtype, device=first.device)
    pieces = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        pieces.append(torch.zeros_like(local_part(parameter), dtype=there.dtype) if gradient is None else local_part(gradient))
    return torch.cat([piece.reshape(-1) for piece in pieces] + [there])


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


_SPARSE = "{parameter} has a sparse gradient, which replicas do not sum: make its layer with sparse=False"
