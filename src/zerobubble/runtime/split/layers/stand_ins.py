"""The layers whose weight gradients can be deferred to W, and the replacements of their `forward` during a step.

During a step, an instance attribute shadows the `forward` of every layer in the table. The replacement runs the same kernels and returns
the same output, but its backward defers the weight gradient. Modules that own matrices get a `forward` that intercepts their products. All
other modules stay unchanged and get their gradients in B. So do layers that are compiled, scripted or hooked, and layers with a computed
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from zerobubble.runtime.split.layers import conv, embedding, linear
from zerobubble.runtime.split.layers.eligibility import can_train, has_torch_forward, is_scripted
from zerobubble.runtime.split.layers.matrix_products import ProductInterceptor, owns_matrices

STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    nn.Linear.forward: linear.forward,
    nn.Conv1d.forward: conv.forward,
    nn.Conv2d.forward: conv.forward,
    nn.Conv3d.forward: conv.forward,
    nn.Embedding.forward: embedding.forward,
}
"""Replacements by the original `forward`, which a layer's class may have inherited."""


@contextmanager
def shadowing(module: nn.Module) -> Iterator[None]:
    """Replaces the `forward` of every layer of `module` that has a stand-in. Each call then decides whether it can defer its weight
    gradient.
    """
    shadowed = {part: forward for part in module.modules() if (forward := stand_in_for(part)) is not None}
    for part, forward in shadowed.items():
        part.__dict__["forward"] = MethodType(forward, part)
    try:
        yield
    finally:
        for part in shadowed:
            part.__dict__.pop("forward", None)


def stand_in_for(part: nn.Module) -> Callable[..., Any] | None:
    """Returns the replacement of the `forward` of `part`, None if autograd computes everything."""
    if "forward" in part.__dict__ or is_scripted(part):
        return None
    forward = type(part).forward
    if forward in STAND_INS:  # not `part.weight`, which may be computed, and computing it may change buffers
        return STAND_INS[forward] if can_train(part._parameters.get("weight")) and _convolves_plainly(part) else None
    # other layers of torch pass their parameters to one kernel, where products cannot be intercepted
    return None if has_torch_forward(part) or not owns_matrices(part) else _intercepting


def _convolves_plainly(part: nn.Module) -> bool:
    convolve = getattr(type(part), "_conv_forward", None)
    return convolve in (None, nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)


def _intercepting(part: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    with ProductInterceptor():
        return type(part).forward(part, *args, **kwargs)
