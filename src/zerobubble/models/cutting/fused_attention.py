"""Fused attention on the meta device: one operation that keeps no matrix of scores, as on GPUs.

On the meta device, torch decomposes attention and counts the scores as gigabytes that no GPU saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FusedAttention(TorchFunctionMode):
    """Treats `scaled_dot_product_attention` of meta tensors as one operation, for shapes and FLOPs; masked-out scores are counted too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_attention = func is torch.nn.functional.scaled_dot_product_attention
        if is_attention and args and isinstance(args[0], Tensor) and args[0].is_meta and args[0].dim() == 4:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, enable_gqa: bool = False, **__: Any) -> Tensor:
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0]
    return output
