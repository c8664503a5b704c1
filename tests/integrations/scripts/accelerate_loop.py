"""The loop of Transformers' examples without Trainer: epochs over a loader, accumulation, a linear schedule, an evaluation per epoch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorForLanguageModeling, get_scheduler

import zerobubble as zb
from tests.integrations.scripts.corpus import sentences, tokenizer, write_results


def labels_that_count(labels: torch.Tensor) -> torch.Tensor:
    """The weight of a microbatch: a causal model predicts each label but the first, and ignores those of -100."""
    return (labels[:, 1:] != -100).sum()


def main(folder: Path, pipelined: bool) -> None:
    """Train two epochs with padded batches."""
    accumulation = 2
    set_seed(21)
    tokens = tokenizer()
    data = [{"input_ids": tokens(text)["input_ids"]} for text in sentences(84, 12)]
    collate = DataCollatorForLanguageModeling(tokens, mlm=False)
    train = DataLoader(data[:64], shuffle=True, collate_fn=collate, batch_size=8)
    evaluation = DataLoader(data[64:], collate_fn=collate, batch_size=10)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = AutoModelForCausalLM.from_config(config).double()
    pipe: Any = None
    accelerator = None
    if pipelined:  # a pipeline takes the place of the accelerator: every rank loads every batch
        dist.init_process_group("gloo")
        pipe = zb.Pipeline(zb.split(model), "zb-h1", 4, lambda output, labels: output.loss, loss_weight=labels_that_count)
    else:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    trained = {id(parameter) for parameter in (model if pipe is None else pipe).parameters()}
    named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in trained]
    no_decay = ("bias", "norm.weight")
    groups = [
        {"params": [p for name, p in named if not any(part in name for part in no_decay)], "weight_decay": 0.1},
        {"params": [p for name, p in named if any(part in name for part in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=8)
    if accelerator is not None:
        model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
    losses, perplexities = [], []
    for _ in range(2):
        model.train()
        for index, batch in enumerate(train):
            if accelerator is not None:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    if accelerator.sync_gradients:
                        schedule.step()
                    optimizer.zero_grad()
            else:
                loss = pipe.step(dict(batch), batch["labels"])
                if (index + 1) % accumulation == 0:
                    for parameter in pipe.parameters():
                        parameter.grad /= accumulation
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        found = []
        for batch in evaluation:
            with torch.no_grad():
                found.append(float(model(**batch).loss if pipe is None else pipe.eval_step(dict(batch), batch["labels"])[0]))
        perplexities.append(math.exp(sum(found) / len(found)))
    figures = {"losses": losses, "perplexities": perplexities}
    if accelerator is not None:
        write_results(folder, figures, accelerator.unwrap_model(model).state_dict())
        return
    with zb.gathered(model):
        if pipe.rank == 0:
            model.save_pretrained(folder / "final")
            write_results(folder, figures, AutoModelForCausalLM.from_pretrained(folder / "final", dtype=torch.float64).state_dict())
    pipe.close()
    dist.destroy_process_group()
