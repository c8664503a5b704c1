"""Shared code of the strategies for Trainer and Fabric: the ranks of a pipeline and its replicas, and the collectives of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

import zerobubble as zb
from zerobubble.integrations.lightning.refusals import refuse_loader
from zerobubble.integrations.lightning.world import connecting, store_of_retry
from zerobubble.integrations.whole_model import copy_from, tensors_of_stages
from zerobubble.runtime.frameworks import SAVED_BY, exchanging


class _GatherIn:
    """Gathers the values of a Metric in a `group`, by the user's `function` if given.

    A group as the Metric's `process_group` would not let callbacks copy or save the module.
    """

    def __init__(self, group: dist.ProcessGroup, function: Callable[..., list[Tensor]] | None) -> None:
        self._group = group
        self._function: Callable[..., list[Tensor]] = gather_all_tensors
        if function is not None:
            self._function = function._function if isinstance(function, _GatherIn) else function

    def __call__(self, value: Tensor, group: object = None) -> list[Tensor]:
        return self._function(value, group=self._group)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._function,)


def _itself(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    return function


class PipelineRanks:
    """The part of a strategy that knows its ranks. Collectives are over replicas only: the ranks of a pipeline have the same values."""

    cluster_environment: Any
    parallel_devices: Any
    local_rank: int
    node_rank: int
    world_size: int
    num_nodes: int
    _data_parallel_size: int
    _backend: str | None
    _mesh: DeviceMesh | None = None
    _barrier_group: dist.ProcessGroup | None = None
    pipeline: Any  # a `zb.Pipeline`, or None
    if TYPE_CHECKING:

        @property
        def global_rank(self) -> int:
            """This rank of all."""

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """The number of ranks on each node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks, with the pipeline along "pp" and replicas along "dp"."""
        assert self._mesh is not None
        return self._mesh

    def _share_state(self, module: nn.Module) -> None:
        """Gives all ranks the parameters and buffers of the first, and lets metrics combine the values of replicas."""
        for tensor in (*module.parameters(), *module.buffers()):
            copy_from(0, tensor, self.root_device)
        for child in module.modules():
            if isinstance(child, Metric):
                child.dist_sync_fn = _GatherIn(self.mesh.get_group("dp"), child.dist_sync_fn)

    def set_world_ranks(self) -> None:
        """Sets the rank and the number of ranks, as Lightning's own strategies do."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def _meet(self) -> None:
        """Connects all ranks, and makes the mesh."""
        self.set_world_ranks()
        backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
        with connecting():
            _init_dist_connection(self.cluster_environment, backend, **store_of_retry())
            if self._mesh is None:
                shape = (self._data_parallel_size, self.world_size // self._data_parallel_size)
                self._mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("dp", "pp"))

    def _share_random_states(self) -> None:
        """Gives the ranks of a pipeline the same random states, so that their data loaders shuffle alike."""
        group = self.mesh.get_group("pp")
        states = [_collect_rng_states(include_cuda=False)]
        dist.broadcast_object_list(states, src=dist.get_process_group_ranks(group)[0], group=group)
        _set_rng_states(states[0])

    def process_dataloader(self, dataloader: Any) -> Any:
        refuse_loader(dataloader, self.world_size, self.global_rank, self._data_parallel_size)
        return dataloader

    def exchanging(self, doing: str) -> AbstractContextManager[Any]:
        """Returns a context for a collective of Lightning, in which the failure of another rank raises the first report of any rank."""
        stack, pipe = ExitStack(), self.pipeline
        if pipe is not None and pipe._steps.guard.closed is None:
            stack.enter_context(pipe._steps.guard.during(f"while {doing}"))
            stack.enter_context(pipe._steps.peers.collective(doing))
            stack.enter_context(exchanging())  # the backend may notice a lost rank first
        return stack

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            with self.exchanging("in a barrier of Lightning"):
                dist.barrier(self._barrier_group)

    @contextmanager
    def on_one_rank(self) -> Iterator[None]:
        """A context that one rank of each pipeline enters: barriers wait for replicas only."""
        self._barrier_group = self.mesh.get_group("dp")
        try:
            yield
        finally:
            self._barrier_group = None

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        shared = [obj]
        with self.exchanging("in a broadcast of Lightning"):
            dist.broadcast_object_list(shared, src)
        return shared[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return _sync_ddp_if_available(tensor, self._replicas_of(group), reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = torch.tensor(int(decision), device=self.root_device)
        with self.exchanging("in a decision of Lightning"):
            dist.all_reduce(decisions)
        return int(decisions) == self.world_size if all else bool(decisions)

    def ranks_where(self, decision: bool) -> list[int]:
        """Returns the ranks of the world that decide so. All ranks call it."""
        decisions = torch.zeros(self.world_size, dtype=torch.int32, device=self.root_device)
        decisions[self.global_rank] = int(decision)
        with self.exchanging("in a decision of Lightning"):
            dist.all_reduce(decisions)
        return decisions.nonzero().flatten().tolist()

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return _all_gather_ddp_if_available(tensor, group=self._replicas_of(group), sync_grads=sync_grads)

    def _replicas_of(self, group: Any) -> Any:
        """Returns `group`, or the group of the replicas if `group` is None or the world."""
        return self.mesh.get_group("dp") if group is None or group is dist.group.WORLD else group

    def _whole_optimizer_state(self, state: dict[str, Any], optimizer: Optimizer, pipe: zb.Pipeline | None) -> dict[str, Any]:
        """Returns the state of the whole optimizer on the first rank, and `state`, this rank's part, on others."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owned = set() if pipe is None else tensors_of_stages(pipe)
        mine = {index: value for index, value in state["state"].items() if not owned or id(parameters[index]) in owned}
        parts: list[Any] = [None] * self.world_size
        with self.exchanging("gathering the state of an optimizer"):
            dist.gather_object(mine, parts if self.global_rank == 0 else None)
        if self.global_rank == 0:
            merged = {index: value for part in reversed(parts) for index, value in part.items()}
            state["state"] = {index: merged[index] for index in sorted(merged)}
            for group in state["param_groups"]:
                group.pop(SAVED_BY, None)
        return state
