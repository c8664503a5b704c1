"""Grouped matrix products in traced graphs: each group of rows times its own matrix, as in a mixture of experts.

The fake kernel of `torch._grouped_mm` supports only bfloat16, so other dtypes cannot be traced. For these, the graph calls a custom
operation that wraps torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import register_flop_formula

from zerobubble.runtime.split.weight_flops import grouped_product_flops

HAS_GROUPED_PRODUCTS = hasattr(torch, "_grouped_mm")
"""Whether this version of torch has grouped products."""


class TraceableGroupedProducts(TorchFunctionMode):
    """Replaces `torch._grouped_mm` of rows and a stack of matrices by the custom operation, for dtypes that cannot be traced."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        options = {name: value for name, value in kwargs.items() if value is not None}
        if HAS_GROUPED_PRODUCTS and func is torch._grouped_mm and len(args) == 2 and options.keys() == {"offs"}:
            a, b = args
            if a.dtype is not torch.bfloat16 and a.dtype is b.dtype and (a.dim(), b.dim()) == (2, 3):
                return grouped_product(a, b, options["offs"])
        return func(*args, **kwargs)


@torch.library.custom_op("zerobubble::grouped_product", mutates_args=())
def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each group of rows of `a` by its matrix in `b`.

    Group i has the rows from `ends[i - 1]` to `ends[i]`. If `b` is a matrix, too, the result has one product per group, of the group's
    columns of `a` and its rows of `b`.
    """
    product: Tensor = torch._grouped_mm(a, b, offs=ends)
    return product.contiguous()


@grouped_product.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (ends.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    grad_a = grouped_product(gradient, b.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    grad_b = grouped_product(a.t(), gradient, ends) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b, None


grouped_product.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
register_flop_formula(torch.ops.zerobubble.grouped_product, get_raw=True)(grouped_product_flops)
