"""Data parallelism: sums gradients over ranks that hold the same stages and get different data, overlapped with the passes.

The loss of each rank is its part of the mean over the whole batch. So the sum of their gradients is the gradient of the whole batch, for
any shares.

All replicas must start the same sums in the same order, or tensors of different buckets would be added. Replicas may finish passes in
different orders, for they may play different schedules for a while. So buckets start in a fixed order of stages, not in the order in which
they are complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.hooks.equal_optimizers import SharedWith, shared_with_replicas
from zerobubble.runtime.stage.sharded import ShardedTensors
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep
from zerobubble.runtime.transport.endpoint import Summing
from zerobubble.runtime.transport.mesh import Layout
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.buffers import changing_weights
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.memory import like_parameter, local_part

BUCKET_BYTES = 16 << 20
"""The default size of a bucket of gradients: large enough that the latency of a message is negligible."""
_DOING = "summing gradients over replicas"


class EarlierGradients(StepHook):
    """Excludes the gradients of earlier steps from the sums of a step: sets them aside until `give_back`, for the parameters that
    `parameters` returns when a step begins.
    """

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], gradients: Gradients) -> None:
        self._parameters = parameters
        self._gradients = gradients
        self._kept: dict[nn.Parameter, Tensor] = {}

    def on_step_begin(self, step: TrainingStep) -> None:
        """Sets the gradients aside."""
        self._kept = {}
        for parameter in self._parameters():
            gradient = self._gradients.get(parameter)
            if gradient is not None:
                self._kept[parameter] = gradient
                self._gradients.put(parameter, None)

    def give_back(self) -> None:
        """Adds them to the gradients of the step."""
        for parameter, before in self._kept.items():
            more = self._gradients.get(parameter)
            self._gradients.put(parameter, before if more is None else before.add_(more))
        self._kept = {}


class _Bucket(NamedTuple):
    """Parameters with gradients that are summed in one message, over the replicas along these `dimensions` of the mesh."""

    dimensions: frozenset[str]
    parameters: Sequence[nn.Parameter]


class _Sum(NamedTuple):
    """A running sum of gradients of a stage over `peers`."""

    stage: int
    work: Summing
    peers: Peers


class Replicas(StepHook):
    """Sums the gradients of this rank over the ranks that hold the same parameters and get different data; `peers` are all of these.

    Gradients are sent in buckets of up to `bucket_bytes`, few of which are in memory at once. A bucket of a stage starts once its gradients
    are complete and the buckets before it have started, after those of earlier stages in `order`; other stages follow from the last to the
    first. Gradients that several stages share start at the end of the step. Nothing is summed along dimensions over which a parameter is
    `sharded`: FSDP2 sums there itself, and experts get the tokens of all these ranks, so each has the complete gradient already.
    """

    takes_gradients_early = True

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        modules: Mapping[int, nn.Module],
        sharded: ShardedTensors,
        gradients: Gradients,
        order: Sequence[int],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.peers = Peers(transport, layout.along[layout.data])
        self.earlier = EarlierGradients(partial(trained, modules), gradients)
        self._modules = modules
        self._gradients = gradients
        held = nn.ModuleList(modules.values())
        # The dimensions along which each parameter and buffer has replicas.
        self._left = {parameter: layout.data - sharded.dimensions_of(parameter) for parameter in held.parameters()}
        self._left_of_buffers = {buffer: layout.data - sharded.dimensions_of(buffer) for buffer in held.buffers()}
        everything = {*self._left.values(), *self._left_of_buffers.values()}
        self._peers = {some: Peers(transport, layout.along[some]) for some in sorted(everything, key=sorted) if some}
        summed = [dimensions for dimensions in self._peers if dimensions in self._left.values()]
        # The same two ranks may be neighbors along several sets of dimensions.
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

    def refuse_other_parameters(self) -> None:
        """Raises `InputError` for a trained parameter that stages did not have when the pipeline was created: nothing sums it."""
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and parameter not in self._left:
                    raise InputError(
                        "parameter {name!r} of stage {stage} was replaced or added since the pipeline was created, but replicas only "
                        "sum gradients of parameters from then",
                        name=name,
                        stage=stage,
                        remedy="put the former parameter back, and change its values in place, as load_state_dict does without "
                        "assign=True; to train another one, make a new pipeline and optimizer",
                    )

    @changing_weights()
    def broadcast_initial_values(self) -> None:
        """Copies parameters and buffers from the first replica to all. Raises the same `InputError` on all if shapes or types differ."""
        mine = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in (*self._left, *self._left_of_buffers)]
        with self.peers.collective("comparing replicas"):
            gathered = self.peers.gather_objects(mine)
        if any(theirs != gathered[0] for theirs in gathered):
            ranks = " and ".join(map(str, self.peers.members))
            message = "ranks {ranks} are replicas and hold parameters or buffers of different shapes or types"
            raise InputError(message, ranks=ranks, remedy="build the same stages on each")
        for tensor, left in [*self._left.items(), *self._left_of_buffers.items()]:
            if left:
                self._peers[left].replicate(local_part(tensor.detach()), 0, "giving replicas the values of the first")

    def why_shared(self) -> dict[nn.Parameter, str]:
        """Returns the parameters that other ranks hold, too, and for each why."""
        members = {dimensions: " and ".join(map(str, peers.members)) for dimensions, peers in self._peers.items()}
        return {parameter: f"ranks {members[left]} are its replicas" for parameter, left in self._left.items() if left}

    def shared_with_others(self) -> Iterator[SharedWith]:
        """Yields what this rank shares with the neighbors among its replicas."""
        for dimensions in self._sums:
            names = {parameter: self._name_of(-1, parameter) for parameter, left in self._left.items() if left == dimensions}
            yield from shared_with_replicas(self._peers[dimensions], names)

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Keeps the pipeline, which records the times of the sums."""
        self._pipeline = pipeline

    def on_step_begin(self, step: TrainingStep) -> None:
        """Makes the buckets of this step, none of which is complete yet."""
        self._over.clear()
        self._complete.clear()
        apart = _of_one_stage(self._modules) - self._completed_at_end()
        summed = {stage: [parameter for parameter in trained({stage: self._modules[stage]}) if parameter in apart] for stage in self._order}
        self._unstarted = {stage: self._in_buckets(parameters) for stage, parameters in summed.items()}

    def _completed_at_end(self) -> AbstractSet[nn.Parameter]:
        """Returns the parameters with gradients that earlier hooks complete only at the end of the step."""
        attached = () if self._pipeline is None else self._pipeline.hooks
        before = attached[: attached.index(self)] if self in attached else attached
        return frozenset().union(*(hook.completes_at_end for hook in before))

    def _in_buckets(self, parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
        """Returns the buckets of these parameters in the order in which they become complete."""
        buckets = []
        for dimensions in self._sums:
            along = [parameter for parameter in parameters if self._left.get(parameter) == dimensions]
            buckets += [_Bucket(dimensions, bucket) for bucket in _buckets(along, self._gradients.dtype, self._bucket_bytes)]
        place = {parameter: number for number, parameter in enumerate(parameters)}
        return sorted(buckets, key=lambda bucket: place[bucket.parameters[-1]])

    def on_gradients_complete(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Marks the gradients of `parameters` as complete, and starts the sums that are next in order."""
        self._complete.update(parameters)
        self._start_complete()

    def on_stage_gradients_ready(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Marks all gradients of a stage as complete, and starts the sums that are next in order."""
        if stage not in self._unstarted:  # this is the second call, for parameters that several stages share
            self._start(stage, self._in_buckets(parameters))
            return
        apart = _of_one_stage(self._modules)
        self._unstarted[stage] += self._in_buckets([parameter for parameter in parameters if parameter not in apart])
        self._over.add(stage)
        self._start_complete()

    def _start_complete(self) -> None:
        """Starts the sums that are next in order: complete buckets of the first unfinished stage in the order."""
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
                gradient = self._gradients.get(parameter)
                if gradient is not None and gradient.layout is not torch.strided:
                    raise InputError(_SPARSE, parameter=self._name_of(stage, parameter), remedy="make its layer with sparse=False")
            work = self._sums[dimensions].start(partial(self._gather, parameters), partial(self._scatter, parameters))
            self._under_way.append(_Sum(stage, work, self._peers[dimensions]))

    def on_step_end(self, step: TrainingStep) -> None:
        """Waits for the sums, which writes them into the gradients, and records their times."""
        for stage, work, peers in self._under_way:
            peers.wait(work, (peers.rank or peers.size) - 1, _DOING)  # the previous rank in the ring
            if work.times is not None and self._pipeline is not None:
                self._pipeline.record_reduction(stage, *work.times)
        self._under_way.clear()
        self.earlier.give_back()

    def _name_of(self, stage: int, parameter: nn.Parameter) -> str:
        """Returns the name of a parameter for errors, preferably the one in `stage`."""
        places = sorted(self._modules.items(), key=lambda place: place[0] != stage)
        holder, name = next((index, name) for index, module in places for name, held in module.named_parameters() if held is parameter)
        return f"parameter {name!r} of stage {holder}"

    def _gather(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return _flat(parameters, [self._gradients.get(parameter) for parameter in parameters], self._gradients.dtype)

    def _scatter(self, parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
        sizes = [local_part(parameter).numel() for parameter in parameters]
        *sums, there = torch.split(flat, [*sizes, len(sizes)])
        for parameter, total, is_there in zip(parameters, sums, there.tolist(), strict=True):
            gradient = self._gradients.get(parameter)
            if gradient is not None:
                local = local_part(gradient)
                local.copy_(total.view(local.shape))
            elif is_there:
                self._gradients.put(parameter, like_parameter(parameter, total.clone()))

    def on_close(self) -> None:
        """Drops all sums in flight: they would keep connections open."""
        self._unstarted.clear()
        self._under_way.clear()
        for sums in self._sums.values():
            sums.close()


def trained(modules: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    """Returns the trained parameters of `modules`, each once."""
    return [parameter for parameter in nn.ModuleList(modules.values()).parameters() if parameter.requires_grad]


def _of_one_stage(modules: Mapping[int, nn.Module]) -> set[nn.Parameter]:
    """Returns the parameters that only one of this rank's stages holds."""
    times = Counter(parameter for module in modules.values() for parameter in module.parameters())
    return {parameter for parameter, count in times.items() if count == 1}


def _buckets(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None, most: int) -> list[list[nn.Parameter]]:
    """Groups parameters by type of gradient, in order, into buckets of up to `most` bytes; a larger parameter is a bucket of its own."""
    open_buckets: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    buckets: list[list[nn.Parameter]] = []
    for parameter in parameters:
        kind = dtype or parameter.dtype
        bucket, held = open_buckets.get(kind, ([], most))
        size = local_part(parameter).numel() * kind.itemsize
        if held + size > most:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[kind] = bucket, held + size
    return buckets


def _flat(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], dtype: torch.dtype | None) -> Tensor:
    """Returns one tensor with the gradients of these parameters, and a count for each: counts sum to 0 if no rank has a gradient."""
    first = local_part(parameters[0])
    there = torch.tensor([float(gradient is not None) for gradient in gradients], dtype=dtype or first.dtype, device=first.device)
    pieces = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        pieces.append(torch.zeros_like(local_part(parameter), dtype=there.dtype) if gradient is None else local_part(gradient))
    return torch.cat([piece.reshape(-1) for piece in pieces] + [there])


_SPARSE = "{parameter} has a sparse gradient, which replicas do not sum"
