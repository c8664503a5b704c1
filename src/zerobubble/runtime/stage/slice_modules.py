"""Modules with which a model's own code runs over slices of a sequence: joined values, causal attention and positions.

Outside of a pipeline with slices they do what a model does with the whole sequence.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from zerobubble.arguments import WHOLE, takes
from zerobubble.runtime.stage.slices import join, tokens_before


class JoinSlices(nn.Module):
    """Joins a value with those of earlier slices of its sequence along `dim`, such as the keys of attention.

    `forward(value)` returns the value of the whole sequence up to the end of the slice. Its gradient reaches the slices that made it. In a
    pipeline without slices, or without a pipeline, it returns the value. Use one module for each value that is joined.

    >>> import torch, zerobubble as zb
    >>> zb.nn.JoinSlices(dim=-2)(torch.ones(1, 4, 2)).shape
    torch.Size([1, 4, 2])
    """

    @takes(dim=WHOLE)
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, value: Tensor) -> Tensor:
        """Returns `value` joined with those of earlier slices."""
        return join(self, value, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class CausalAttention(nn.Module):
    """Causal `torch.nn.functional.scaled_dot_product_attention` of a slice's queries over the keys and values of its sequence so far.

    `forward(query, key, value)` takes tensors (..., heads, tokens, width), and `dropout_p`, `scale` and `enable_gqa` of the function.

    >>> import torch, zerobubble as zb
    >>> q, k, v = torch.ones(3, 1, 2, 4, 8)
    >>> zb.nn.CausalAttention()(q, k, v).shape
    torch.Size([1, 2, 4, 8])
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys = JoinSlices(-2)
        self.values = JoinSlices(-2)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float = 0.0, scale: float | None = None, enable_gqa: bool = False
    ) -> Tensor:
        """Returns the attention of `query` over `key` and `value`, the slice's tensors (..., heads, tokens, width), and those before.

        `dropout_p`, `scale` and `enable_gqa` are those of `torch.nn.functional.scaled_dot_product_attention`.
        """
        key, value = self.keys(key), self.values(value)
        tokens, before = query.size(-2), key.size(-2) - query.size(-2)
        mask = cast(Tensor, causal_lower_right(tokens, tokens + before)) if before else None
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, not before, scale=scale, enable_gqa=enable_gqa)


class SlicePositions(nn.Module):
    """The positions of a slice's tokens in its sequence, for position embeddings.

    `forward(length, device=None)` returns `length` whole numbers, from 0 on for the first slice.

    >>> import zerobubble as zb
    >>> zb.nn.SlicePositions()(4)
    tensor([0, 1, 2, 3])
    """

    def forward(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Returns the positions of the `length` tokens of this slice, whole numbers on `device`."""
        start = tokens_before(self, length)
        return torch.arange(start, start + length, device=device)
