"""The model of the measurements on GPUs: transformer blocks in float32, bfloat16, or with products in FP8."""

from __future__ import annotations

import torch
from float8 import Float8Linear
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}
"""The dtype of parameters and activations, by precision."""


class Sizes:
    """The sizes of a run: large enough to fill a GPU, or small enough to rehearse on a CPU."""

    def __init__(self, device: torch.device) -> None:
        large = device.type == "cuda"
        self.blocks, self.width, self.heads = (4, 2048, 16) if large else (2, 64, 4)
        self.batch, self.length, self.microbatches = (2, 2048, 8) if large else (1, 32, 4)
        self.steps = 3 if large else 2


class Block(nn.Module):
    """A transformer block: attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def model(sizes: Sizes, device: torch.device, precision: str, blocks: int | None = None, seed: int = 0) -> nn.Module:
    """Returns a stack of blocks, the same in each call with one seed."""
    torch.manual_seed(seed)
    linear = Float8Linear if precision == "float8" else nn.Linear
    stack = (Block(sizes.width, sizes.heads, linear) for _ in range(sizes.blocks if blocks is None else blocks))
    return nn.Sequential(*stack).to(device, DTYPES[precision])
