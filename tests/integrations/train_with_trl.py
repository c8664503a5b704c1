"""Fine-tunes small Llamas with SFTTrainer, or in a pipeline of all ranks with `PipelineSFTTrainer`, and writes their logs and weights.

`python train_with_trl.py FOLDER` is the reference; under torchrun, all ranks form one pipeline, or with `--replicas 2` two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
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
EVALUATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"evaluated": ({"eval_on_start": True, "max_steps": 1}, {})}
"""What is evaluated before the first step. Of two replicas, the second has no sample of the last batch."""


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=[*CASES, *EVALUATED])
    options = parser.parse_args()
    folder, replicas = options.folder, options.replicas
    torch.set_num_threads(1)
    for name in options.cases:
        settings, arguments = (CASES | EVALUATED)[name]
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
        training = SFTConfig(
            str(folder / name),
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            optim="sgd",
            learning_rate=0.1,
            max_length=16,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=15,
            per_device_eval_batch_size=BATCH // replicas,
            per_device_train_batch_size=BATCH // replicas,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            **{"max_steps": STEPS, **settings},
        )
        trainer_class: Any = SFTTrainer
        ours: dict[str, Any] = {}
        if "WORLD_SIZE" in os.environ:
            from zerobubble.integrations.trl import PipelineSFTTrainer

            trainer_class, ours = PipelineSFTTrainer, {"schedule": "zb-h1", "num_microbatches": 4}
            if replicas > 1:
                shape = replicas, int(os.environ["WORLD_SIZE"]) // replicas
                ours["pipeline_options"] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))}
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
