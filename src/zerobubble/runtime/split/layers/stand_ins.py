"""The layers whose weight gradients can wait for W, and what stands in for their `forward` during a step.

For the length of a step the `forward` of every layer in the table is shadowed on the instance: same kernels, same output, but its
backward leaves the weight's gradient for later. So are modules that own matrices, whose products are caught. Everything else in the stage
is untouched and gets its gradients in B, and so do layers that are compiled, that TorchScript runs, that hooks watch, or whose weight is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from zerobubble.runtime.split.layers import conv, embedding, linear
from zerobubble.runtime.split.layers.eligibility import can_train, is_scripted, is_torchs
from zerobubble.runtime.split.layers.matrix_products import Catching, owns_matrices

STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    nn.Linear.forward: linear.forward,
    nn.Conv1d.forward: conv.forward,
    nn.Conv2d.forward: conv.forward,
    nn.Conv3d.forward: conv.forward,
    nn.Embedding.forward: embedding.forward,
}
"""What stands in for the `forward` of a layer, which its type may have inherited."""


@contextmanager
def shadowing(module: nn.Module) -> Iterator[None]:
    """Shadow every layer of `module` that has a stand-in; each call then decides whether its weight gradient can wait."""
    shadowed = {part: forward for part in module.modules() if (forward := stand_in_for(part)) is not None}
    for part, forward in shadowed.items():
        part.__dict__["forward"] = MethodType(forward, part)
    try:
        yield
    finally:
        for part in shadowed:
            part.__dict__.pop("forward", None)


def stand_in_for(part: nn.Module) -> Callable[..., Any] | None:
    """What stands in for the `forward` of `part`, None where autograd does all."""
    if "forward" in part.__dict__ or is_scripted(part):
        return None
    own = type(part).forward
    if own in STAND_INS:  # `part.weight` may be computed, and computing it may change buffers
        return STAND_INS[own] if can_train(part._parameters.get("weight")) and _convolves_plainly(part) else None
    # torch's others give their parameters to one kernel, in which nothing can be caught
    return None if is_torchs(part) or not owns_matrices(part) else _catching


def _convolves_plainly(part: nn.Module) -> bool:
    own = getattr(type(part), "_conv_forward", None)
    return own in (None, nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)


def _catching(part: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    with Catching():
        return type(part).forward(part, *args, **kwargs)
