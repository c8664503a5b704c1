"""`PipelineTrainer`: the Trainer of Transformers, with the model in a pipeline.

The model stays the Trainer's `model`, whole on every rank: its class, configuration, names and `save_pretrained` are what the rest of
Transformers works with. `zb.split` cuts it, and the stages use its parameters. So each rank trains its own stages' part of `model`. During
training, the other parts are released; saves, and the end of `train`, gather them.

Trainer computes the loss by `compute_loss(model, inputs)`, which users and TRL override. Here it runs for each microbatch, as
`trainer_loss` describes, and the results are those of one call for the batch, up to rounding.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.integrations.versions import needed, refuse_wrong_versions
from zerobubble.models.observation.example import TAKES_SUMS
from zerobubble.runtime.frameworks import ALIKE, OUTPUTS, gathering, make_whole, states_restored

with needed("transformers"):
    import transformers
    from accelerate.data_loader import prepare_data_loader
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers.trainer import SCHEDULER_NAME
    from transformers.trainer_utils import HPSearchBackend
    from transformers.training_args import ParallelMode

    from zerobubble.integrations.batches import num_samples, samples_of
    from zerobubble.integrations.hidden_methods import refuse_hidden_methods
    from zerobubble.integrations.over_replicas import gather_over_replicas, reduce_over_replicas
    from zerobubble.integrations.stream_ends import count_samples, note_remainder, num_read, nums_counted
    from zerobubble.integrations.trainer_callbacks import SharedCallbacks
    from zerobubble.integrations.trainer_checkpoint import load_optimizer_of_one_device
    from zerobubble.integrations.trainer_data import refuse_different_batches, with_properties
    from zerobubble.integrations.trainer_example import example_of, remedies_of_trainer
    from zerobubble.integrations.trainer_loss import Batch, TrainerLoss
    from zerobubble.integrations.trainer_options import wrong_options
    from zerobubble.integrations.whole_model import from_last_stage, replaced
    from zerobubble.integrations.whole_outputs import WholeOutputs

FOLDER = "pipeline_optimizer"
"""The folder of a checkpoint of Trainer that has the state of the pipeline and its optimizer.

