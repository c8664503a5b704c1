"""Train a causal language model of Transformers over pipeline ranks, made from its configuration.

torchrun --nproc-per-node 2 examples/split_language_model.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from text import batch, standard_library
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import zerobubble as zb

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def loss_fn(output: object, targets: Tensor) -> Tensor:
    """Returns the mean over all tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Trains, in one process per rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    pipe = zb.Pipeline(zb.split(model), "zb-v", num_microbatches=4, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    text = standard_library()
    for step in range(12):
        ids, targets = batch(text.train, sequences=16, length=64, seed=step)
        loss = pipe.step({"input_ids": ids}, targets)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
