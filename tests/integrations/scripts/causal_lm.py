"""Trainer's language modeling example: texts joined and cut into blocks, metrics of argmax, a resumed checkpoint, a model card."""

from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint

from tests.integrations.scripts.corpus import sentences, tokenizer, write_results

BLOCK = 16


def blocks(count: int, seed: int) -> Dataset:
    """Returns a data set of blocks with `BLOCK` tokens and their labels."""
    tokens = tokenizer()
    texts = Dataset.from_dict({"text": sentences(count, seed)})
    tokenized = texts.map(lambda rows: tokens(rows["text"]), batched=True, remove_columns=["text"])

    def grouped(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*lists)) for name, lists in rows.items()}
        length = len(joined["input_ids"]) // BLOCK * BLOCK
        cut = {name: [tokens[start : start + BLOCK] for start in range(0, length, BLOCK)] for name, tokens in joined.items()}
        return cut | {"labels": cut["input_ids"].copy()}

    return tokenized.map(grouped, batched=True)


def preprocess_logits_for_metrics(logits: Any, labels: Tensor) -> Tensor:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def compute_metrics(predictions: Any) -> dict[str, float]:
    guesses, labels = predictions
    return {"accuracy": float((guesses[:, :-1] == labels[:, 1:]).mean())}


def main(folder: Path, pipelined: bool) -> None:
    """Train for eight steps, stop, continue from the checkpoint for four, and evaluate."""
    figures: dict[str, Any] = {}
    for steps in (8, 12):
        set_seed(7)
        config = AutoConfig.for_model(
            "gpt2", vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        model = AutoModelForCausalLM.from_config(config).double()
        arguments = TrainingArguments(
            str(folder),
            use_cpu=True,
            seed=7,
            report_to=[],
            disable_tqdm=True,
            max_steps=steps,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            learning_rate=3e-3,
            warmup_steps=2,
            weight_decay=0.1,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=8,
        )
        trainer_class: type[Trainer] = Trainer
        options: dict[str, Any] = {}
        if pipelined:
            from zerobubble.integrations.transformers import PipelineTrainer

            trainer_class = PipelineTrainer
            options = {"schedule": "zb-v", "num_microbatches": 4}
        trainer = trainer_class(
            model=model,
            args=arguments,
            train_dataset=blocks(200, 1),
            eval_dataset=blocks(60, 2),
            processing_class=tokenizer(),
            data_collator=default_data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            **options,
        )
        result = trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if steps > 8 else None)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        metrics = trainer.evaluate()
        figures[f"perplexity after {steps}"] = math.exp(metrics["eval_loss"])
        figures[f"accuracy after {steps}"] = metrics["eval_accuracy"]
        figures[f"log of {steps}"] = [
            [row[name] for name in ("loss", "grad_norm", "learning_rate", "eval_loss") if name in row] for row in trainer.state.log_history
        ]
        trainer.create_model_card(tasks="text-generation", dataset="a corpus")
        if pipelined:
            trainer.close()
    if trainer.is_world_process_zero():
        card = (folder / "README.md").read_text()
        figures["batch sizes of the card"] = {name: int(size) for name, size in re.findall(r"(\w*batch_size): (\d+)", card)}
        write_results(folder, figures, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict())
