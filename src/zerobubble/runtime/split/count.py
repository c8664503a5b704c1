"""Counts the FLOPs that the gradients of weights take: as many as the products of weights and activations in the forward."""

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


def _grouped_product_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """The FLOPs of `torch._grouped_mm`, by whatever dimension of `a` and `b` the groups are told apart."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


_grouped_product_flops._get_raw = True  # type: ignore[attr-defined]  # torch's counter is to call it with tensors, not with shapes
_GROUPED = {torch.ops.aten._grouped_mm: _grouped_product_flops} if hasattr(torch.ops.aten, "_grouped_mm") else {}
_FLOPS = {**_GROUPED, **flop_registry}
"""FLOPs by operation: torch's table, with the products that it lacks."""
_UNCOUNTED = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_trilinear"}
"""Operations that multiply weights and whose FLOPs nobody has written down."""


class WeightFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums in `total` the FLOPs of every product in which a tensor made from `weights` alone meets another.

    `is_complete` tells whether the FLOPs of all these products are known. Parameters met on the way count as weights, too: FSDP2 computes
    with others than it shows.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.is_complete = True
        self._made: dict[int, Tensor] = {}
        for weight in weights:
            self._remember(weight)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            if isinstance(tensor, nn.Parameter):
                self._remember(tensor)
        from_weights = [self._is_made(tensor) for tensor in given]
        flops = _FLOPS.get(func._overloadpacket)
        is_product = any(from_weights) and not all(from_weights)
        if is_product and flops is not None:
            self.total += flops(*args, **kwargs, out_val=out)
        elif is_product and func._overloadpacket._qualified_op_name.rpartition("::")[2] in _UNCOUNTED:
            self.is_complete = False
        elif from_weights and all(from_weights):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._remember(leaf)
        return out

    def _remember(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._made |= dict.fromkeys(addresses_of((tensor,)), tensor)

    def _is_made(self, tensor: Tensor) -> bool:
        return not self._made.keys().isdisjoint(addresses_of((tensor,)))


def flops_of(call: Callable[[], object]) -> int:
    """The FLOPs that `call` takes."""
    with FlopCounterMode(display=False, custom_mapping=_GROUPED) as counter:
        call()
    return int(counter.get_total_flops())


def is_compiled(module: nn.Module) -> bool:
    """Whether a part of `module` is compiled, which counting would disturb."""
    kind = torch._dynamo.eval_frame.OptimizedModule if "torch._dynamo" in sys.modules else ()
    return any(isinstance(part, kind) or part._compiled_call_impl is not None for part in module.modules())
