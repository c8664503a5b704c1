"""`PipelineTrainer`: the Trainer of Transformers, with the model in a pipeline.

The model stays the Trainer's `model`, whole on every rank: its class, configuration, names and `save_pretrained` are what the rest of
Transformers works with. `zb.split` cuts it, and the stages use its parameters. So each rank trains its own stages' part of `model`. During
training, the other parts are released; saves, and the end of `train`, gather them.

Trainer computes the loss by `compute_loss(model, inputs)`, which users and TRL override. Here it runs once per microbatch, on the rank of
the last stage, where a call of `model` returns the output that the pipeline has computed. It also runs once before each step, to capture
the arguments that it passes to the model.

Trainer sums the losses of tokens and divides by their number in the whole batch, while a pipeline averages microbatches. Each microbatch
therefore gets the weight count / total, and its loss is first divided by this weight; the results are equal up to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.trainer import SCHEDULER_NAME

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.integrations.versions import refuse_wrong_versions
from zerobubble.integrations.whole_model import CalledError, from_last_stage, raise_called, replaced
from zerobubble.runtime.gathered import gathering, make_whole
from zerobubble.runtime.options import ALIKE

FOLDER = "pipeline"
"""The folder of a checkpoint of Trainer that has the state of the pipeline and its optimizer."""


def default_microbatches(ranks: int, samples: int) -> int:
    """Returns the number of microbatches of a batch if none is given: four per pipeline rank, and at most `samples`."""
    return min(4 * ranks, samples)


class _Scale(NamedTuple):
    """How the loss of a step is scaled.

    Attributes:
        items: The number of items by which Trainer divides a sum of losses; None if the loss is a mean over samples.
        share: The factor of every loss, for batches that accumulate gradients.
    """

    items: float | None
    share: float


_Trainer: Any = object
"""The base class for type checkers: the mixin comes before a subclass of Trainer."""


class PipelineMixin(_Trainer):
    """Lets any subclass of Trainer train in a pipeline: `class PipelineSFTTrainer(PipelineMixin, SFTTrainer)`.

    Takes the arguments of Trainer, and three more. `per_device_train_batch_size` is the batch of one replica, which all ranks of its
    pipeline train together. Start the script with `torchrun`, and call `close()` at the end.

    Args:
        schedule: What `zb.Pipeline` accepts.
        num_microbatches: The number of microbatches of a replica's batch. By default, four for each rank of the pipeline, and at most
            `per_device_train_batch_size`.
        pipeline_options: Further options of `zb.Pipeline` by name, and "cuts" and "inside_blocks" of `zb.split`. A "mesh" has the pipeline
            along "pp" and replicas along "dp"; without one, all ranks form one pipeline.

    Raises:
        InputError: For options of Trainer that a pipeline does not support, all of them at once.
    """

    def __init__(
        self,
        *args: Any,
        schedule: Any = "zb-v",
        num_microbatches: int | None = None,
        pipeline_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_wrong_versions("transformers")
        self._schedule = schedule
        self._options = dict(pipeline_options or {})
        self._split_options = {name: self._options.pop(name) for name in ("cuts", "inside_blocks") if name in self._options}
        self._mesh: DeviceMesh | None = self._options.get("mesh")
        self._pipe: zb.Pipeline | None = None
        self._cut_model: nn.Module | None = None
        self._scale = _Scale(None, 1.0)
        self._losses: list[tuple[float, Tensor]] = []  # weight and loss of each microbatch, on the rank of the last stage
        super().__init__(*args, **kwargs)
        if found := self._wrong_options():
            raise InputError("{trainer} cannot train with {faults}", trainer=type(self).__name__, faults="; ".join(found))
        self._num_replicas, self._replica = self._replicas()
        self._pipeline_size = dist.get_world_size() // self._num_replicas
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        self._same_stages = self._group_of_same_stages()
        self.accelerator.gather_for_metrics = partial(_gather_over_replicas, self.accelerator, self._same_stages)
        self.gather_function = self.accelerator.gather_for_metrics
        samples = self.args.per_device_train_batch_size
        self._num_microbatches = num_microbatches or default_microbatches(self._pipeline_size, samples)
        if self._num_microbatches > samples:
            raise InputError(
                "num_microbatches={got} is more than the {expected} samples of per_device_train_batch_size: raise this batch, which all "
                "ranks of a pipeline train together",
                argument="num_microbatches",
                got=self._num_microbatches,
                expected=samples,
            )

    def close(self) -> None:
        """Closes the pipeline. Every rank calls it, after the last step, evaluation or save."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    @property
    def pipeline(self) -> zb.Pipeline:
        """The pipeline, made at the first training step or evaluation: its timeline, plan and losses."""
        if self._cut_model is not self.model:  # `model_init` makes another model for each `train`
            self.close()
        if self._pipe is None:
            stages = zb.split(self.model, **self._split_options)
            options = {"loss_weight": self._weight, **self._options}
            self._pipe = zb.Pipeline(stages, self._schedule, self._num_microbatches, self._loss, **options)
            self._pipe._steps.cut_model.remedy = "call trainer.save_model on all ranks, or "
            self._cut_model = self.model
        return self._pipe

    # What Trainer asks about the ranks

    def get_tp_size(self) -> int:
        """The number of ranks that train the same batch."""
        return super().get_tp_size() * self._pipeline_size

    def _replicas(self) -> tuple[int, int]:
        """Returns the number of replicas of the pipeline, and the index of this rank's replica."""
        count, index = 1, 0
        if self._mesh is not None:
            for name in (name for name in self._mesh.mesh_dim_names or () if name in ALIKE):
                size = self._mesh[name].size()
                count, index = count * size, index * size + self._mesh.get_local_rank(name)
        return count, index

    def _group_of_same_stages(self) -> dist.ProcessGroup:
        """Returns the group of the ranks with the same stages as this one, in the order of the replicas.

        It has one rank of each replica, so values that all ranks of a replica share are gathered once per replica,
        and so are values that only the ranks of the last stage have.
        """
        position = dist.get_rank() if self._mesh is None else self._mesh.get_local_rank("pp")
        places = [(0, 0, 0)] * dist.get_world_size()
        dist.all_gather_object(places, (position, self._replica, dist.get_rank()))
        groups = {
            at: dist.new_group([rank for other, _, rank in sorted(places) if other == at]) for at in sorted({at for at, *_ in places})
        }
        return groups[position]

    def _prepare_data_loader(self, loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        """Prepares a loader like Accelerator, except that all ranks of a pipeline load the same batches."""
        accelerator = self.accelerator
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=self._num_replicas,
            process_index=self._replica,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=list(accelerator.rng_types),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._pipeline_size

    # The model and its optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return _Stages(self.pipeline, self.model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Makes the optimizer of this rank's parameters."""
        if self.optimizer is not None:
            self._refuse_optimizer()
        return super().create_optimizer(_Stages(self.pipeline, self.model))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the names in the whole model of the parameters with weight decay."""
        return super().get_decay_parameter_names(self.model)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipeline.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.pipeline.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # A step

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of one batch in the pipeline. Returns its loss on every rank."""
        model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        self._scale = self._scale_of(inputs, num_items_in_batch, self.current_gradient_accumulation_steps)
        self._losses.clear()
        self.pipeline._steps.cut_model.release()
        with self._autocast():
            loss = self.pipeline.step(self._arguments(inputs), inputs, num_microbatches=self._fewer_microbatches(inputs))
        return loss.detach().to(self.args.device)

    def _autocast(self) -> Any:
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.accelerator.mixed_precision == "bf16")

    def _fewer_microbatches(self, inputs: Mapping[str, Any]) -> int | None:
        """Returns the number of microbatches of a batch with fewer samples than microbatches: one per sample. None for other batches."""
        samples = _samples(inputs)
        return samples if samples < self._num_microbatches else None

    def _arguments(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the stages, captured from the call of the model by `compute_loss`."""
        try:
            with replaced(self.model, forward=raise_called(self.model)):
                self.compute_loss(self.model, dict(inputs), num_items_in_batch=self._scale.items)
        except CalledError as error:
            if error.call_args:
                unnamed = len(error.call_args)
                raise InputError(
                    "compute_loss calls the model with {unnamed} arguments without names; {remedy}", unnamed=unnamed, remedy="name them"
                ) from None
            return self._arguments_of_stages({name: value for name, value in error.call_kwargs.items() if value is not None})
        raise InputError("{cls}.compute_loss does not call the model", cls=type(self).__name__)

    def _arguments_of_stages(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the model that the stages take. The number of items is left out, as the stages compute mean losses."""
        return {name: value for name, value in arguments.items() if name != "num_items_in_batch"}

    def _output_of_model(self, output: Any, arguments: dict[str, Any]) -> Any:
        """Returns what the model returns for `arguments`, made from the output of the last stage, whose loss is a mean."""
        return output

    def _scale_of(self, inputs: Mapping[str, Any], num_items: Any, steps: int) -> _Scale:
        """Returns how to scale the losses of this batch, which is one of `steps` batches that accumulate gradients."""
        items = None if num_items is None else float(num_items)
        if not items:
            is_scaled = self.loss_is_scaled_for_ga if self.loss_is_scaled_for_ga is not None else self.compute_loss_func is not None
            return _Scale(None, 1.0 if is_scaled else 1 / steps)
        total = torch.tensor(self._count(inputs) / items, dtype=torch.float64, device="cpu")
        if self._num_replicas > 1:
            total = total.to(self.args.device)
            dist.all_reduce(total, group=self._same_stages)
        return _Scale(items, float(total) / self._num_replicas)

    def _count(self, inputs: Mapping[str, Any]) -> int:
        """Returns the number of labels that count in a batch or microbatch, as Trainer counts them."""
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"]
        if self._loss_shifts_labels and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        return int(labels.ne(-100).sum())

    def _weight(self, inputs: Mapping[str, Any]) -> float:
        """Returns the weight of a microbatch in the mean loss of its batch."""
        return _samples(inputs) if self._scale.items is None else self._count(inputs) / self._scale.items

    def _loss(self, output: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the loss of one microbatch, as `compute_loss` computes it, divided by the microbatch's weight."""
        items = self._scale.items
        weight = self._weight(inputs)

        def forward(**kwargs: Any) -> Any:
            if "num_items_in_batch" in kwargs and isinstance(output, dict) and "loss" in output:
                output["loss"] = output["loss"] * weight
            return self._output_of_model(output, kwargs)

        with replaced(self.model, forward=forward):
            loss = self.compute_loss(self.model, dict(inputs), num_items_in_batch=items)
        self._losses.append((weight, loss.detach()))
        if items is None:
            return loss * self._scale.share
        return loss * (self._scale.share / weight) if weight else loss

    # Evaluation

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Runs the forward of one batch in the pipeline. Returns loss, logits and labels on every rank."""
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            ignore_keys = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        labels = tuple(inputs[name].detach() for name in self.label_names) if has_labels else None
        num_items = self._get_num_items_in_batch([inputs], self.args.device) if has_labels else None
        self._scale = self._scale_of(inputs, num_items, 1)
        self._losses.clear()
        with torch.no_grad(), self._autocast():
            arguments = self._arguments(inputs) if has_labels else dict(inputs)
            _, output = self.pipeline.eval_step(
                arguments, inputs if has_labels else None, num_microbatches=self._fewer_microbatches(inputs)
            )
        found = None
        if output is not None:  # on the rank of the last stage
            values = output.items() if isinstance(output, Mapping) else enumerate(output)
            logits = tuple(value for name, value in values if name not in (*ignore_keys, "loss") and not (has_labels and name == 0))
            found = (self._own_loss() if has_labels else None, None if prediction_loss_only else logits)
        loss, logits = self._from_last_stage(found)
        if prediction_loss_only:
            return loss, None, None
        logits = logits[0] if len(logits) == 1 else logits
        return loss, logits, labels[0] if labels is not None and len(labels) == 1 else labels

    def _own_loss(self) -> Tensor:
        """Returns the loss of this replica's batch. The pipeline would return the mean over replicas."""
        if self._scale.items is not None:
            return torch.stack([loss for weight, loss in self._losses if weight]).sum()
        return torch.stack([weight * loss for weight, loss in self._losses]).sum() / sum(weight for weight, _ in self._losses)

    def _from_last_stage(self, found: Any) -> Any:
        """Returns, on all ranks of the pipeline, what the rank of the last stage has `found`."""
        group = dist.group.WORLD if self._mesh is None else self._mesh.get_group("pp")
        return from_last_stage(self.pipeline, found, group, self.args.device)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the whole model from the first rank, for `from_pretrained`. Every rank calls it."""
        with self._gathering():
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=self.model.state_dict())
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _gathering(self) -> AbstractContextManager[None]:
        """Returns a context in which the model is whole on the ranks that save. It may already be whole, as after `train`."""
        is_whole = self._pipe is None or self._pipe._steps.cut_model.is_whole
        return nullcontext() if is_whole else gathering(self.pipeline._steps, self.model, wanted=self.args.should_save)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the model whole on every rank, before the best weights are loaded and callbacks see the end of training."""
        make_whole(self.pipeline, self.model)
        return super()._finalize_training(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        zb.save(os.path.join(output_dir, FOLDER), self.pipeline, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isdir(os.path.join(checkpoint, FOLDER)):
            return
        zb.load(os.path.join(checkpoint, FOLDER), self.pipeline, self.optimizer.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    # Options that a pipeline does not support

    def _wrong_options(self) -> list[str]:
        """Returns the options of Trainer that a pipeline does not support, and what to set instead."""
        args, found = self.args, []
        if not dist.is_initialized():
            found.append("there is no process group: start the script with torchrun")
        wrong = {
            "auto_find_batch_size": (args.auto_find_batch_size, "choose per_device_train_batch_size"),
            "fsdp": (args.fsdp, 'give a mesh with "dp" in pipeline_options'),
            "deepspeed": (args.deepspeed, "leave it out; the pipeline needs no engine"),
            "fp16": (args.fp16, "use bf16=True"),
            "torch_compile": (args.torch_compile, 'give pipeline_options={"split": "compiled"}'),
            "parallelism_config": (args.parallelism_config, "give a mesh in pipeline_options"),
            "dispatch_batches": (args.accelerator_config.dispatch_batches, "leave it out; every rank loads its own batches"),
            "split_batches": (args.accelerator_config.split_batches, "leave it out; per_device_train_batch_size is that of a replica"),
        }
        found += [f"{name}={given!r}: {remedy}" for name, (given, remedy) in wrong.items() if given]
        if args.n_gpu > 1:
            found.append(f"{args.n_gpu} GPUs in one process: start one process per GPU with torchrun")
        if getattr(self.model, "hf_device_map", None) is not None:
            found.append("a model with a device_map: load it without one")
        names = self._mesh.mesh_dim_names or () if self._mesh is not None else ()
        if self._mesh is not None and (unknown := [name for name in names if name not in ("pp", *ALIKE)]):
            found.append(f"a mesh along {', '.join(unknown)}: Trainer's models are only replicated, along {', '.join(sorted(ALIKE))}")
        return found

    def _refuse_optimizer(self) -> None:
        given = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if given - {id(parameter) for parameter in self.pipeline.parameters()}:
            raise InputError(
                "the optimizer has parameters of other ranks' stages",
                remedy="give optimizer_cls_and_kwargs instead, or make it of trainer.pipeline.parameters()",
            )


class PipelineTrainer(PipelineMixin, transformers.Trainer):
    """`transformers.Trainer` with the model in a pipeline. Its arguments are those of Trainer and of `PipelineMixin`."""


class _Stages(nn.Module):
    """This rank's stages, with the names and the mode of the whole model."""

    def __init__(self, pipe: zb.Pipeline, model: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(pipe.modules.values())
        self._set_mode = model.train

    def train(self, mode: bool = True) -> _Stages:
        self._set_mode(mode)
        return super().train(mode)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter


def _samples(inputs: Mapping[str, Any]) -> int:
    """Returns the number of samples of a batch."""
    return next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.ndim)


def _gather_over_replicas(accelerator: Any, group: dist.ProcessGroup, data: Any, use_gather_object: bool = False) -> Any:
    """Gathers like `Accelerator.gather_for_metrics`, from one rank of each replica."""

    def gather(tensor: Tensor) -> Tensor:
        tensor = tensor[None] if tensor.ndim == 0 else tensor.contiguous()
        everywhere = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(everywhere, tensor, group=group)
        return torch.cat(everywhere)

    gathered = recursively_apply(gather, data, error_on_other_type=True)
    state = accelerator.gradient_state
    if state.end_of_dataloader and state.remainder > 0:
        return recursively_apply(lambda tensor: tensor[: state.remainder], gathered)
    return gathered
