"""Trains with losses of one's own in subclasses of Trainer, or in a pipeline of all ranks, and writes logs, weights and errors to a folder.

`python train_with_own_losses.py FOLDER` is the reference; under torchrun, all ranks form one pipeline, or with `--replicas 2` two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset
from torchmetrics import MeanMetric
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

STEPS, BATCH = 4, 8
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
WEIGHTS = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
WHISPER = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
WHISPER |= {"vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MASK = 63
RARE = 41
SEEN: list[float] = []
POSITIONS = ("start_positions", "end_positions")


def language_model() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).double()


def expert_model() -> nn.Module:
    """A model that also returns the balance of its experts, a number of the whole batch, and a row of router logits for each token."""
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.0, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(vocab_size=64, num_key_value_heads=2, **experts, **SIZES)).double()


def balanced_model() -> nn.Module:
    """A model whose own loss has a term for the balance of its experts, a product of means over the batch."""
    model = expert_model()
    model.router_aux_loss_coef = 0.5
    return model


def classifier() -> nn.Module:
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=64, num_labels=3, pad_token_id=0, **SIZES)).double()


def scoring_model() -> nn.Module:
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=64, num_labels=1, pad_token_id=0, **SIZES)).double()


def masked_model() -> nn.Module:
    config = BertConfig(vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES)
    return BertForMaskedLM(config).double()


def sequence_model() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(vocab_size=64, dropout_rate=0.0, **T5)).double()


def answering_model() -> nn.Module:
    config = BertConfig(vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES)
    return BertForQuestionAnswering(config).double()


def choosing_model() -> nn.Module:
    config = BertConfig(vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES)
    return BertForMultipleChoice(config).double()


def speech_model() -> nn.Module:
    model = WhisperForConditionalGeneration(WhisperConfig(max_source_positions=10, max_target_positions=16, dropout=0.0, **WHISPER))
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model.double()


class TwoHeads(nn.Module):
    """A model of one's own with a class and a number for each sample, and trained weights of both losses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = masked_model().bert
        self.kind, self.number = nn.Linear(16, 3).double(), nn.Linear(16, 1).double()
        self.log_scales = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, input_ids: Any, kinds: Any = None, numbers: Any = None) -> dict[str, Any]:
        hidden = self.encoder(input_ids).last_hidden_state[:, 0]
        kind, number = self.kind(hidden), self.number(hidden).squeeze(-1)
        losses = (functional.cross_entropy(kind, kinds), functional.mse_loss(number, numbers)) if kinds is not None else (0.0, 0.0)
        scales = torch.exp(-self.log_scales)
        return {"loss": losses[0] * scales[0] + losses[1] * scales[1] + self.log_scales.sum(), "kind": kind, "number": number}


class FreshHead(nn.Module):
    """A model whose head is zero at first, so that all samples have the same loss: a mean over samples of means over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = masked_model().bert
        self.head = nn.Linear(16, 64).double()
        nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        logits = self.head(self.encoder(input_ids).last_hidden_state)
        if labels is None:
            return {"logits": logits}
        losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return {"loss": (losses.sum(1) / (labels != -100).sum(1)).mean(), "logits": logits}


def tokens(index: int) -> dict[str, Any]:
    """A sequence in which a number of labels does not count that differs between samples."""
    ids = torch.randint(1, 60, (12,), generator=torch.Generator().manual_seed(index))
    labels = ids.clone()
    labels[: index * 5 % 9] = -100
    return {"input_ids": ids, "labels": labels}


def full_tokens(index: int) -> dict[str, Any]:
    ids = tokens(index)["input_ids"]
    return {"input_ids": ids, "labels": ids.clone()}


def tokens_of_replicas(index: int) -> dict[str, Any]:
    """Full sequences in the first half of each batch, and others in the second."""
    return full_tokens(index) if index % BATCH < BATCH // 2 else tokens(index)


def padded_tokens(index: int) -> dict[str, Any]:
    """A sequence whose length is in its attention mask only."""
    ids = tokens(index)["input_ids"]
    mask = (torch.arange(12) < 12 - index * 5 % 7).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def rare_class(index: int) -> dict[str, Any]:
    """A sample of class 0, as are the first batches, or of a rare class."""
    return {"input_ids": tokens(index)["input_ids"], "labels": (2 if index % 11 == 10 else 0)}


def of_class(index: int) -> dict[str, Any]:
    return {"input_ids": tokens(index)["input_ids"], "labels": index * 7 % 3}


def choices(index: int) -> dict[str, Any]:
    """A question with four texts as answers."""
    texts = torch.stack([full_tokens(4 * index + choice)["input_ids"] for choice in range(4)])
    return {"input_ids": texts, "labels": index % 4}


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


def of_two_kinds(index: int) -> dict[str, Any]:
    number = torch.tensor(index % 5 / 4, dtype=torch.float64)
    return {"input_ids": tokens(index)["input_ids"], "kinds": index * 7 % 3, "numbers": number}


def speech(index: int) -> dict[str, Any]:
    sound = torch.rand(8, 20, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return {"input_features": sound, "labels": tokens(index)["input_ids"]}


def rarely_outside(index: int) -> dict[str, Any]:
    """A question whose answer begins outside of the text in few samples, so that the model ignores its position."""
    return {
        "input_ids": tokens(index)["input_ids"],
        "start_positions": 12 if index == RARE else index * 3 % 12,
        "end_positions": index % 12,
    }


def token_losses(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def mean_func(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return token_losses(outputs.logits, labels)


class Meter:
    """A sum, as in a script's own AverageMeter."""

    def __init__(self) -> None:
        self.total = 0.0


