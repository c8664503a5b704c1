"""LoRA with peft and Trainer: only adapters train, `model.save_pretrained` writes them, and a base model merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

from tests.integrations.scripts.corpus import sentences, tokenizer, write_results


def base_model() -> Any:
    """Returns the model to adapt, with the same weights in each call."""
    set_seed(11)
    config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    return AutoModelForCausalLM.from_config(config).double()


def main(folder: Path, pipelined: bool) -> None:
    """Train the adapters for eight steps, save them as users do, and load them into a fresh base model."""
    tokens = tokenizer()
    data = [{"input_ids": tokens(text)["input_ids"]} for text in sentences(96, 8)]
    model = get_peft_model(base_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        num_train_epochs=1,
        per_device_train_batch_size=12,
        optim="sgd",
        learning_rate=0.5,
        max_grad_norm=0.3,
        logging_steps=1,
        save_strategy="no",
    )
    trainer_class: type[Trainer] = Trainer
    options: dict[str, Any] = {}
    if pipelined:
        from zerobubble.integrations.transformers import PipelineTrainer

        trainer_class = PipelineTrainer
        options = {"schedule": "1f1b", "num_microbatches": 6}
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=data, data_collator=DataCollatorForLanguageModeling(tokens, mlm=False), **options
    )
    trainer.train()
    if trainer.is_world_process_zero():
        model.save_pretrained(folder / "adapter")
        merged = PeftModel.from_pretrained(base_model(), folder / "adapter").merge_and_unload()
        with torch.no_grad():
            logits = merged(torch.arange(16)[None]).logits
        figures = {
            "log": [[row[name] for name in ("loss", "grad_norm") if name in row] for row in trainer.state.log_history],
            "logits": logits[0, -1, :8].tolist(),
        }
        write_results(folder, figures, merged.state_dict())
    if pipelined:
        trainer.close()
