"""Train T5 over pipeline ranks to copy its input. Every decoder layer uses the encoder's output.

torchrun --nproc-per-node 2 examples/split_t5.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import zerobubble as zb


def loss_fn(output: object, targets: Tensor) -> Tensor:
    """Returns the mean over all tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Trains, in one process per rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and numbers on every rank
    sizes = {"vocab_size": 32, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **sizes))
    pipe = zb.Pipeline(zb.split(model), "zb-h1", num_microbatches=4, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(20):
        ids = torch.randint(3, 32, (16, 6))
        shifted = nn.functional.pad(ids[:, :-1], (1, 0))  # the decoder sees the tokens before each token
        loss = pipe.step({"input_ids": ids, "decoder_input_ids": shifted}, ids)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
