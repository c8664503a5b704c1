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


class WeightFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums in `total` the FLOPs of every product in which a tensor made from `weights` alone meets another."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._made = {weight.untyped_storage().data_ptr(): weight for weight in weights if weight.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        from_weights = [self._is_made(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        flops = flop_registry.get(func._overloadpacket)
        if flops is not None and any(from_weights) and not all(from_weights):
            self.total += flops(*args, **kwargs, out_val=out)
        elif from_weights and all(from_weights):
            self._made |= {leaf.untyped_storage().data_ptr(): leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out

    def _is_made(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._made


def flops_of(call: Callable[[], object]) -> int:
    """The FLOPs that `call` takes."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def is_compiled(module: nn.Module) -> bool:
    """Whether a part of `module` is compiled, which counting would disturb."""
    kind = torch._dynamo.eval_frame.OptimizedModule if "torch._dynamo" in sys.modules else ()
    return any(isinstance(part, kind) or part._compiled_call_impl is not None for part in module.modules())
