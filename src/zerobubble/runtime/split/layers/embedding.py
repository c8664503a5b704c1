"""Embeddings with a deferred gradient. Autograd handles embeddings that are sparse, scale or renormalize."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.device import is_host
from zerobubble.runtime.split.layers.eligibility import work_for
from zerobubble.runtime.split.layers.weight_work import WeightWork


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, padding_idx: int, work: WeightWork) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.parameter = weight
        ctx.padding_idx = padding_idx
        ctx.work = work
        return torch.embedding(weight, tokens, padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        rows = ctx.parameter.shape[0]
        padding_idx = ctx.padding_idx

        def gradient(tokens: Tensor, dy: Tensor) -> Tensor:
            rows_gradient: Tensor = torch.ops.aten.embedding_dense_backward(dy, tokens, rows, padding_idx, False)
            return rows_gradient

        if not ctx.work.can_defer(ctx):
            return gradient(tokens, dy), None, None, None
        ctx.work.defer(ctx.parameter, gradient, tokens, dy, add_to=_adding_rows(tokens, rows, padding_idx))
        return None, None, None, None


def _adding_rows(tokens: Tensor, rows: int, padding_idx: int) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """Returns a function that adds only to the rows of the tokens, for fewer tokens than rows; the gradients of one row are summed first.

    Returns None on a GPU, where the number of distinct tokens would need a synchronization.
    """
    return partial(_add_rows, padding_idx) if is_host(tokens.device) and tokens.numel() < rows else None


def _add_rows(padding_idx: int, so_far: Tensor, tokens: Tensor, dy: Tensor) -> None:
    if padding_idx >= 0:
        counts = tokens != padding_idx
        tokens, dy = tokens[counts], dy[counts]
    used, places = torch.unique(tokens, return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward(dy, places, len(used), -1, False)
    so_far.index_add_(0, used, sums.to(so_far.dtype))


def forward(layer: nn.Embedding, tokens: Tensor) -> Tensor:
    """`nn.Embedding.forward`."""
    work = work_for(layer.weight, tokens)
    if work is None or layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None:
        options = layer.padding_idx, layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse
        return nn.functional.embedding(tokens, layer.weight, *options)
    padding_idx = -1 if layer.padding_idx is None else layer.padding_idx
    y: Tensor = _Embedding.apply(layer.weight, tokens, padding_idx, work)  # type: ignore[no-untyped-call]
    return y
