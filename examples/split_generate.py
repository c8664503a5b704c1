"""Train a language model over pipeline ranks and generate text, greedily and without a cache: each token is a full forward.

torchrun --nproc-per-node 2 examples/split_generate.py

To generate long texts, save the weights and load them into the unsplit model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import zerobubble as zb

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
RHYME = b"one for the money, two for the show, three to get ready and four to go."


def generate(pipe: zb.Pipeline, ids: Tensor, length: int) -> Tensor:
    """Returns `ids` with `length` more tokens by greedy decoding. Only the last stage's rank has the output, and sends it to the others."""
    for _ in range(length):
        _, output = pipe.eval_step({"input_ids": ids}, num_microbatches=1)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, None if output is None else output.logits[:, -1:].argmax(-1))
        ids = torch.cat([ids, next(token for token in gathered if token is not None)], dim=1)
    return ids


def main() -> None:
    """Trains, in one process per rank, until the model knows the rhyme, and continues it from the first words."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    pipe = zb.Pipeline(zb.split(model), "zb-v", num_microbatches=2, loss_fn=lambda output, _: output.loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=5e-3)
    rhyme = torch.tensor([list(RHYME)] * 2)
    for step in range(100):
        loss = pipe.step({"input_ids": rhyme, "labels": rhyme}, rhyme)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.rank == 0 and step % 20 == 19:
            print(f"step {step}: loss {loss.item():.3f}")
    written = generate(pipe, rhyme[:1, :8], length=26)
    if pipe.rank == 0:
        print("written:", bytes(written[0].tolist()).decode(errors="replace"))
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
