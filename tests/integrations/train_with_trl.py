"""Fine-tunes small Llamas with SFTTrainer, or in a pipeline of all ranks with `PipelineSFTTrainer`, and writes their logs and weights.

`python train_with_trl.py FOLDER` is the reference; under torchrun, all ranks form one pipeline.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

STEPS, BATCH = 30, 8
WORDS = [f"w{index}" for index in range(61)]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "completions": ({}, {}),
    "packed": ({"packing": True, "packing_strategy": "wrapped"}, {}),
    "weighted": ({"loss_type": "dft", "gradient_accumulation_steps": 2}, {}),
    "adapters": ({}, {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}),
}
"""By name: settings of SFTConfig, and arguments of SFTTrainer."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Words by number, with an end and a padding."""
    words = {word: index for index, word in enumerate([*WORDS, "<pad>", "<eos>", "<unk>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sample(index: int, packed: bool) -> dict[str, str]:
    """A text, or a prompt with a completion, of a length of its own."""
    draw = random.Random(index)
    prompt, completion = (" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) for _ in range(2))
    return {"text": f"{prompt} {completion}"} if packed else {"prompt": f"{prompt} ", "completion": completion}


def main() -> None:
    """Train each case and write its log and weights."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name in sys.argv[2:] or CASES:
        settings, arguments = CASES[name]
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
        training = SFTConfig(
            str(folder / name),
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            optim="sgd",
            learning_rate=0.1,
            max_steps=STEPS,
            max_length=16,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=15,
            per_device_eval_batch_size=BATCH,
            per_device_train_batch_size=BATCH,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            **settings,
        )
        trainer_class, ours = SFTTrainer, {}
        if "WORLD_SIZE" in os.environ:
            from zerobubble.integrations.trl import PipelineSFTTrainer

            trainer_class, ours = PipelineSFTTrainer, {"schedule": "zb-h1", "num_microbatches": 4}
        trainer = trainer_class(
            model=LlamaForCausalLM(config),
            args=training,
            eval_dataset=Dataset.from_list([sample(index, "packing" in settings) for index in range(200, 220)]),
            train_dataset=Dataset.from_list([sample(index, "packing" in settings) for index in range(120)]),
            processing_class=tokenizer(),
            **arguments,
            **ours,
        )
        trainer.train()
        trainer.save_model(str(folder / name / "final"))
        if trainer.is_world_process_zero():
            (folder / name / "log.json").write_text(json.dumps(trainer.state.log_history))
        if ours:
            trainer.close()


if __name__ == "__main__":
    main()
