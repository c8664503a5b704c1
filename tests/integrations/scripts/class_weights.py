"""A Trainer with class weights for imbalanced data: `compute_loss` returns a weighted mean and ignores `num_items_in_batch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tests.integrations.scripts.corpus import sentences, tokenizer, write_results

WEIGHTS = torch.tensor([0.4, 1.0, 2.7], dtype=torch.float64)


class WeightedLoss:
    """The method that people override: the rest is Trainer's."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss_fct = nn.CrossEntropyLoss(weight=WEIGHTS.to(outputs.logits.device))
        loss = loss_fct(outputs.logits.view(-1, 3), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


def compute_metrics(predictions: Any) -> dict[str, float]:
    logits, labels = predictions
    guesses = logits.argmax(-1)
    return {"accuracy": float((guesses == labels).mean()), "recall of 2": float((guesses[labels == 2] == 2).mean())}


def main(folder: Path, pipelined: bool) -> None:
    """Train a classifier whose classes have 60, 30 and 10 % of the texts."""
    set_seed(5)
    tokens = tokenizer()
    texts = sentences(112, 9)
    labels = [0 if index % 10 < 6 else 1 if index % 10 < 9 else 2 for index in range(len(texts))]
    data = [{**tokens(text), "label": label} for text, label in zip(texts, labels, strict=True)]
    config = AutoConfig.for_model(
        "distilbert",
        vocab_size=64,
        dim=32,
        hidden_dim=64,
        n_layers=4,
        n_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        num_labels=3,
    )
    model = AutoModelForSequenceClassification.from_config(config).double()
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        optim="sgd",
        learning_rate=0.05,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        train_sampling_strategy="group_by_length",
    )
    base: type[Trainer] = Trainer
    options: dict[str, Any] = {}
    if pipelined:
        from zerobubble.integrations.transformers import PipelineTrainer

        base = PipelineTrainer
        options = {"schedule": "zb-v", "num_microbatches": 4, "loss_weight": lambda inputs: WEIGHTS[inputs["labels"]].sum()}
    trainer = type("WeightedTrainer", (WeightedLoss, base), {})(
        model=model,
        args=arguments,
        train_dataset=data[:96],
        eval_dataset=data[96:],
        data_collator=DataCollatorWithPadding(tokens),
        compute_metrics=compute_metrics,
        **options,
    )
    trainer.train()
    figures = {
        "log": [
            [row[name] for name in ("loss", "grad_norm", "eval_loss", "eval_accuracy") if name in row] for row in trainer.state.log_history
        ],
        "best": trainer.state.best_global_step,
    }
    trainer.save_model(str(folder / "final"))
    if trainer.is_world_process_zero():
        model = AutoModelForSequenceClassification.from_pretrained(folder / "final", dtype=torch.float64)
        write_results(folder, figures, model.state_dict())
    if pipelined:
        trainer.close()