Trainer takes a folder for an optimizer if "optimizer" is in its name. So Trainer without a pipeline looks for optimizer.pt, and raises an
error if there is none, instead of starting with a new optimizer.
"""


class _TrialEndedError(Exception):
    """Rank 0 ended a trial of a search for hyperparameters."""


def default_microbatches(ranks: int, samples: int) -> int:
    """Returns the number of microbatches of a batch if none is given: four per pipeline rank, and at most `samples`."""
    return min(4 * ranks, samples)


REPLACED = (
    "_clip_grad_norm",
    "_get_grad_norm",
    "_load_optimizer_and_scheduler",
    "_save_optimizer_and_scheduler",
    "_wrap_model",
    "close",
    "pipeline",
    "prediction_step",
    "save_model",
    "training_step",
)
"""The methods of Trainer that the mixin replaces. It extends others by `super()`."""

_Trainer: Any = object
"""The base class for type checkers: the mixin comes before a subclass of Trainer."""


class PipelineMixin(_Trainer):
    """Lets any subclass of Trainer train in a pipeline: `class PipelineSFTTrainer(PipelineMixin, SFTTrainer)`.

    Takes the arguments of Trainer, and four more. `per_device_train_batch_size` is the batch of one replica, which all ranks of its
    pipeline train together. Start the script with `torchrun`, and call `close()` at the end.

    Args:
        schedule: What `zb.Pipeline` accepts.
        num_microbatches: The number of microbatches of a replica's batch. By default, four for each rank of the pipeline, and at most
            `per_device_train_batch_size`.
        loss_weight: Returns what the mean loss of a microbatch divides by, given its inputs, such as the sum of the weights of its classes.
            By default, it is found out whether `compute_loss` sums, or averages over samples, labels or tokens; other means are refused.
        pipeline_options: Further options of `zb.Pipeline` by name, and "cuts", "example" and "inside_blocks" of `zb.split`. A "mesh" has
            the pipeline along "pp" and replicas along "dp"; without one, all ranks form one pipeline.

    Raises:
        InputError: For options of Trainer that a pipeline does not support, all of them at once.
    """

    _is_counted = True
    """Whether samples of this replica's batch count, rather than fill the last batch."""
    _merged_attributes: ClassVar[tuple[str, ...]] = ()
    """The attributes that `compute_loss` changes for each microbatch, and the class merges itself."""
    _gathers_counted: ClassVar[bool] = False
    """Whether `compute_loss` gathers sums over the samples that count only."""
    _known_methods: ClassVar[tuple[str, ...]] = ("Seq2SeqTrainer.prediction_step",)
    """Methods of frameworks that the class accounts for."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_hidden_methods(cls, PipelineMixin, transformers.Trainer, REPLACED, cls._known_methods)

    def __init__(
        self,
        *args: Any,
        schedule: Any = "zb-v",
        num_microbatches: int | None = None,
        loss_weight: Callable[[Mapping[str, Any]], float | Tensor] | None = None,
        pipeline_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_wrong_versions("transformers")
        self._schedule = schedule
        self._options = dict(pipeline_options or {})
        self._split_options = {name: self._options.pop(name) for name in ("cuts", "example", "inside_blocks") if name in self._options}
        self._mesh: DeviceMesh | None = self._options.get("mesh")
        self._pipe: zb.Pipeline | None = None
        self._cut_model: nn.Module | None = None
        self._own_optimizer: torch.optim.Optimizer | None = None
        self._given_groups: list[list[Tensor]] = []
        super().__init__(*args, **kwargs)
        self._whole_outputs = WholeOutputs(self._from_last_stage)
        self._computed = TrainerLoss(self, loss_weight, self._options.get("batch_dims", {}), self._merged_attributes)
        if faults := self._wrong_options():
            raise InputError("{trainer} cannot train with {faults}", trainer=type(self).__name__, faults="; ".join(faults))
        self._num_replicas, self._replica = self._replicas()
        self._pipeline_size = dist.get_world_size() // self._num_replicas
        self._callbacks = SharedCallbacks(self)
        for name in ("training_step", "log"):  # of a subclass of the user
            setattr(self, name, self._counting_replicas()(getattr(self, name)))
        self._same_stages = self._group_of_same_stages()
        self._count_replicas_in_accelerator()
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
            if "example" not in self._split_options:
                self._split_options["example"] = example_of(self, self._computed)
            with remedies_of_trainer():
                stages = zb.split(self.model, **self._split_options)
            dims = {OUTPUTS: 0, **(self._options.get("batch_dims") or {})}
            options = {"loss_weight": self._computed.weight, **self._options, "batch_dims": dims}
            self._pipe = zb.Pipeline(stages, self._schedule, self._num_microbatches, self._computed.loss, **options)
            for stage in self._pipe.modules.values():
                setattr(stage, TAKES_SUMS, True)  # `TrainerLoss` weights them
            self._pipe._steps.losses.comparison.is_on = False  # `TrainerLoss` does
            self._pipe._steps.cut_model.pipe = "trainer.pipeline"
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

    def create_accelerator_and_postprocess(self) -> None:
        """Makes an Accelerator, as a search for hyperparameters does again for each trial."""
        super().create_accelerator_and_postprocess()
        if hasattr(self, "_same_stages"):  # else Trainer is not made yet
            self._count_replicas_in_accelerator()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains like Trainer. If rank 0 ends a trial of a search early, returns None on the other ranks, which go on to the next trial."""
        try:
            return super().train(*args, **kwargs)
        except _TrialEndedError:
            return None

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Reports metrics to the search. Only rank 0 has the study, so it says to all whether the trial ends here."""
        ends = [False]
        try:
            super()._report_to_hp_search(trial, step, metrics)
        except Exception:
            ends = [True]
            raise
        finally:
            if trial is not None and self.hp_search_backend == HPSearchBackend.OPTUNA:
                dist.broadcast_object_list(ends, src=0)
        if ends[0]:
            raise _TrialEndedError

    def _count_replicas_in_accelerator(self) -> None:
        """Makes the loaders and gathered metrics of the Accelerator count replicas."""
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        self.accelerator.gather_for_metrics = partial(gather_over_replicas, self._same_stages, self.accelerator)
        self.gather_function = self.accelerator.gather_for_metrics

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a loader like Trainer, whose sampler and workers are those of the replica."""
        with self._counting_replicas(process_index=self._replica):
            return super()._get_dataloader(*args, **kwargs)

    @contextmanager
    def _counting_replicas(self, count: int | None = None, **properties: Any) -> Iterator[None]:
        """A context in which Trainer and code of the user count replicas, or `count`, instead of processes, and gather among replicas: to
        scale losses, and to count steps, samples, and the workers of data loaders."""
        count = self._num_replicas if count is None else count
        args = with_properties(self.args, world_size=count, **properties)
        state = with_properties(self.accelerator.state, num_processes=count)
        collectives = {"gather": self._gather_among_replicas, "reduce": self._reduce_among_replicas}
        with replaced(self, args=args, get_tp_size=super().get_tp_size), replaced(self.accelerator, state=state, **collectives):
            yield

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
        with self._counting_replicas():
            super()._track_num_input_tokens(inputs)

    def store_flos(self) -> None:
        """Counts the operations of a batch once, not on each rank of the pipeline."""
        self.current_flos /= self._pipeline_size
        super().store_flos()

    # The model and its optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training and self.optimizer is not None:
            self._keep_parameters_of_stages()
        return _Stages(self.pipeline, self.model, self._output_of_batch)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Makes the optimizer of this rank's parameters."""
        is_given = self.optimizer is not None
        stages = model if is_given else _Stages(self.pipeline, self.model, self._output_of_batch)
        optimizer: torch.optim.Optimizer = super().create_optimizer(stages)
        if not is_given:
            self._own_optimizer = optimizer
        return optimizer

    def _groups_of_whole_model(self) -> list[list[Tensor]]:
        """Returns the parameter groups that the optimizer would have on one device, with the parameters in the same order."""
        if self.optimizer.optimizer is not self._own_optimizer:
            return self._given_groups
        with replaced(self, optimizer=None):
            return [group["params"] for group in super().create_optimizer(self.model).param_groups]

    def _keep_parameters_of_stages(self) -> None:
        """Takes the parameters of other ranks' stages from the optimizer, which a subclass may have made of all parameters."""
        here = {id(parameter) for parameter in self.pipeline.parameters()}
        others = {id(parameter) for parameter in self.model.parameters()} - here
        if not isinstance(self.optimizer, AcceleratedOptimizer):  # the first time
            self._given_groups = [list(group["params"]) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in others]
        if {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]} - here:
            remedy = "make it of model.parameters(), and what else is trained, such as a head of the trainer, a module of the model"
            raise InputError("the optimizer has parameters that are not those of trainer.model", remedy=remedy)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the names in the whole model of the parameters with weight decay."""
        return super().get_decay_parameter_names(self.model)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipeline.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.pipeline.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # A step

    @remedies_of_trainer()
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of one batch in the pipeline. Returns its loss on every rank."""
        model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        refuse_different_batches(self.pipeline, inputs)
        with self._autocast():
            count = self._computed.num_microbatches(inputs)
            batch = self._computed.begin(inputs, num_items_in_batch, self._factor(num_items_in_batch), count, trains=True)
            self.pipeline._steps.cut_model.release()
            loss = self.pipeline.step(batch.arguments, batch.targets, num_microbatches=count)
            self._computed.finish(batch)
            self._computed.check(batch, inputs, loss)
        if (steps := self.args.torch_empty_cache_steps) is not None and self.state.global_step % steps == 0:
            transformers.trainer.clear_device_cache()
        return loss.detach().to(self.args.device)

    def _factor(self, num_items: Any) -> float:
        """Returns the factor by which Trainer scales the loss of a batch that accumulates gradients with others."""
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and num_items is not None)
        return 1.0 if is_scaled else 1 / self.current_gradient_accumulation_steps

    def _autocast(self) -> Any:
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.accelerator.mixed_precision == "bf16")

    def _arguments_of_stages(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the model that the stages take."""
        return arguments

    def _output_of_model(self, output: Any, arguments: dict[str, Any]) -> Any:
        """Returns what the model returns for `arguments`, made from the output of the last stage."""
        return output

    def _may_repeat(self, arguments: dict[str, Any]) -> bool:
        """Returns whether `compute_loss` may call the model once more, with these arguments, and get the same output."""
        return False

    def _needs_outputs(self, prediction_loss_only: bool) -> bool:
        """Returns whether an evaluation asks `compute_loss` for outputs."""
        return True

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        with self._counting_replicas(), replaced(self.args, average_tokens_across_devices=False):
            items = super()._get_num_items_in_batch(batch_samples, device)
        return reduce_over_replicas(self._same_stages, items * self._is_counted) if isinstance(items, Tensor) else items

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Logs, evaluates and saves like Trainer. A flag that a callback sets in `on_log` of a step on one rank counts on all."""
        log, is_due = self.log, self.control.should_log and self.state.global_step > self._globalstep_last_logged

        def shared_log(*args: Any, **kwargs: Any) -> None:
            nonlocal is_due
            log(*args, **kwargs)
            if is_due:  # later calls are logs of the evaluation
                is_due = False
                self._callbacks.share(self.control, "on_log")

        with replaced(self, log=shared_log):
            super()._maybe_log_save_evaluate(*args, **kwargs)

    # Evaluation

    @remedies_of_trainer()
    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **generation: Any,
    ) -> tuple[Any, Any, Any]:
        """Runs the forward of one batch in the pipeline. Returns loss, logits and labels on every rank.

        With `predict_with_generate` of Seq2SeqTrainer, every rank generates by the whole model, and returns the tokens for logits.
        """
        note_remainder(self.accelerator, inputs, self._num_replicas)
        if self._generates and not prediction_loss_only:
            loss, *predicted = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **generation)
            if loss is not None and self._num_replicas > 1:
                with torch.no_grad(), self._autocast():
                    loss, _ = self._evaluated(self._prepare_inputs(inputs), [], True)
            return (loss, *predicted)
        inputs = self._prepare_inputs(inputs)
        refuse_different_batches(self.pipeline, inputs)
        if ignore_keys is None:
            ignore_keys = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        labels = tuple(inputs[name].detach() for name in self.label_names) if has_labels else None
        with torch.no_grad(), self._autocast():
            evaluated = self._evaluated if has_labels else self._outputs
            loss, logits = evaluated(inputs, ignore_keys, prediction_loss_only)
        if prediction_loss_only:
            return loss, None, None
        logits = logits[0] if len(logits) == 1 else logits
        return loss, logits, labels[0] if labels is not None and len(labels) == 1 else labels

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """Evaluates like Trainer, on all ranks. To generate, every rank gathers the whole model."""
        if hasattr(self, "model_preparation_time") or not (self.is_in_train or self.state.global_step):  # as Trainer, before it trains
            start = time.monotonic()
            self._wrap_model(self.model, training=False)
            self.model_preparation_time = round(time.monotonic() - start, 4)
        count_samples(dataloader)
        self.pipeline._steps.gather(None, f"starting the {description.lower()} of Trainer")  # an error if a rank does not
        with self._gathering(everywhere=True) if self._generates else nullcontext():
            output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        return output if (count := num_read(dataloader)) is None else output._replace(num_samples=count)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._counting_replicas():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._counting_replicas():
            return super().predict(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        with self._counting_replicas():
            super().create_model_card(*args, **kwargs)

    @property
    def _generates(self) -> bool:
        return isinstance(self, transformers.Seq2SeqTrainer) and self.args.predict_with_generate

    @remedies_of_trainer()
    def _output_of_batch(self, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """Returns the output of the model on every rank, for a method of a subclass that calls it."""
        name = type(self).__name__
        if torch.is_grad_enabled():
            remedy = "compute the loss in compute_loss, and let training_step call super().training_step"
            raise InputError("{cls} trains by calling the model itself, outside of the pipeline", cls=name, remedy=remedy)
        if args:
            raise InputError(
                "{cls} calls the model with {unnamed} arguments without names", cls=name, unnamed=len(args), remedy="name them"
            )
        arguments = {label: value for label, value in arguments.items() if value is not None}
        refuse_different_batches(self.pipeline, arguments)
        with self._autocast():
            samples = num_samples(arguments, self._options.get("batch_dims"))
            return self._whole_outputs.of(self.pipeline, arguments, samples, min(samples, self._num_microbatches))

    def _evaluated(self, inputs: dict[str, Any], ignored: list[str], loss_only: bool) -> tuple[Tensor, Any]:
        """Returns, on every rank, the loss of the batch of all replicas and the outputs that `compute_loss` returns for this replica's.

        Samples that fill the last batch do not count. A replica runs its other samples only, at least one, and all run equally many
        microbatches. The first row of its outputs takes the place of the others, which Trainer drops.
        """
        dims = self._options.get("batch_dims")
        samples = num_samples(inputs, dims)
        counts = nums_counted(self.accelerator, samples, self._num_replicas)
        here = max(counts[self._replica], 1)
        whole, inputs = inputs, inputs if here == samples else samples_of(inputs, range(here), dims)
        count = min(self._computed.num_microbatches(whole), max(counts[-1], 1))
        returns_outputs = self._needs_outputs(loss_only)
        batch: Batch | None = None

        def run(count: int) -> Any:
            nonlocal batch
            if batch is not None:
                self._computed.drop(batch)
            batch = self._computed.begin(whole, num_items, 1.0, count, trains=False, returns_outputs=returns_outputs, counted=inputs)
            _, output = self.pipeline.eval_step(batch.arguments, batch.targets, num_microbatches=count)
            evaluated = None
            if output is not None:
                outputs = None if loss_only else batch.joined_outputs()
                rest = None if outputs is None or isinstance(outputs, Mapping) else outputs[1:]
                evaluated = self._computed.own_loss(batch), _values(outputs, (*ignored, "loss"), rest)
            return self._from_last_stage(evaluated)

        with replaced(self, _is_counted=counts[self._replica] > 0):
            num_items = self._get_num_items_in_batch([inputs], self.args.device)
            loss, outputs = self._of_whole_batch(run, inputs, (loss_only, returns_outputs), count)
        assert batch is not None
        self._computed.finish(batch)
        loss = self._computed.loss_of_replicas(batch, loss)
        return loss, outputs if here == samples else pytree.tree_map(partial(_with_rows, rows=here, samples=samples), outputs)

    def _outputs(self, inputs: dict[str, Any], ignored: list[str], loss_only: bool) -> tuple[None, Any]:
        """Returns the outputs of the model for a batch without labels, on every rank."""
        arguments = self._arguments_of_stages(dict(inputs))

        def run(count: int) -> Any:
            _, output = self.pipeline.eval_step([arguments] if count == 1 else arguments, num_microbatches=count)
            return self._from_last_stage(None if output is None or loss_only else _values(output, ignored, output))

        return None, self._of_whole_batch(run, inputs, (), self._computed.num_microbatches(inputs))

    def _of_whole_batch(self, run: Callable[[int], Any], inputs: dict[str, Any], form: tuple[bool, ...], count: int) -> Any:
        """Returns what a `run` of a batch in `count` microbatches gives, see `WholeOutputs.of_runs`."""
        return self._whole_outputs.of_runs(run, (*form, *inputs), num_samples(inputs, self._options.get("batch_dims")), count)

    def _gather_among_replicas(self, tensor: Any) -> Any:
        return gather_over_replicas(self._same_stages, None, tensor)

    def _gather_predictions(self, tensor: Tensor) -> Any:
        """Gathers what `Accelerator.gather` has on one device: no rows of samples that fill the last batch, and all of the losses."""
        return gather_over_replicas(self._same_stages, self.accelerator if tensor.ndim > 1 else None, tensor)

    def _reduce_among_replicas(self, tensor: Any, *args: Any, **options: Any) -> Any:
        return reduce_over_replicas(self._same_stages, tensor, *args, **options)

    @property
    def gather_function(self) -> Any:
        """What gathers predictions: `Accelerator.gather_for_metrics` or `gather`, from one rank of each replica."""
        return self._gather_function

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        is_of_all_ranks = function == self.accelerator.gather  # Seq2SeqTrainer sets it
        self._gather_function = self._gather_predictions if is_of_all_ranks else function

    @property
    def _has_last_stage(self) -> bool:
        pipe = self.pipeline
        return bool(pipe.rank == pipe.schedule.placement.routes[0][-1])

    @property
    def _ranks_of_pipeline(self) -> set[int]:
        group = dist.group.WORLD if self._mesh is None else self._mesh.get_group("pp")
        return set(dist.get_process_group_ranks(group))

    def _from_last_stage(self, value: Any) -> Any:
        """Returns, on all ranks of the pipeline, the `value` that the rank of the last stage passes."""
        group = dist.group.WORLD if self._mesh is None else self._mesh.get_group("pp")
        return from_last_stage(self.pipeline, value, group, self.args.device)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the whole model from the first rank, for `from_pretrained`. Every rank calls it."""
        with self._gathering():
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=self.model.state_dict())
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _gathering(self, *, everywhere: bool = False) -> AbstractContextManager[None]:
        """Returns a context in which the model is whole on the ranks that save, or on all. It may already be whole, as after `train`."""
        is_whole = self._pipe is None or self._pipe._steps.cut_model.is_whole
        return nullcontext() if is_whole else gathering(self.pipeline._steps, self.model, wanted=everywhere or self.args.should_save)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the model whole on every rank, before the best weights are loaded and callbacks see the end of training."""
        make_whole(self.pipeline, self.model)
        return super()._finalize_training(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        zb.save(os.path.join(output_dir, FOLDER), self.pipeline, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if os.path.isdir(os.path.join(checkpoint, FOLDER)):
            with states_restored(None, self.args.device):  # Trainer restores its own after it has fetched the first batches
                zb.load(os.path.join(checkpoint, FOLDER), self.pipeline, self.optimizer.optimizer)
        else:
            load_optimizer_of_one_device(checkpoint, self.optimizer.optimizer, self._groups_of_whole_model())
        if os.path.isfile(scheduler := os.path.join(checkpoint, SCHEDULER_NAME)):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the random states of every rank, also where a callback saves."""
        with self._counting_replicas(dist.get_world_size()):
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads the random states of the first rank of this pipeline like Trainer: the ranks of a pipeline draw the same batches.

        From a checkpoint of one process, every rank loads the same.
        """
        properties: dict[str, Any] = {"world_size": 1, "parallel_mode": ParallelMode.NOT_DISTRIBUTED}
        if checkpoint is None or not os.path.isfile(os.path.join(checkpoint, "rng_state.pth")):
            properties = {"world_size": max(2, self.args.world_size), "parallel_mode": ParallelMode.DISTRIBUTED}
            properties["process_index"] = min(self._ranks_of_pipeline)
        with replaced(self, args=with_properties(self.args, **properties)):
            super()._load_rng_state(checkpoint)

    # Options that a pipeline does not support

    def _wrong_options(self) -> list[str]:
        """Returns the options of Trainer that a pipeline does not support, and what to set instead."""
        return wrong_options(self.args, self.model, self._mesh)


class PipelineTrainer(PipelineMixin, transformers.Trainer):
    """`transformers.Trainer` with the model in a pipeline. Its arguments are those of Trainer and of `PipelineMixin`."""


def _values(outputs: Any, ignored: Sequence[str], other: Any) -> Any:
    """Returns the outputs of a model whose names are not ignored, or `other` if they have no names."""
    return tuple(value for name, value in outputs.items() if name not in ignored) if isinstance(outputs, Mapping) else other


def _with_rows(leaf: Any, rows: int, samples: int) -> Any:
    """Returns a tensor of so many `rows` with the first row repeated up to a row for each of `samples`."""
    if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != rows:
        return leaf
    return torch.cat([leaf, leaf[:1].expand(samples - rows, *leaf.shape[1:])])


class _Stages(nn.Module):
    """This rank's stages, with the names and the mode of the whole model."""

    def __init__(self, pipe: zb.Pipeline, model: nn.Module, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(pipe.modules.values())
        self._set_mode = model.train
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs)

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
