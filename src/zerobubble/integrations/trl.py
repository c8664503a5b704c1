"""`PipelineSFTTrainer`: TRL's SFTTrainer, with the model in a pipeline.

SFTTrainer gives the model a forward with a fused head: called with `fused_lm_head=True`, it returns the log-probability of each label
instead of logits. The stages of a pipeline keep the model's own head. The rank of the last stage computes from its logits what the fused
head returns, so it holds the logits of one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.integrations.versions import needed, refuse_wrong_versions

with needed("trl"):
    import trl

    from .transformers import PipelineMixin


MEANS = ("entropy", "mean_token_accuracy")
"""The metrics that SFTTrainer computes as means over labels."""


class PipelineSFTTrainer(PipelineMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` with the model in a pipeline. Its arguments are those of SFTTrainer and of `PipelineMixin`."""

    _known_methods = ("SFTTrainer.prediction_step", "SFTTrainer.training_step")
    _merged_attributes = ("_metrics", "_labels", "_total_train_tokens")
    _gathers_counted = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_wrong_versions("trl")
        self._labels: list[int] = []  # for each microbatch, the number of labels that count, in all replicas
        super().__init__(*args, **kwargs)
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        vars(model).pop("forward", None)  # the fused one: zb.split cuts only models that have the forward of their class

    @property
    def pipeline(self) -> zb.Pipeline:
        """The pipeline. Raises `InputError` for a bidirectional schedule, with which each of two ranks would have half of the metrics."""
        pipe = super().pipeline
        if len(pipe.schedule.placement.routes) > 1:
            raise InputError(
                "SFTTrainer has metrics of every microbatch, which {got!r} computes on several ranks: choose a schedule of one direction, "
                "such as {expected!r}",
                argument="schedule",
                got=pipe.schedule.name,
                expected="zb-v",
            )
        return pipe

    def _arguments_of_stages(self, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = super()._arguments_of_stages(arguments)
        if taken.pop("fused_lm_head", False):
            taken = {name: value for name, value in taken.items() if name not in ("labels", "shift_labels")}
        return taken

    def _output_of_model(self, output: Any, arguments: dict[str, Any]) -> Any:
        """Returns the fields of `trl.trainer.utils.FusedCausalLMOutput` if SFTTrainer requests the fused head."""
        if not arguments.get("fused_lm_head"):
            return output
        logits, labels = output["logits"].float(), arguments.get("shift_labels")
        if labels is None:
            logits, labels = logits[:, :-1], arguments["labels"][:, 1:]
        mask = (labels != -100) & self._is_counted
        self._labels.append(int(self.accelerator.gather_for_metrics(mask.sum()).sum()))
        log_softmax = logits.log_softmax(-1)
        log_probs = log_softmax.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0)
        with torch.no_grad():
            entropy = -(log_softmax.exp() * log_softmax).sum(-1).masked_fill(~mask, 0)
            is_top1 = (logits.argmax(-1) == labels) & mask
        return SimpleNamespace(log_probs=log_probs, entropy=entropy, is_top1=is_top1, label_mask=mask, aux_loss=output.get("aux_loss"))

    def _may_repeat(self, arguments: dict[str, Any]) -> bool:
        """SFTTrainer calls the model once more for metrics or logits, without gradients."""
        return not torch.is_grad_enabled()

    def _needs_outputs(self, prediction_loss_only: bool) -> bool:
        return not prediction_loss_only

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._metrics_of_a_batch("train"):
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._metrics_of_a_batch("eval"):
            return super().prediction_step(*args, **kwargs)

    @contextmanager
    def _metrics_of_a_batch(self, mode: str) -> Iterator[None]:
        """A context that merges metrics into one value per batch. SFTTrainer adds one per `compute_loss`, here per microbatch."""
        before = {name: len(self._metrics[mode][name]) for name in MEANS}
        self._labels.clear()
        yield
        for name, first in before.items():
            values = self._metrics[mode][name]
            total = sum(value * count for value, count in zip(values[first:], self._labels, strict=True))
            values[first:] = [total / max(sum(self._labels), 1)] if self._labels else []

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs on every rank, with the metrics that the rank of the last stage has computed."""
        metrics_here = {mode: dict(metrics) for mode, metrics in self._metrics.items()} if self._has_last_stage else None
        for mode, metrics in self._from_last_stage(metrics_here).items():
            self._metrics[mode].update(metrics)
        super().log(logs, start_time)

    def _wrong_options(self) -> list[str]:
        wrong = {
            "activation_offloading": (self.args.activation_offloading, "give offload in pipeline_options"),
            "padding_free": (self.padding_free, 'use packing_strategy="wrapped"; one row of all samples cannot be cut into microbatches'),
        }
        return super()._wrong_options() + [f"{name}: {remedy}" for name, (value, remedy) in wrong.items() if value]