class Center(nn.Module):
    """A buffer that a loss moves."""

    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(1))


def model_with_own_state_dict() -> Any:
    """A model with a `state_dict` that has what is to be exported, as scripts for adapters set it."""
    model = language_model()
    whole = model.state_dict
    model.state_dict = lambda *args, **kwargs: {name: value for name, value in whole(*args, **kwargs).items() if "mlp" in name}
    return model


class FlagsOfOneRank(TrainerCallback):
    """Evaluates after the first and third step and stops after the third, by flags that the first rank sets."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            control.should_evaluate |= state.global_step == 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in logs and state.global_step == 3:
            control.should_evaluate = control.should_training_stop = True


class RaisesOnOneRank(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == 2:
            raise ValueError("no space left")


class ClipsValues(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)


class ChangesMode(TrainerCallback):
    """Changes how the loss is reduced after two steps."""

    trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.sums = state.global_step == 2


class CountsSamples(TrainerCallback):
    """Counts the samples of all processes in `total`, and saves the model after an evaluation."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.total += float(args.train_batch_size * args.world_size)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.save_model()


def classes(base: Any, generating: Any) -> dict[str, Any]:
    """The trainers, by name of a case."""

    class Mean(base):
        """The example of Transformers' documentation."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = self.loss_of(outputs.get("logits"), labels, inputs)
            return (loss, outputs) if return_outputs else loss

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            return token_losses(logits, labels)

    class Balanced(Mean):
        """Predicts the numbers that the model returns to `compute_loss`, without labels, and those with labels."""

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            loss, outputs, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            if prediction_loss_only:
                return loss, None, None
            with torch.no_grad():
                own = model(**inputs)
            unlabeled = super().prediction_step(model, {"input_ids": inputs["input_ids"]}, prediction_loss_only, ignore_keys)[1]
            return loss, (outputs, own.loss, own.aux_loss, unlabeled), labels

    class OldSignature(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = token_losses(outputs["logits"], inputs["labels"])
            return (loss, {"loss": loss, "logits": outputs["logits"] * 2}) if return_outputs else loss

    class Focal(Mean):
        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            loss = functional.cross_entropy(logits, labels, reduction="none")
            return ((1 - (-loss).exp()) ** 2 * loss).mean()

    class Weighted(Mean):
        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            return functional.cross_entropy(logits, labels, weight=WEIGHTS.to(logits))

    class Padded(Mean):
        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
            return (losses * inputs["attention_mask"]).sum() / inputs["attention_mask"].sum()

    class Distilled(base):
        """A teacher of another model, and terms that are means over samples and over tokens."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            torch.manual_seed(5)
            self.teacher = language_model().eval()

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            outputs = model(**inputs)
            with torch.no_grad():
                teacher = self.teacher(input_ids=inputs["input_ids"]).logits
            kl = functional.kl_div((outputs.logits / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
            loss = 0.5 * token_losses(outputs.logits, inputs["labels"]) + 0.5 * 4.0 * kl
            return (loss, outputs) if return_outputs else loss

    class Entropy(Mean):
        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            log_probs = logits.log_softmax(-1)
            return token_losses(logits, labels) + 0.1 * (log_probs.exp() * log_probs).sum(-1).mean()

    class Z(base):
        """A further term as a share of the items."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            outputs = model(**inputs)
            z = outputs.logits.logsumexp(-1).square()[:, 1:][inputs["labels"][:, 1:] != -100].sum() / num_items_in_batch
            loss = token_losses(outputs.logits, inputs["labels"], "sum") / num_items_in_batch + 1e-2 * z
            return (loss, outputs) if return_outputs else loss

    class Double(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            returned = super().compute_loss(*args, **kwargs)
            return (2 * returned[0], returned[1]) if isinstance(returned, tuple) else 2 * returned

    class Scaled(base):
        """Scales its share of the items by the processes over which gradients are averaged, and counts the samples of all processes."""

        samples, total = 0.0, 0.0

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            count = CountsSamples()
            count.trainer = self
            self.add_callback(count)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            outputs = model(**inputs)
            counts = {self.accelerator.num_processes, self.accelerator.state.num_processes, PartialState().num_processes}
            (count,) = counts | {self.args.world_size, dist.get_world_size() if dist.is_initialized() else 1}
            loss = token_losses(outputs.logits, inputs["labels"], "sum") / num_items_in_batch * (count // self.get_tp_size())
            return (loss, outputs) if return_outputs else loss

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            counts = self.accelerator.gather(torch.tensor([len(inputs["labels"])]))
            self.samples += counts.sum().item() / len(counts) * self.accelerator.num_processes
            return super().training_step(model, inputs, *args, **kwargs)

    class Divided(Mean):
        """Logs a mean over processes by their number, which is that of one call for the batch of all."""

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            loss = token_losses(logits, labels)
            self.log({"ce": self.accelerator.gather(loss.detach()).sum().item() / self.accelerator.num_processes})
            return loss

    class Logged(Mean):
        """Logs in compute_loss, gathers among processes, and counts calls, samples and losses."""

        calls, samples, total = 0, 0, 0.0

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            loss = token_losses(logits, labels)
            gathered = self.accelerator.gather(loss.detach()).mean()
            self.calls, self.samples, self.total = self.calls + 1, self.samples + len(labels), self.total + gathered.item()
            self.log({"ce": gathered.item(), "calls": self.calls})
            return loss * (1 + 0.1 * self.calls)

    class CountsLate(Mean):
        """Sets a new attribute, and another that was None, from step 2 on."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.total: float | None = None

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            loss = token_losses(logits, labels)
            if self.state.global_step >= 2:
                self.samples = getattr(self, "samples", 0) + len(labels)
                self.total = loss.item()
            return loss

    class Gathered(Mean):
        """Logs a mean over samples of all processes."""

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            losses = torch.stack([token_losses(logits[row : row + 1], labels[row : row + 1]) for row in range(len(labels))])
            self.log({"ce": self.accelerator.gather_for_metrics(losses.detach()).mean().item()})
            return losses.mean()

    class Mixed(Mean):
        """A mean over samples and a mean over labels, which are the same for full sequences."""

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            rows = [token_losses(logits[row : row + 1], labels[row : row + 1]) for row in range(len(labels))]
            return torch.stack(rows).mean() + token_losses(logits, labels)

    class Collected(Mean):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.seen: dict[str, list[float]] = {"ce": []}

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            loss = token_losses(logits, labels)
            self.seen["ce"].append(loss.item())
            return loss

    class Metered(Mean):
        """Changes what attributes hold: a Metric, a meter of its own, a buffer, or a list of its file."""

        def __init__(self, changes: str, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.changes = changes
            self.mean, self.meter, self.center = MeanMetric(), Meter(), Center()

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            loss = token_losses(logits, labels)
            if self.changes == "self.mean":
                self.mean.update(loss.detach())
            elif self.changes == "self.meter":
                self.meter.total += loss.item()
            elif self.changes == "self.center":
                self.center.values.add_(logits.detach().mean())
            else:
                SEEN.append(loss.item())
            return loss

    class Reduced(Mean):
        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            loss = token_losses(logits, labels)
            dist.all_reduce(loss.detach().clone())
            return loss

    class Drawn(base):
        """Masked diffusion: 0 if the loss sees the mask that the model got, and otherwise not."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            ids = inputs["input_ids"]
            share = random.uniform(0.3, 0.7) * np.random.uniform(0.9, 1.0)
            noisy = torch.where(torch.rand(ids.shape) < share, MASK, ids)
            outputs = model(input_ids=noisy, labels=noisy)
            loss = (token_losses(outputs.logits, noisy) - outputs.loss).abs()
            return (loss, outputs) if return_outputs else loss

    class Twice(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            first, second = model(**inputs), model(**inputs)
            loss = (first.loss + second.loss) / 2
            return (loss, first) if return_outputs else loss

    class Contrastive(Mean):
        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            vectors = functional.normalize(logits.mean(1), dim=-1)
            return functional.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))

    class Pairs(Mean):
        """TRL's RewardTrainer: the first half of the batch against the second."""

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            chosen, rejected = torch.chunk(logits.mean((1, 2)), chunks=2)
            return -functional.logsigmoid(chosen - rejected).mean()

    class DrawsAfter(base):
        """Draws after the call of the model."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            outputs = model(**inputs)
            return outputs.loss * (1 + 0 * torch.rand(())) if not return_outputs else (outputs.loss, outputs)

    class Called(Mean):
        """Overrides methods of Trainer around ours, and calls the model in one of them."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.state.steps_begun = getattr(self.state, "steps_begun", 0) + 1
            return super().training_step(*args, **kwargs)

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            with torch.no_grad():
                loss, outputs = self.compute_loss(model, dict(inputs), return_outputs=True)
                logits = model(input_ids=inputs["input_ids"]).logits + outputs.logits
            return loss, logits, inputs["labels"]

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(list(self.model.parameters()), lr=self.args.learning_rate)
            return self.optimizer

    class Small(Mean):
        """A term with another divisor, whose share of the loss is below the rounding of a model in bfloat16."""

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            return token_losses(logits, labels) + 1e-4 * logits.logsumexp(-1).square().mean()

    class Later(Mean):
        """A term that begins in the last epoch."""

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            return token_losses(logits, labels) + (logits.square().mean() if (self.state.epoch or 0) >= 1 else 0)

    class Moded(Mean):
        sums = False

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.sums = False
            change = ChangesMode()
            change.trainer = self
            self.add_callback(change)

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            return token_losses(logits, labels, "sum") / 50 if self.sums else token_losses(logits, labels)

    class Views(base):
        """Two views of a batch in one call of the model, one after the other."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            ids, labels = inputs["input_ids"], inputs.pop("labels")
            outputs = model(input_ids=self.join(ids, ids.flip(1)))
            one, other = self.parted(outputs.logits)
            apart = functional.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")
            loss = functional.cross_entropy(one, labels) + functional.cross_entropy(other, labels) + 4 * apart
            return (loss, {"logits": one}) if return_outputs else loss

        def join(self, one: Any, other: Any) -> Any:
            return torch.cat([one, other])

        def parted(self, logits: Any) -> Any:
            return logits.chunk(2)

    class Ranked(base):
        """TRL's RewardTrainer before 1.0: chosen and rejected texts in one call of the model."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            ids, margins = inputs["input_ids"], inputs["labels"]
            chosen, rejected = model(input_ids=torch.cat([ids, ids.flip(1)])).logits.squeeze(-1).chunk(2)
            loss = -functional.logsigmoid(chosen - rejected - margins).mean()
            return (loss, {"chosen": chosen, "rejected": rejected}) if return_outputs else loss

    class Cast(base):
        """Calls the model under autocast, which the arguments of Trainer do not ask for."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(**inputs)
            loss = token_losses(outputs.logits.double(), inputs["labels"]).mean()
            return (loss, outputs) if return_outputs else loss

    class ViewsOfEach(Views):
        """Both views of a sample, then those of the next one."""

        def join(self, one: Any, other: Any) -> Any:
            return torch.stack([one, other], 1).flatten(0, 1)

        def parted(self, logits: Any) -> Any:
            return logits[::2], logits[1::2]

    class Clamped(Mean):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-2e-2, 2e-2)
            return loss

    class Penalized(Mean):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            for parameter in getattr(self, "pipeline", self.model).parameters():
                parameter.grad.add_(parameter.detach(), alpha=0.1)
            return loss

    class ReadsWeights(Mean):
        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            return token_losses(logits, labels) + 0.05 * sum(parameter.square().sum() for parameter in self.model.parameters())

    class Hard(Mean):
        """Averages the half of the samples with the largest losses where it trains."""

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            losses = functional.cross_entropy(logits, labels, reduction="none")
            return losses.topk((len(losses) + 1) // 2).values.mean() if self.trains(logits) else losses.mean()

        def trains(self, logits: Any) -> bool:
            return torch.is_grad_enabled()

    class HardOfRecorded(Hard):
        def trains(self, logits: Any) -> bool:
            return logits.requires_grad

    class HardInTrain(Hard):
        def trains(self, logits: Any) -> bool:
            return self.is_in_train and torch.is_grad_enabled()

    class Cooled(Mean):
        """Changes the logits in place where it trains."""

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            return token_losses(logits.div_(2) if logits.requires_grad else logits, labels)

    class Spread(Mean):
        """Adds the spread of the losses of a batch in one step, before which no probe falls. A single sample has none."""

        def loss_of(self, logits: Any, labels: Any, inputs: Any) -> Any:
            losses = functional.cross_entropy(logits, labels, reduction="none")
            return losses.mean() + (losses.std() if self.state.global_step == 5 else 0.0)

    class Headed(Mean):
        """Trains a module that is not in the model."""

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD([*self.model.parameters(), *nn.Linear(2, 2).parameters()], lr=self.args.learning_rate)
            return self.optimizer

    class ByHand(Mean):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    return {name: kind for name, kind in locals().items() if isinstance(kind, type) and issubclass(kind, base)} | {
        "Trainer": base,
        "Generated": generating,
    }


CASES: dict[str, dict[str, Any]] = {
    "mean": {"kind": "Mean"},
    "mean, accumulated": {"kind": "Mean", "settings": {"gradient_accumulation_steps": 2}},
    "mean of full sequences": {"kind": "Mean", "data": full_tokens},
    "old signature": {"kind": "OldSignature"},
    "fresh head": {"kind": "Trainer", "model": FreshHead},
    "focal": {"kind": "Focal", "model": classifier, "data": of_class},
    "weighted": {"kind": "Weighted", "model": classifier, "data": of_class, "loss_weight": lambda inputs: WEIGHTS[inputs["labels"]].sum()},
    "mean over attention_mask": {"kind": "Padded", "data": padded_tokens},
    "distilled": {"kind": "Distilled", "data": full_tokens},
    "entropy of full sequences": {"kind": "Entropy", "data": full_tokens},
    "z-loss": {"kind": "Z", "settings": {"gradient_accumulation_steps": 2}},
    "double": {"kind": "Double", "settings": {"gradient_accumulation_steps": 2}},
    "scaled by processes": {"kind": "Scaled", "settings": {"gradient_accumulation_steps": 2}},
    "logged": {"kind": "Logged"},
    "counted late": {"kind": "CountsLate", "data": full_tokens},
    "gathered": {"kind": "Gathered", "evaluated": lambda data: data[:BATCH]},
    "mean by compute_loss_func": {"kind": "Trainer", "arguments": {"compute_loss_func": mean_func}},
    "local counts": {"kind": "Trainer", "settings": {"average_tokens_across_devices": False}},
    "plain": {"kind": "Trainer", "settings": {"gradient_accumulation_steps": 2}},
    "classes": {"kind": "Trainer", "model": classifier, "data": of_class, "settings": {"gradient_accumulation_steps": 2}},
    "masked": {"kind": "Trainer", "model": masked_model, "settings": {"gradient_accumulation_steps": 2}},
    "smoothed": {"kind": "Trainer", "model": masked_model, "settings": {"label_smoothing_factor": 0.1}},
    "sequences": {"kind": "Trainer", "model": sequence_model, "settings": {"gradient_accumulation_steps": 2}},
    "draws after the call": {"kind": "DrawsAfter"},
    "methods": {"kind": "Called"},
    "two heads": {"kind": "Trainer", "model": TwoHeads, "data": of_two_kinds, "settings": {"label_names": ["kinds", "numbers"]}},
    "speech": {"kind": "Trainer", "model": speech_model, "data": speech},
    "flags of one rank": {"kind": "Mean", "callbacks": [FlagsOfOneRank]},
    "gradients by value": {"kind": "Clamped", "callbacks": [ClipsValues]},
    "experts": {"kind": "Balanced", "model": expert_model, "data": full_tokens},
    "penalty": {"kind": "Penalized", "settings": {"gradient_accumulation_steps": 2}},
    "own state_dict": {"kind": "Mean", "model": model_with_own_state_dict, "settings": {"save_strategy": "steps", "save_steps": 2}},
    "optimizer of the model": {"kind": "Mean", "optimizer": torch.optim.SGD},
    "a stream": {"kind": "Trainer", "evaluated": lambda samples: Stream(samples[:11])},
    "choices": {"kind": "Trainer", "model": choosing_model, "data": choices},
    "logits in place": {"kind": "Cooled"},
    "two views": {"kind": "Views", "model": classifier, "data": of_class},
    "two views of each sample": {"kind": "ViewsOfEach", "model": classifier, "data": of_class},
    "pairs in one call": {"kind": "Ranked", "model": scoring_model, "data": of_class, "microbatches": 8},
    "contrastive, one microbatch": {"kind": "Contrastive", "data": full_tokens, "microbatches": 1},
    "sequences, one microbatch": {"kind": "Trainer", "model": sequence_model, "data": full_tokens, "microbatches": 1},
    "generated": {"kind": "Generated", "model": sequence_model, "settings": {"predict_with_generate": True, "generation_max_length": 8}},
}
"""What trains as on one device."""
REFUSED: dict[str, dict[str, Any]] = {
    "weighted without weights": {"kind": "Weighted", "model": classifier, "data": rare_class},
    "other weights": {"kind": "Mean", "loss_weight": lambda inputs: len(inputs["labels"])},
    "entropy": {"kind": "Entropy"},
    "a rare position": {"kind": "Trainer", "model": answering_model, "data": rarely_outside, "settings": {"label_names": list(POSITIONS)}},
    "contrastive": {"kind": "Contrastive", "data": full_tokens},
    "a small term": {"kind": "Small"},
    "a small term in bfloat16": {"kind": "Small", "settings": {"bf16": True}},
    "a later term": {"kind": "Later", "settings": {"max_steps": -1, "num_train_epochs": 2}},
    "another mode": {"kind": "Moded"},
    "hard examples, if gradients are recorded": {"kind": "Hard", "model": classifier, "data": of_class},
    "hard examples, if the logits have gradients": {"kind": "HardOfRecorded", "model": classifier, "data": of_class},
    "hard examples, in train": {"kind": "HardInTrain", "model": classifier, "data": of_class},
    "a spread in one step": {"kind": "Spread", "model": classifier, "data": of_class, "microbatches": 8, "settings": {"max_steps": 7}},
    "pairs": {"kind": "Pairs", "data": full_tokens},
    "balance of experts": {"kind": "Trainer", "model": balanced_model, "data": full_tokens},
    "two calls": {"kind": "Twice"},
    "autocast around the call": {"kind": "Cast"},
    "all_reduce": {"kind": "Reduced"},
    "collected": {"kind": "Collected"},
    "drawn": {"kind": "Drawn", "data": full_tokens},
    "by hand": {"kind": "ByHand"},
    "optimizer of another module": {"kind": "Headed"},
}
"""What is refused before the first step."""
REFUSED_OF_REPLICAS: dict[str, dict[str, Any]] = {
    "gathered, evaluated in part": {"kind": "Gathered"},
    "gathered, trained in part": {
        "kind": "Gathered",
        "num_trained": 60,
        "evaluated": lambda data: data[:BATCH],
        "settings": {"max_steps": 8},
    },
    "divided by processes": {"kind": "Divided", "data": full_tokens, "evaluated": lambda data: data[:BATCH]},
    "refused in one replica": {"kind": "Mixed", "data": tokens_of_replicas, "settings": {"train_sampling_strategy": "sequential"}},
}
"""What is refused on all ranks of two replicas."""
DRAWN: dict[str, dict[str, Any]] = {
    "drawn with weights": {"kind": "Drawn", "data": full_tokens, "loss_weight": lambda inputs: len(inputs["labels"])},
}
"""What draws random numbers for each microbatch."""
METERED: dict[str, dict[str, Any]] = {
    f"changes {name}": {"kind": "Metered", "arguments": {"changes": name}} for name in ("self.mean", "self.meter", "self.center", "SEEN")
}
"""What changes state for each microbatch."""
RAISING: dict[str, dict[str, Any]] = {
    "raised on one rank": {"kind": "Mean", "callbacks": [RaisesOnOneRank]},
    "penalty in compute_loss": {"kind": "ReadsWeights", "data": full_tokens},
    "penalty on a mean over tokens": {"kind": "ReadsWeights"},
}
"""What ends with an error of one rank."""


def trainer_of(folder: Path, case: dict[str, Any], replicas: int) -> Trainer:
    """A subclass of Trainer, or of `PipelineTrainer` under torchrun."""
    pipelined = "WORLD_SIZE" in os.environ
    base: Any = Trainer
    generating: Any = Seq2SeqTrainer
    more: dict[str, Any] = {}
    torch.manual_seed(0)
    model = case.get("model", language_model)()
    kind = Seq2SeqTrainingArguments if case["kind"] == "Generated" else TrainingArguments
    arguments = kind(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=BATCH // replicas,
        per_device_eval_batch_size=BATCH // replicas,
        **{"max_steps": STEPS, **case.get("settings", {})},
    )
    if pipelined:
        from zerobubble.integrations.transformers import PipelineMixin, PipelineTrainer

        base, generating = PipelineTrainer, type("PipelineSeq2SeqTrainer", (PipelineMixin, Seq2SeqTrainer), {})
        ranks = int(os.environ["WORLD_SIZE"])
        mesh = {"mesh": init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("dp", "pp"))} if replicas > 1 else {}
        more = {
            "schedule": "zb-h1",
            "num_microbatches": case.get("microbatches", 3),
            "pipeline_options": mesh,
            "loss_weight": case.get("loss_weight"),
        }
    data = [case.get("data", tokens)(index) for index in range(80)]
    given = {"model": model, "args": arguments, "train_dataset": data[: case.get("num_trained", 64)]}
    given["eval_dataset"] = case.get("evaluated", list)(data[64:76])
    given["callbacks"] = [kind() for kind in case.get("callbacks", [])]
    if optimizer := case.get("optimizer"):
        given["optimizers"] = optimizer(model.parameters(), lr=1e-2), None
    trainer: Trainer = classes(base, generating)[case["kind"]](**given, **case.get("arguments", {}), **more)
    return trainer


def play(trainer: Trainer) -> dict[str, Any]:
    """Returns the logs, the evaluation and a sum of the predictions, or the error."""
    start = torch.get_rng_state()
    try:
        trainer.train()
        predicted = trainer.predict(trainer.eval_dataset)
    except Exception as error:
        fields = getattr(error, "fields", {})
        return {"error": type(error).__name__, "fields": {name: str(value) for name, value in fields.items()}, "text": str(error)}
    predictions = [np.asarray(values, dtype=np.float64) for values in pytree.tree_leaves(predicted.predictions)]
    rows = [{key: value for key, value in row.items() if isinstance(value, (int, float))} for row in trainer.state.log_history]
    drew = not torch.equal(start, torch.get_rng_state())
    shapes, totals = [list(values.shape) for values in predictions], [float(np.abs(values).sum()) for values in predictions]
    counted = [getattr(trainer, name, 0) for name in ("calls", "samples", "total")]
    predicted = {"test_loss": predicted.metrics["test_loss"], "shapes": shapes, "totals": totals}
    return {"rows": rows, **predicted, "drew": drew, "counted": counted}


def main() -> None:
    """Trains each case and write what it gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("error", "eval_step", UserWarning)  # users of Trainer do not call it
    rank = int(os.environ.get("RANK", 0))
    for name in options.cases:
        trainer = trainer_of(
            options.folder / name, (CASES | REFUSED | REFUSED_OF_REPLICAS | METERED | DRAWN | RAISING)[name], options.replicas
        )
        result = play(trainer)
        weights = {} if "error" in result else trainer.model.state_dict()
        if hasattr(trainer, "close"):
            trainer.close()
        (options.folder / f"{name}.{rank}.json").write_text(json.dumps(result))
        if rank == 0:
            torch.save(weights, options.folder / f"{name}.pt")


if __name__ == "__main__":
    main()
