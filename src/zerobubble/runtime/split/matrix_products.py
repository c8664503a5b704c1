"""Modules that own matrices themselves: while their `forward` runs, products of those matrices are caught on the way to torch.

Other modules pay nothing. What a checkpoint inside such a `forward` runs is left to autograd, for its second run in B is not within that
`forward`, and must save the same tensors as the first; so before torch 2.8, which cannot tell what a checkpoint runs, nothing is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerobubble.runtime.split import product
from zerobubble.runtime.split.gate import CAN_SEE_HOOKS
from zerobubble.runtime.split.linear import linear

_CAUGHT: dict[Any, Callable[..., Tensor]] = {
    nn.functional.linear: lambda _, *args, **kwargs: linear(*args, **kwargs),
    torch.matmul: product.product,
    Tensor.matmul: product.product,
    Tensor.__matmul__: product.product,
    torch.mm: product.product,
    Tensor.mm: product.product,
    torch.bmm: product.product,
    Tensor.bmm: product.product,
    torch.baddbmm: product.sum_and_product,
    Tensor.baddbmm: product.sum_and_product,
    torch.einsum: product.einsum,
}
_CAUGHT |= {torch._grouped_mm: product.grouped} if hasattr(torch, "_grouped_mm") else {}
_CAUGHT |= {nn.functional.grouped_mm: product.grouped} if hasattr(nn.functional, "grouped_mm") else {}
_TAKEN: tuple[set[str], ...] = (set(), {"bias"}, {"offs"})


class Catching(TorchFunctionMode):
    """Sends products of parameters to where their weight gradient can wait."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = _saving_hooks()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        ours = _CAUGHT.get(func)
        if ours is None or torch.compiler.is_compiling() or not _is_plain(args, kwargs) or _saving_hooks() != self._hooks:
            return func(*args, **kwargs)
        return ours(func, *args, **kwargs)


def _is_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call names a parameter among its tensors and has no options that our ways do not know."""
    return kwargs.keys() in _TAKEN and any(type(arg) is nn.Parameter for arg in args)


def _saving_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def owns_matrices(module: nn.Module) -> bool:
    """Whether `module` has parameters of its own, in lists of parameters too, whose products in its `forward` can be caught."""
    if not CAN_SEE_HOOKS:
        return False
    lists = (part for part in module.children() if isinstance(part, (nn.ParameterList, nn.ParameterDict)))
    return any(p.dim() >= 2 and p.requires_grad for owner in (module, *lists) for p in owner.parameters(recurse=False))
