"""A loop in one file around a small GPT: random crops, accumulation, a cosine with warmup, decay by dimension, an evaluation."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zerobubble as zb
from tests.integrations.scripts.corpus import sentences, tokenizer, write_results

BLOCK, BATCH, ACCUMULATION, STEPS = 16, 8, 2, 8


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(width, dim=2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 64, width: int = 32, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(BLOCK, width),
                "h": nn.ModuleList(Block(width, heads) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(step: int) -> float:
    """The learning rate: two steps of warmup, then a cosine down to a tenth."""
    return 3e-3 * (step + 1) / 2 if step < 2 else 3e-4 + 1.35e-3 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))


def main(folder: Path, pipelined: bool) -> None:
    """Train from random crops that the global generator draws, as the loops do that people copy."""
    if pipelined:
        dist.init_process_group("gloo")
    torch.manual_seed(1337)
    ids = torch.tensor(tokenizer()(" ".join(sentences(300, 6)))["input_ids"])
    train, held_out = ids[:-400], ids[-400:]
    model = GPT().double()

    def get_batch(data: Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - BLOCK, (BATCH,)).tolist()
        return tuple(torch.stack([data[start + shift : start + shift + BLOCK] for start in starts]) for shift in (0, 1))

    pipe = None
    parameters = dict(model.named_parameters())
    if pipelined:
        example = (ids[None, :BLOCK], ids[None, 1 : BLOCK + 1])
        pipe = zb.Pipeline(zb.split(model, example=example), "zb-v", 4, lambda output, _: output[1])
        mine = {id(parameter) for parameter in pipe.parameters()}
        parameters = {name: parameter for name, parameter in parameters.items() if id(parameter) in mine}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate(0), betas=(0.9, 0.95))
    losses, norms, evaluated = [], [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if step % 4 == 0:
            model.eval()
            with torch.no_grad():
                x, y = get_batch(held_out)
                evaluated.append(float(model(x, y)[1] if pipe is None else pipe.eval_step((x, y), y)[0]))
            model.train()
        for _ in range(ACCUMULATION):
            x, y = get_batch(train)
            if pipe is None:
                loss = model(x, y)[1] / ACCUMULATION
                loss.backward()
            else:
                loss = pipe.step((x, y), y) / ACCUMULATION
        if pipe is not None:  # each step adds the gradients of its mean
            for parameter in pipe.parameters():
                parameter.grad /= ACCUMULATION
            norms.append(float(pipe.clip_grad_norm_(1.0)))
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * ACCUMULATION)
    figures = {"losses": losses, "norms": norms, "evaluated": evaluated}
    if pipe is None:
        write_results(folder, figures, model.state_dict())
        return
    with zb.gathered(model):
        if pipe.rank == 0:
            write_results(folder, figures, model.state_dict())
    pipe.close()
    dist.destroy_process_group()
