"""Intercepts matrix products in modules that own matrices, with a `TorchFunctionMode` around their `forward`.

Other modules pay nothing. Checkpoints inside such a `forward` are left to autograd. Their recomputation in B runs outside of that
`forward`, hence without the mode, and must save the same tensors as the first run. Before torch 2.8, checkpoints cannot be detected, so
nothing is intercepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerobubble.runtime.split.layers import matmul
from zerobubble.runtime.split.layers.linear import linear
from zerobubble.runtime.split.layers.parameter_parts import note_indexing
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS


def _linear(original: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight, bias) if type(weight) is nn.Parameter else matmul.linear_of_part(original, x, weight, bias)


_INTERCEPTED: dict[Any, Callable[..., Tensor]] = {
    nn.functional.linear: _linear,
    torch.matmul: matmul.product,
    Tensor.matmul: matmul.product,
    Tensor.__matmul__: matmul.product,
    torch.mm: matmul.product,
    Tensor.mm: matmul.product,
    torch.bmm: matmul.product,
    Tensor.bmm: matmul.product,
    torch.addmm: matmul.sum_and_product,
    Tensor.addmm: matmul.sum_and_product,
    torch.baddbmm: matmul.sum_and_product,
    Tensor.baddbmm: matmul.sum_and_product,
    torch.einsum: matmul.einsum,
}
_INTERCEPTED |= {torch._grouped_mm: matmul.grouped} if hasattr(torch, "_grouped_mm") else {}
_OPTIONS_SUPPORTED: tuple[set[str], ...] = (set(), {"bias"}, {"offs"})
"""The combinations of options that the functions above support."""


class ProductInterceptor(TorchFunctionMode):
    """Replaces products by versions that defer the gradients of parameters, or of parts of them."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = _saving_hooks()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            item = func(*args, **kwargs)
            note_indexing(item, *args)
            return item
        ours = _INTERCEPTED.get(func)
        if ours is None or torch.compiler.is_compiling() or _saving_hooks() != self._hooks:
            return func(*args, **kwargs)
        options = {name: value for name, value in kwargs.items() if value is not None}
        return ours(func, *args, **options) if options.keys() in _OPTIONS_SUPPORTED else func(*args, **kwargs)


def _saving_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def owns_matrices(module: nn.Module) -> bool:
    """Returns whether `module` directly owns parameters (or parameter lists) with products in its `forward` that can be intercepted.

    Parts of a traced model receive their parameters as arguments; `given_parameters` lists these.
    """
    if not CAN_SEE_HOOKS:
        return False
    lists = (part for part in module.children() if isinstance(part, (nn.ParameterList, nn.ParameterDict)))
    held = (parameter for owner in (module, *lists) for parameter in owner.parameters(recurse=False))
    return any(p.dim() >= 2 and p.requires_grad for p in itertools.chain(held, getattr(module, "given_parameters", ())))
