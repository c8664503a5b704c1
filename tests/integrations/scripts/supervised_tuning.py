"""TRL's supervised fine-tuning of conversations: a chat template, prompts that do not count, adapters, an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from tests.integrations.scripts.corpus import sentences, tokenizer, write_results

TEMPLATE = "{% for message in messages %}{{ message['content'] + ' <eos> ' }}{% endfor %}"


def main(folder: Path, pipelined: bool) -> None:
    """Tune adapters on answers to prompts."""
    set_seed(17)
    tokens = tokenizer()
    tokens.chat_template = TEMPLATE
    texts = sentences(144, 14)
    rows = [
        {"prompt": [{"role": "user", "content": question}], "completion": [{"role": "assistant", "content": answer}]}
        for question, answer in zip(texts[::2], texts[1::2], strict=True)
    ]
    config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    arguments = SFTConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        max_steps=6,
        max_length=24,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
    )
    trainer_class: type[SFTTrainer] = SFTTrainer
    options: dict[str, Any] = {}
    if pipelined:
        from zerobubble.integrations.trl import PipelineSFTTrainer

        trainer_class = PipelineSFTTrainer
        options = {"schedule": "zb-v", "num_microbatches": 4}
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_config(config).double(),
        args=arguments,
        train_dataset=Dataset.from_list(rows[:56]),
        eval_dataset=Dataset.from_list(rows[56:]),
        processing_class=tokens,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        **options,
    )
    trainer.train()
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss", "eval_mean_token_accuracy")
    figures = {"log": [[row[name] for name in names if name in row] for row in trainer.state.log_history]}
    trainer.save_model(str(folder / "final"))
    if trainer.is_world_process_zero():
        write_results(folder, figures, load_file(folder / "final" / "adapter_model.safetensors"))
    if pipelined:
        trainer.close()
