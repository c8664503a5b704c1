"""Modules that own matrices themselves: while their `forward` runs, products of those matrices are caught on the way to torch.

Other modules pay nothing. What a checkpoint inside such a `forward` runs is left to autograd, for its second run in B is not within that
`forward`, and must save the same tensors as the first; so before torch 2.8, which cannot tell what a checkpoint runs, nothing is caught.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerobubble.runtime.split.layers import matmul
from zerobubble.runtime.split.layers.eligibility import CAN_SEE_HOOKS
from zerobubble.runtime.split.layers.linear import linear
from zerobubble.runtime.split.layers.parameter_parts import note_indexing


def _linear(original: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight, bias) if type(weight) is nn.Parameter else matmul.linear_of_part(original, x, weight, bias)


_CAUGHT: dict[Any, Callable[..., Tensor]] = {
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
_CAUGHT |= {torch._grouped_mm: matmul.grouped} if hasattr(torch, "_grouped_mm") else {}
_TAKEN: tuple[set[str], ...] = (set(), {"bias"}, {"offs"})
"""The options that our ways know, in the combinations they know."""


class Catching(TorchFunctionMode):
    """Sends products to where the gradients of parameters, or of parts of them, can wait."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = _saving_hooks()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            found = func(*args, **kwargs)
            note_indexing(found, *args)
            return found
        ours = _CAUGHT.get(func)
        if ours is None or torch.compiler.is_compiling() or _saving_hooks() != self._hooks:
            return func(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        return ours(func, *args, **given) if given.keys() in _TAKEN else func(*args, **kwargs)


def _saving_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def owns_matrices(module: nn.Module) -> bool:
    """Whether `module` has parameters of its own, in lists of parameters too, whose products in its `forward` can be caught.

    So do the parts of a traced model, which are given them: their `given_parameters` tell of which kinds.
    """
    if not CAN_SEE_HOOKS:
        return False
    lists = (part for part in module.children() if isinstance(part, (nn.ParameterList, nn.ParameterDict)))
    held = (parameter for owner in (module, *lists) for parameter in owner.parameters(recurse=False))
    return any(p.dim() >= 2 and p.requires_grad for p in itertools.chain(held, getattr(module, "given_parameters", ())))
