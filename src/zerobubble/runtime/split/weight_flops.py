"""Counts the FLOPs that the gradients of weights take: as many as the products of weights and activations in the forward.

From y = x w follows w's gradient x^T dy, a product of the same three sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from zerobubble.runtime.measure.storages import addresses_of


def grouped_product_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """The FLOPs of `torch._grouped_mm`. Groups are a dimension of their own where both `a` and `b` have three, else rows or columns."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


grouped_product_flops._get_raw = True  # type: ignore[attr-defined]  # torch's counter is to call it with tensors, not with shapes
GROUPED: dict[Any, Callable[..., int]] = {torch.ops.aten._grouped_mm: grouped_product_flops} if hasattr(torch, "_grouped_mm") else {}
"""The products that torch's table lacks."""
_FLOPS = {**GROUPED, **flop_registry}
"""FLOPs by operation."""
_UNCOUNTED = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_trilinear"}
"""Operations that multiply weights and whose FLOPs nobody has written down."""


class WeightFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums in `total` the FLOPs of every product in which a tensor made from `weights` alone meets another.

    A tensor is made from weights alone if all tensors that its operation was given were. `is_complete` tells whether the FLOPs of all
    these products are known. Trained parameters that are met on the way count as weights, too: FSDP2 computes with others than it shows.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.is_complete = True
        self._from_weights: dict[int, Tensor] = {}
        """The weights and what was made from them alone, by the address of their memory, which they are kept to hold."""
        for weight in weights:
            self._remember(weight)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = _tensors_in((args, kwargs))
        for tensor in given:
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self._remember(tensor)
        from_weights = [self._is_from_weights(tensor) for tensor in given]
        if any(from_weights) and not all(from_weights):
            self._count(func._overloadpacket, args, kwargs, out)
        elif from_weights and all(from_weights):
            for tensor in _tensors_in(out):
                self._remember(tensor)
        return out

    def _count(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Weights met something else in `operation`: add its FLOPs if it is a product; what is in no table is taken for none."""
        flops = _FLOPS.get(operation)
        if flops is not None:
            self.total += flops(*args, **kwargs, out_val=out)
        elif operation._qualified_op_name.rpartition("::")[2] in _UNCOUNTED:
            self.is_complete = False

    def _remember(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._from_weights |= dict.fromkeys(addresses_of((tensor,)), tensor)

    def _is_from_weights(self, tensor: Tensor) -> bool:
        return not self._from_weights.keys().isdisjoint(addresses_of((tensor,)))


def _tensors_in(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


class _NoModules:
    """In the place of the tracker by which torch counts for each module."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class FlopCounter(FlopCounterMode):
    """Counts FLOPs as torch does, of all modules together.

    Torch's tracker of modules sets hooks on gradients, with which a forward fails that calls `torch.autograd.grad` or `torch.func.grad`.
    """

    def __init__(self, custom_mapping: dict[Any, Callable[..., int]] | None = None) -> None:
        super().__init__(display=False, custom_mapping=custom_mapping)
        self.mod_tracker: Any = _NoModules()


def flops_of(call: Callable[[], object]) -> int:
    """The FLOPs that `call` takes."""
    with FlopCounter(GROUPED) as counter:
        call()
    return int(counter.get_total_flops())


def is_compiled(module: nn.Module) -> bool:
    """Whether a part of `module` is compiled, which counting would disturb."""
    return any(is_wrapped(part) or part._compiled_call_impl is not None for part in module.modules())


def is_wrapped(module: nn.Module) -> bool:
    """Whether `module` is what torch.compile has made of another one."""
    return "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.eval_frame.OptimizedModule)  # importing it takes seconds
