"""QLoRA: adapters of peft on a base in 4 bits, with Trainer, and with TRL's trainer on a base in 8 bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from tests.integrations.scripts.corpus import sentences, tokenizer, write_results

BASE = f"base of rank {os.environ.get('RANK', 0)}"
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
SHARED: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "optim": "sgd", "learning_rate": 0.5, "logging_steps": 1}
SHARED |= {"save_strategy": "no", "max_steps": 4, "per_device_train_batch_size": 8}


def adapted_model(folder: Path, **quantization: Any) -> Any:
    """Returns adapters on a quantized model, from weights that `main` has written."""
    config = BitsAndBytesConfig(**quantization)
    model = AutoModelForCausalLM.from_pretrained(folder / BASE, quantization_config=config, dtype=torch.float32, device_map="cpu")
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):  # there, weights that were evaluated once give wrong gradients, also alone
            part.support_avx512bf16_for_cpu = False
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def tuned(folder: Path, pipelined: bool, tokens: Any) -> Any:
    """Returns Trainer after training on a base in 4 bits."""
    data = [{"input_ids": tokens(text)["input_ids"]} for text in sentences(96, 8)]
    model = adapted_model(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    trainer_class: type[Trainer] = Trainer
    options: dict[str, Any] = {}
    if pipelined:
        from zerobubble.integrations.transformers import PipelineTrainer

        trainer_class = PipelineTrainer
        options = {"schedule": "zb-v", "num_microbatches": 4}
    collate = DataCollatorForLanguageModeling(tokens, mlm=False)
    arguments = TrainingArguments(str(folder), eval_strategy="steps", eval_steps=2, **SHARED)
    trainer = trainer_class(model=model, args=arguments, train_dataset=data[:80], eval_dataset=data[80:], data_collator=collate, **options)
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    return trainer


def instructed(folder: Path, pipelined: bool, tokens: Any) -> Any:
    """Returns SFTTrainer after training on a base in 8 bits."""
    trainer_class: type[SFTTrainer] = SFTTrainer
    options: dict[str, Any] = {}
    if pipelined:
        from zerobubble.integrations.trl import PipelineSFTTrainer

        trainer_class = PipelineSFTTrainer
        options = {"schedule": "1f1b", "num_microbatches": 4}
    trainer = trainer_class(
        model=adapted_model(folder, load_in_8bit=True),
        args=SFTConfig(str(folder), bf16=False, activation_checkpointing=False, max_length=24, **SHARED),
        train_dataset=Dataset.from_list([{"text": text} for text in sentences(64, 14)]),
        processing_class=tokens,
        **options,
    )
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # TRL makes them bfloat16, in which few digits can be compared
    trainer.train()
    trainer.save_model(str(folder / "instructed"))
    return trainer


def main(folder: Path, pipelined: bool) -> None:
    """Tune adapters on the same base in 4 and in 8 bits."""
    tokens = tokenizer()
    set_seed(11)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(folder / BASE)
    figures, weights = {}, {}
    for name, train, saved in (("nf4", tuned, "adapter"), ("int8", instructed, "instructed")):
        set_seed(12)
        trainer = train(folder, pipelined, tokens)
        figures[name] = [[row[key] for key in ("loss", "grad_norm", "eval_loss") if key in row] for row in trainer.state.log_history]
        if trainer.is_world_process_zero():
            weights |= {f"{name} {key}": value for key, value in load_file(folder / saved / "adapter_model.safetensors").items()}
        if pipelined:
            trainer.close()
    if trainer.is_world_process_zero():
        write_results(folder, figures, weights)
