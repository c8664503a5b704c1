"""Train only low-rank adapters of the library peft over pipeline ranks, with the activations of each layer recomputed.

torchrun --nproc-per-node 2 examples/split_lora.py

Frozen parameters have no gradient, are in no optimizer and take no time in W.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from text import batch, standard_library
from transformers import AutoConfig, AutoModelForCausalLM

import zerobubble as zb

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def main() -> None:
    """Trains, in one process per rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    adapted.gradient_checkpointing_enable()
    pipe = zb.Pipeline(zb.split(adapted), "zb-h1", num_microbatches=4, loss_fn=lambda output, _: output.loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    text = standard_library()
    for step in range(12):
        ids, _ = batch(text.train, sequences=16, length=64, seed=step)
        loss = pipe.step({"input_ids": ids, "labels": ids}, ids)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
