"""Masked language modeling with Trainer: the collator draws the masks, so each microbatch has another number of labels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

from tests.integrations.scripts.corpus import sentences, tokenizer, write_results


def main(folder: Path, pipelined: bool) -> None:
    """Train BERT for ten steps in an order that the seed shuffles, and once more from the checkpoint in the middle of an epoch."""
    set_seed(3)
    tokens = tokenizer()
    data = [{"input_ids": tokens(text)["input_ids"]} for text in sentences(120, 5)]
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).double()
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        seed=3,
        report_to=[],
        disable_tqdm=True,
        max_steps=10,
        per_device_train_batch_size=12,
        per_device_eval_batch_size=12,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=6,
    )
    trainer_class: type[Trainer] = Trainer
    options: dict[str, Any] = {}
    if pipelined:
        from zerobubble.integrations.transformers import PipelineTrainer

        trainer_class = PipelineTrainer
        options = {"schedule": "zb-h1", "num_microbatches": 4}

    def made() -> Trainer:
        return trainer_class(
            model=copy.deepcopy(model),
            args=arguments,
            train_dataset=data[:96],
            eval_dataset=data[96:],
            data_collator=DataCollatorForLanguageModeling(tokens, mlm_probability=0.3),
            **options,
        )

    trainer = made()
    trainer.train()
    figures = {
        "log": [[row[name] for name in ("loss", "grad_norm", "eval_loss") if name in row] for row in trainer.state.log_history],
        "next draw": float(torch.rand(())),
    }
    resumed = made()
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    figures["resumed log"] = [row["loss"] for row in resumed.state.log_history if "loss" in row]
    trainer.save_model(str(folder / "final"))
    if trainer.is_world_process_zero():
        write_results(folder, figures, BertForMaskedLM.from_pretrained(folder / "final", dtype=torch.float64).state_dict())
    if pipelined:
        trainer.close()
        resumed.close()
