"""Counts the FLOPs of weight gradients, which equal the FLOPs of the products of weights and activations in the forward.

For y = x w, the gradient of w is x^T dy, a product of the same three sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from zerobubble.runtime.measure.memory_meter import addresses_of


def grouped_product_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of `torch._grouped_mm`. Groups are a dimension if both `a` and `b` have three, else ranges of rows or columns."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


grouped_product_flops._get_raw = True  # type: ignore[attr-defined]  # makes torch's counter pass tensors, not shapes
GROUPED: dict[Any, Callable[..., int]] = {torch.ops.aten._grouped_mm: grouped_product_flops} if hasattr(torch, "_grouped_mm") else {}
"""Products missing from torch's table."""
_FLOPS = {**GROUPED, **flop_registry}
"""FLOP formulas by operation."""
_UNCOUNTED = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_trilinear"}
"""Operations that multiply weights and have no FLOP formula."""


class WeightFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums in `total` the FLOPs of every product of a weight-only tensor and another tensor.

    A tensor is weight-only if it is one of `weights` or computed only from such tensors. `is_complete` is True if the FLOPs of all these
    products are known. Other trained parameters seen in the forward count as weights too: FSDP2 computes with parameters that the module
    does not list.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.is_complete = True
        self._from_weights: dict[int, Tensor] = {}
        """The weights and the tensors computed only from them, by address. They are kept alive so that no address is reused."""
        for weight in weights:
            self._remember(weight)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = _tensors_in((args, kwargs))
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self._remember(tensor)
        from_weights = [not self._from_weights.keys().isdisjoint(addresses_of((tensor,))) for tensor in tensors]
        if any(from_weights) and not all(from_weights):
            self._count(func._overloadpacket, args, kwargs, out)
        elif from_weights and all(from_weights):
            for tensor in _tensors_in(out):
                self._remember(tensor)
        return out

    def _count(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Adds the FLOPs of an `operation` on weights and other tensors. Operations without a formula are assumed not to be products."""
        flops = _FLOPS.get(operation)
        if flops is not None:
            self.total += flops(*args, **kwargs, out_val=out)
        elif operation._qualified_op_name.rpartition("::")[2] in _UNCOUNTED:
            self.is_complete = False

    def _remember(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._from_weights |= dict.fromkeys(addresses_of((tensor,)), tensor)


def _tensors_in(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def _quantized_products() -> dict[Any, Callable[..., int]]:
    """Returns the formulas of products with quantized weights that a loaded library has registered."""
    if "bitsandbytes" not in sys.modules:
        return {}
    operations = (getattr(torch.ops.bitsandbytes, name, None) for name in _OF_BITSANDBYTES)
    return {operation: _product_by_output for operation in operations if operation is not None}


_OF_BITSANDBYTES = ("gemm_4bit", "int8_scaled_mm", "int8_mixed_scaled_mm")


def _product_by_output(rows: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Returns the FLOPs of a product of `rows` of this shape, by the shape of its first output."""
    shape = out_shape if isinstance(out_shape[0], int) else out_shape[0]
    return int(2 * prod(shape) * rows[-1])


class _NoModuleTracker:
    """Replaces the tracker with which torch counts per module."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class FlopCounter(FlopCounterMode):
    """Counts FLOPs like torch's counter, without the breakdown by module.

    Torch's module tracker registers hooks on gradients, with which a forward that calls `torch.autograd.grad` or `torch.func.grad` fails.
    """

    def __init__(self, custom_mapping: dict[Any, Callable[..., int]] | None = None) -> None:
        super().__init__(display=False, custom_mapping={**_quantized_products(), **(custom_mapping or {})})
        self.mod_tracker: Any = _NoModuleTracker()


def flops_of(call: Callable[[], object]) -> int:
    """Returns the FLOPs of `call`."""
    with FlopCounter(GROUPED) as counter:
        call()
    return int(counter.get_total_flops())


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a part of `module` is compiled: counting would disturb compiled code."""
    return any(is_wrapped(part) or part._compiled_call_impl is not None for part in module.modules())


def is_wrapped(module: nn.Module) -> bool:
    """Returns whether `module` was returned by `torch.compile`."""
    return "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.eval_frame.OptimizedModule)  # importing it takes seconds
