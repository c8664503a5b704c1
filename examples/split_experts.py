"""Train a mixture of experts of Transformers over pipeline ranks, with the load-balancing loss of its routers.

torchrun --nproc-per-node 2 examples/split_experts.py

The routers' loss uses the logits of all layers, which travel from stage to stage.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from text import batch, standard_library
from transformers import AutoConfig, AutoModelForCausalLM

import zerobubble as zb

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}


def main() -> None:
    """Trains, in one process per rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", output_router_logits=True, **SIZES, **EXPERTS))
    pipe = zb.Pipeline(zb.split(model), "zb-v", num_microbatches=4, loss_fn=lambda output, _: output.loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
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
