"""`PipelineStrategy`: a strategy of Lightning's Trainer that trains a network in a pipeline.

The LightningModule stays whole on every rank, and its optimizers have all of its parameters. Each rank trains its own stages' part: the
other parameters have no gradients, so optimizers skip them. During training they are released; checkpoints, and the end of training,
gather them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from zerobubble.errors import InputError
from zerobubble.integrations.lightning.metrics import keep_apart
from zerobubble.integrations.lightning.prediction_writers import written_once
from zerobubble.integrations.lightning.ranks import PipelineRanks
from zerobubble.integrations.lightning.refusals import refuse_callbacks, refuse_module, refuse_optimizers, refuse_options, refuse_trainer
from zerobubble.integrations.lightning.runner import StepRunner
from zerobubble.integrations.lightning.settings import Settings
from zerobubble.integrations.lightning.sigterm import share_stop, stop_together
from zerobubble.integrations.lightning.whole_for_callbacks import whole_for_callbacks
from zerobubble.integrations.versions import refuse_wrong_versions

SKIPPED = object()
"""What the strategy returns if `training_step` returns None: Lightning itself refuses None of several ranks, whose batches may differ."""


class StepResult(ClosureResult):
    """What Lightning keeps of a training step."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> StepResult:
        return super().from_training_step_output(None if training_step_output is SKIPPED else training_step_output, normalize)


class PipelineStrategy(PipelineRanks, ParallelStrategy):
    """Trains the network of a LightningModule in a pipeline: `Trainer(strategy=PipelineStrategy(schedule="zb-h1", num_microbatches=8))`.

    The batch size of data loaders is that of one replica, which all ranks of its pipeline train together.

    Args:
        schedule: What `zb.Pipeline` accepts.
        num_microbatches: The number of microbatches of a batch.
        network: The name of the module that is cut, such as "model". By default, the only child module with parameters in the
            LightningModule; of several, the first one that `training_step` calls, which must be trained.
        data_parallel_size: The number of replicas of the pipeline, which load different batches.
        loss_weight: `loss_weight(microbatch)` returns the weight of a microbatch of the data loader's batch in the mean loss, such as its
            number of tokens that count. By default it is the number of samples. "sum" is for losses that are sums.
        process_group_backend: The backend of `torch.distributed`; by default "nccl" for GPUs and "gloo" for CPUs.
        options: Further options of `zb.Pipeline`, and "cuts", "inside_blocks" and "memory" of `zb.split`. `batch_dims={"table": None}` is
            for an argument of the network that all samples share, or an item of a batch that is a dict.

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
        loss_weight: Callable[[Any], Any] | str | None = None,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_wrong_versions("lightning")
        self._settings = Settings.from_options(schedule, num_microbatches, network, loss_weight, options)
        self._data_parallel_size = data_parallel_size
        self._backend = process_group_backend
        self._runner: StepRunner | None = None
        self._is_interrupted = False
        self._hooks = ExitStack()
        self.num_nodes = 1
        self.rank_in_step: int | None = None
        refuse_options(self._settings, data_parallel_size)

    @property
    def pipeline(self) -> Any:
        """The `zb.Pipeline`, made at the first step: its timeline, plan and losses. None before, and after training."""
        return None if self._runner is None else self._runner.pipe

    @property
    def _precision(self) -> Any:
        """Refuses Fabric, the only reader."""
        raise InputError(
            "this PipelineStrategy is a strategy of lightning.Trainer, and Fabric has another",
            remedy="import PipelineStrategy from zerobubble.integrations.lightning.fabric",
        )

    # Ranks

    @property
    def is_distributed(self) -> bool:
        """Whether ranks load different batches."""
        return self._data_parallel_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh["dp"].size(), "rank": self.mesh.get_local_rank("dp")}

    @property
    def global_rank(self) -> int:
        """This rank; while `training_step` runs for the whole pipeline, the first rank of it."""
        return super().global_rank if self.rank_in_step is None else self.rank_in_step

    @property
    def first_rank(self) -> int:
        """The first rank of this pipeline."""
        return dist.get_process_group_ranks(self.mesh.get_group("pp"))[0]

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

    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        refuse_module(model, self._settings)

    def setup_environment(self) -> None:
        super().setup_environment()
        self._meet()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self.mesh

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        refuse_module(self.lightning_module, self._settings)
        keep_apart(self.lightning_module)
        self._share_state(self.lightning_module)
        trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls = StepResult
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm
        seed = self.broadcast(torch.initial_seed())
        self._runner = StepRunner(self.lightning_module, self._settings, self.mesh, self.root_device, seed, self.ranks_where)
        self._share_random_states()
        refuse_callbacks(trainer.callbacks)
        stop_together(trainer)
        is_first = self.mesh.get_local_rank("pp") == 0
        self._hooks.enter_context(written_once(trainer.callbacks, self.on_one_rank if is_first else None))
        self._hooks.enter_context(whole_for_callbacks(trainer))

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

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
            returned = self.runner.train(batch, tuple(rest), 1 / steps, clears=index % steps == 0)
            return SKIPPED if returned is None else returned

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Restores the gradients of the pipeline, between the hooks of Lightning before and after a backward pass."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.runner.put_gradients()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        if len(self.optimizers) > 1:
            raise InputError(
                "the norm of the gradients of one of {got} optimizers is spread over the ranks of a pipeline",
                got=len(self.optimizers),
                remedy="use one optimizer with parameter groups, or clip by value",
            )
        if self.pipeline is not None:  # otherwise, all batches were skipped
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
        self.runner.share_outside()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        if self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            share_stop(self.lightning_module.trainer)

    # Checkpoints: whole, as on one device

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole module, on every rank."""
        with self.runner.gathering():
            return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._runner is not None:
            self._runner.make_whole()
        super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the state of the whole optimizer on the first rank, and this rank's part on others."""
        state = super().optimizer_state(optimizer)
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._whole_optimizer_state(state, inner, self.runner.pipe)

    # The end

    def on_exception(self, exception: BaseException) -> None:
        self._is_interrupted = True
        if self._runner is not None:
            self._runner.close(exception)
        if not dist.is_initialized():
            self._mesh = None

    def teardown(self) -> None:
        self._hooks.close()
        if self._runner is not None:
            self._runner.close()
        module: pl.LightningModule | None = self.lightning_module
        if self._is_interrupted:  # it lacks the weights of other ranks, and cannot be moved
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module


FabricStrategy.register(PipelineStrategy)  # so that Fabric reads `_precision`, instead of reporting an unknown name of a strategy
