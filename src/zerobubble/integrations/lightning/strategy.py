"""`PipelineStrategy`: a strategy of Lightning's Trainer that trains a network in a pipeline.

The LightningModule stays whole on every rank, and its optimizers have all of its parameters. Each rank trains its own stages' part: the
other parameters have no gradients, so optimizers skip them. They are stale until a checkpoint or the end of training collects them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torchmetrics import Metric

from zerobubble.errors import InputError
from zerobubble.integrations.lightning.refusals import refuse_loader, refuse_module, refuse_optimizers, refuse_options, refuse_trainer
from zerobubble.integrations.lightning.runner import Settings, StepRunner
from zerobubble.integrations.whole_model import copy_from, tensors_of_stages

SPLIT_OPTIONS = ("cuts", "inside_blocks", "memory")


class PipelineStrategy(ParallelStrategy):
    """Trains the network of a LightningModule in a pipeline: `Trainer(strategy=PipelineStrategy(schedule="zb-h1", num_microbatches=8))`.

    The batch size of data loaders is that of one replica, which all ranks of its pipeline train together.

    Args:
        schedule: What `zb.Pipeline` accepts.
        num_microbatches: The number of microbatches of a batch.
        network: The name of the module that is cut, such as "model". By default, the only child module with parameters in the
            LightningModule; of several, the first one that `training_step` calls.
        data_parallel_size: The number of replicas of the pipeline, which load different batches.
        loss_weight: `loss_weight(microbatch)` returns the weight of a microbatch of the data loader's batch in the mean loss, such as its
            number of tokens that count. By default it is the number of samples.
        process_group_backend: The backend of `torch.distributed`; by default "nccl" for GPUs and "gloo" for CPUs.
        options: Further options of `zb.Pipeline`, and "cuts", "inside_blocks" and "memory" of `zb.split`.

    Raises:
        InputError: For unsuitable options, all of them at once. `Trainer(...)` raises it for its own options.
    """

    def __init__(
        self,
        schedule: Any = "zb-h1",
        num_microbatches: int = 8,
        *,
        network: str | None = None,
        data_parallel_size: int = 1,
        loss_weight: Callable[[Any], Any] | None = None,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        split = {name: options.pop(name) for name in SPLIT_OPTIONS if name in options}
        self._settings = Settings(schedule, num_microbatches, network, loss_weight, split, options)
        self._data_parallel_size = data_parallel_size
        self._backend = process_group_backend
        self._mesh: DeviceMesh | None = None
        self._runner: StepRunner | None = None
        self.num_nodes = 1
        refuse_options(self._settings, data_parallel_size)

    @property
    def pipeline(self) -> Any:
        """The `zb.Pipeline`, made at the first step: its timeline, plan and losses. None before, and after training."""
        return None if self._runner is None else self._runner.pipe

    @property
    def _precision(self) -> Any:
        """Refuses Fabric, the only reader."""
        raise InputError(
            ("PipelineStrategy is a strategy of lightning.Trainer, and Fabric has no training_step to run for each microbatch"),
            remedy="leave the strategy out, call fabric.launch(), and train with zerobubble.Pipeline in your own loop",
        )

    # Ranks

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """The number of ranks on each node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether ranks load different batches."""
        return self._data_parallel_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh["dp"].size(), "rank": self.mesh.get_local_rank("dp")}

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks, with the pipeline along "pp" and replicas along "dp"."""
        assert self._mesh is not None
        return self._mesh

    @property
    def runner(self) -> StepRunner:
        """Runs the steps of the module."""
        assert self._runner is not None
        return self._runner

    def _configure_launcher(self) -> None:
        """Chooses how ranks start. It is the last call of `Trainer(...)`, so it also refuses unsuitable arguments."""
        refuse_trainer(self, self._settings, self._data_parallel_size)
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Sets the rank and the number of ranks, as Lightning's own strategies do."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        refuse_module(model, self._settings)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
        _init_dist_connection(self.cluster_environment, backend)
        if self._mesh is None:
            shape = (self._data_parallel_size, self.world_size // self._data_parallel_size)
            self._mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("dp", "pp"))
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        refuse_module(self.lightning_module, self._settings)
        for tensor in (*self.lightning_module.parameters(), *self.lightning_module.buffers()):
            copy_from(0, tensor, self.root_device)
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.process_group = self.mesh.get_group("dp")
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm
        self._runner = StepRunner(self.lightning_module, self._settings, self.mesh, self.root_device, self.broadcast(torch.initial_seed()))
        self._share_random_states()

    def _share_random_states(self) -> None:
        """Gives the ranks of a pipeline the same random states, so that their data loaders shuffle alike."""
        group = self.mesh.get_group("pp")
        states = [_collect_rng_states(include_cuda=False)]
        dist.broadcast_object_list(states, src=dist.get_process_group_ranks(group)[0], group=group)
        _set_rng_states(states[0])

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        refuse_loader(dataloader, self.world_size, self.global_rank, self._data_parallel_size)
        return dataloader

    # Collectives of Lightning: over replicas only, because the ranks along "pp" have the same values

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        shared = [obj]
        dist.broadcast_object_list(shared, src)
        return shared[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, self.mesh.get_group("dp") if group is None else group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(decisions)
        return int(decisions) == self.world_size if all else bool(decisions)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, self.mesh.get_group("dp") if group is None else group, sync_grads)

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        batch, *rest = (*args, *kwargs.values())
        trainer = self.lightning_module.trainer
        index = trainer.fit_loop.epoch_loop.batch_idx
        if index == 0:
            self.runner.refuse_different_batches(batch)
        with self.precision_plugin.train_step_context():
            if not self.lightning_module.automatic_optimization:
                return self.runner.train_by_hand(batch, tuple(rest))
            steps = trainer.accumulate_grad_batches
            return self.runner.train(batch, tuple(rest), 1 / steps, clears=index % steps == 0)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Restores the gradients of the pipeline, between the hooks of Lightning before and after a backward pass."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.runner.put_gradients()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self.pipeline is not None
        self.pipeline.clip_grad_norm_(clip_val)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.runner.evaluate("validation_step", (*args, *kwargs.values()))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.runner.evaluate("test_step", (*args, *kwargs.values()))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.runner.evaluate("predict_step", (*args, *kwargs.values()))

    def on_validation_start(self) -> None:
        self.runner.collect_outside()

    on_test_start = on_predict_start = on_validation_start

    # Checkpoints: whole, as on one device

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole module, on every rank."""
        self.runner.collect()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the state of the whole optimizer on the first rank, and this rank's part on others."""
        state = super().optimizer_state(optimizer)
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        owned = set() if self.runner.pipe is None else tensors_of_stages(self.runner.pipe)
        mine = {index: value for index, value in state["state"].items() if not owned or id(parameters[index]) in owned}
        parts: list[Any] = [None] * self.world_size
        dist.gather_object(mine, parts if self.is_global_zero else None)
        if self.is_global_zero:
            merged = {index: value for part in reversed(parts) for index, value in part.items()}
            state["state"] = {index: merged[index] for index in sorted(merged)}
        return state

    # The end

    def on_train_end(self) -> None:
        self.runner.collect()

    def on_exception(self, exception: BaseException) -> None:
        if self._runner is not None:
            self._runner.close(exception)

    def teardown(self) -> None:
        if self._runner is not None:
            self._runner.close()
        super().teardown()


FabricStrategy.register(PipelineStrategy)  # so that Fabric reads `_precision`, instead of reporting an unknown name of a strategy
