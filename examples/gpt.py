"""A byte-level GPT, built stage by stage, with the same weights for any number of stages.

bytes -> Embed -> Block x layers -> Head -> logits for the next byte
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCAB = 256


@dataclass(frozen=True)
class GPTConfig:
    """The size of the model. `seed` fixes its initial weights."""

    layers: int = 8
    width: int = 320
    heads: int = 5
    context: int = 128
    seed: int = 0

    @property
    def num_parameters(self) -> int:
        """Weights and biases of the whole model."""
        block = 12 * self.width**2 + 13 * self.width
        embed = (VOCAB + self.context) * self.width
        head = 2 * self.width + self.width * VOCAB
        return self.layers * block + embed + head


class Embed(nn.Module):
    """Bytes to vectors: token plus position embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, config.width)
        self.position = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) bytes -> (batch, length, width)."""
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One pre-norm layer: attention, then an MLP four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Sequential):
    """Vectors to logits for the next byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(nn.LayerNorm(config.width), nn.Linear(config.width, VOCAB, bias=False))


def build_stage(config: GPTConfig, stage: int, num_stages: int) -> nn.Module:
    """Returns a stage: an equal share of the layers, with the embedding in the first stage and the head in the last.

    Every part has its own seed, so any number of stages makes the same model. `build_stage(config, 0, 1)` is the whole model.
    """
    share = config.layers // num_stages
    numbers = range(stage * share, (stage + 1) * share)
    parts: list[nn.Module] = [_seeded(config, 1 + number, Block) for number in numbers]
    if stage == 0:
        parts.insert(0, _seeded(config, 0, Embed))
    if stage == num_stages - 1:
        parts.append(_seeded(config, 1 + config.layers, Head))
    return nn.Sequential(*parts)


def _seeded(config: GPTConfig, number: int, part: Callable[[GPTConfig], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed * 10_000 + number)
        module = part(config)
        for weight in _matrices(module):
            nn.init.normal_(weight, std=0.02)
    return module


def _matrices(module: nn.Module) -> Iterator[Tensor]:
    return (layer.weight for layer in module.modules() if isinstance(layer, (nn.Linear, nn.Embedding)))


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
