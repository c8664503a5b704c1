"""`PipelineStrategy` of Lightning Fabric: the user's own loop, with one call for the forward and backward passes of a batch.

The module stays whole on every rank, and the optimizer has all of its parameters, as in the strategy of `lightning.Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor, nn
from torch.optim import Optimizer

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.integrations.batches import num_samples, refuse_different_batches
from zerobubble.integrations.lightning.argument_dims import ArgumentDims, Call, call_arguments, with_batch_dims
from zerobubble.integrations.lightning.comparison import Fault
from zerobubble.integrations.lightning.microbatch_losses import MicrobatchLosses
from zerobubble.integrations.lightning.network_numbers import NetworkNumbers
from zerobubble.integrations.lightning.ranks import PipelineRanks
from zerobubble.integrations.lightning.refusals import refuse, refuse_fabric, refuse_optimizers, refuse_options, wrapping_faults
from zerobubble.integrations.lightning.settings import Settings
from zerobubble.integrations.versions import refuse_wrong_versions
from zerobubble.integrations.whole_model import from_last_stage
from zerobubble.integrations.whole_outputs import WholeOutputs
from zerobubble.runtime.frameworks import gathering, make_whole, sample_slices, states_restored


class PipelineStrategy(PipelineRanks, ParallelStrategy):
    """Trains a module in a pipeline: `Fabric(strategy=PipelineStrategy("zb-h1", 8, loss_fn))`, then `fabric.strategy.step(x, y)`.

    Args:
        schedule: What `zb.Pipeline` accepts.
        num_microbatches: The number of microbatches of a batch.
        loss_fn: `loss_fn(output, targets)` returns the mean loss of a microbatch, as for `zb.Pipeline`. In steps 1, 2, 4, 8, ..., it is
            compared with its value for the whole batch.
        data_parallel_size: The number of replicas of the pipeline, which load different batches.
        loss_weight: `loss_weight(targets)` returns the weight of a microbatch in the mean loss, as for `zb.Pipeline`; by default it is the
            number of samples. "sum" is for losses that are sums.
        process_group_backend: The backend of `torch.distributed`; by default "nccl" for GPUs and "gloo" for CPUs.
        options: Further options of `zb.Pipeline`, such as `batch_dims={"table": None}` for an argument that all samples share, and "cuts",
            "inside_blocks" and "memory" of `zb.split`.

    Raises:
        InputError: For unsuitable options, all of them at once. `Fabric(...)` raises it for its own options.
    """

    def __init__(
        self,
        schedule: Any,
        num_microbatches: int,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        data_parallel_size: int = 1,
        loss_weight: Callable[[Any], Any] | str | None = None,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_wrong_versions("lightning")
        self._settings = Settings.from_options(schedule, num_microbatches, None, loss_weight, options)
        self._losses = MicrobatchLosses(loss_fn, loss_weight)
        self._dims = ArgumentDims(self._settings.batch_dims, self._from_last_stage)
        self._numbers, self._evaluated = NetworkNumbers(self._from_last_stage), WholeOutputs(self._from_last_stage)
        self._data_parallel_size = data_parallel_size
        self._backend = process_group_backend
        self._num_nodes = 1
        self._module: nn.Module | None = None
        self.pipeline: zb.Pipeline | None = None
        """The `zb.Pipeline`, made at the first step: its timeline, plan and losses."""
        refuse_options(self._settings, data_parallel_size)

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """The number of nodes."""
        return self._num_nodes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """The replica of this rank; None for one replica, which loads all batches in the order of one device."""
        return {"num_replicas": self.mesh["dp"].size(), "rank": self.mesh.get_local_rank("dp")} if self._data_parallel_size > 1 else None

    def _configure_launcher(self) -> None:
        """Chooses how ranks start. It is the last call of `Fabric(...)`, so it also refuses unsuitable arguments."""
        refuse_fabric(self, self._settings, self._data_parallel_size)
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        self._meet()
        self._share_random_states()

    # What Fabric sets up

    def module_to_device(self, module: nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Gives all ranks the parameters of the first, and returns a module whose call evaluates a batch in the pipeline."""
        faults = wrapping_faults(module)
        if self._module is not None:
            faults.append("a second module: put both into one, or give each its own zb.Pipeline")
        refuse(faults)
        self._module = module
        self._share_state(module)
        return _Evaluated(self, module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        refuse_optimizers([optimizer])
        return optimizer

    # Steps

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Runs the forward and backward passes of a batch, and returns the mean loss on every rank.

        Adds to the gradients of the parameters, as `fabric.backward` does. All ranks call it; those of a pipeline with the same batch.

        Args:
            inputs: The arguments of the module: a tensor, a tuple or a dict, with the samples in the first dimension.
            targets: The second argument of `loss_fn`, of the same number of samples.
        """
        steps = self._losses.steps
        if steps.is_next_anyway:
            refuse_different_batches((inputs, targets), self.mesh.get_group("pp"))
        pipe, samples = self._pipeline(inputs), num_samples(targets, self._settings.batch_dims)
        count, call = min(samples, self._settings.num_microbatches), self._call(inputs)
        with self.precision.forward_context():
            dims = self._dims.required(pipe, call, samples, again=steps.is_next(samples)) if count > 1 else {}
            pipe._steps.cut_model.release()
            sizes = [rows.stop - rows.start for rows in sample_slices(samples, count)]
            is_due = self._losses.begin(sizes)
            with with_batch_dims(pipe, dims):
                loss = pipe.step(inputs, targets, num_microbatches=count)
            if is_due:
                self._numbers.begin()
                self._numbers.learn(pipe, call.microbatches(count, dims), inputs, self._losses.outputs, self._losses.parts)
                with states_restored(None, self.root_device):  # only the last rank draws
                    fault = self._losses.fault(self._numbers, self.root_device)
                fault = self._from_last_stage(fault)
                if fault is not None:
                    raise Fault(**fault).error("loss_fn")
        return loss

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of the module for a batch, on every rank. Raises `InputError` where gradients are recorded."""
        if torch.is_grad_enabled():
            raise InputError(
                "a call of the module has no backward pass in a pipeline: train with fabric.strategy.step(inputs, targets), and evaluate "
                "inside torch.no_grad()"
            )
        assert self._module is not None
        inputs = call_arguments(self._module, args, kwargs)
        with torch.inference_mode(False), torch.no_grad():
            pipe = self._pipeline(inputs)
            return self._dims.evaluate(pipe, self._evaluated, self._call(inputs), self._settings.num_microbatches)

    def _from_last_stage(self, found: Any) -> Any:
        assert self.pipeline is not None
        return from_last_stage(self.pipeline, found, self.mesh.get_group("pp"), self.root_device)

    def _call(self, inputs: Any) -> Call:
        assert self._module is not None
        return Call.of(self._module, inputs)

    def _pipeline(self, inputs: Any) -> zb.Pipeline:
        """Returns the pipeline, which is made with the first batch."""
        if self._module is None:
            raise InputError("PipelineStrategy has no module: call fabric.setup(model, optimizer) first")
        if self.pipeline is None:
            settings = self._settings
            example = inputs if isinstance(inputs, (tuple, dict)) else (inputs,)
            with torch.enable_grad():
                self.pipeline = settings.pipeline_of(
                    self._module, example, self._losses, self._losses.weight, self.mesh, settings.batch_dims
                )
                self.pipeline._steps.losses.comparison.is_on = False  # `MicrobatchLosses` do
                self.pipeline._steps.cut_model.pipe = "fabric.strategy.pipeline"
                self.pipeline._steps.cut_model.remedy = "call fabric.save(path, {'model': model}) on all ranks, or "
        return self.pipeline

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        raise InputError("fabric.backward has no part in a pipeline: fabric.strategy.step(inputs, targets) runs the backward passes, too")

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        """Clips by the norm of the whole model, and returns the norm."""
        if self.pipeline is None:
            raise InputError("fabric.clip_gradients has no gradients to clip before the first fabric.strategy.step")
        return self.pipeline.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)

    # Checkpoints: whole, as on one device

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the state of the whole module, on every rank."""
        whole = module.module if isinstance(module, _Evaluated) else module
        if self.pipeline is None or whole is not self._module:
            return super().get_module_state_dict(whole)
        with gathering(self.pipeline._steps, whole, wanted=True):
            return super().get_module_state_dict(whole)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        whole = module.module if isinstance(module, _Evaluated) else module
        if self.pipeline is not None and whole is self._module:
            make_whole(self.pipeline, whole)
        super().load_module_state_dict(whole, state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the state of the whole optimizer on the first rank, and this rank's part on others."""
        return self._whole_optimizer_state(optimizer.state_dict(), optimizer, self.pipeline)

    def teardown(self) -> None:
        """Closes the pipeline, on every rank."""
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        super().teardown()


class _Evaluated(nn.Module):
    """A module whose call runs the forward of a batch in the pipeline."""

    def __init__(self, strategy: PipelineStrategy, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._strategy = strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._strategy.evaluate(args, kwargs)
