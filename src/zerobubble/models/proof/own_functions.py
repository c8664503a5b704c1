"""Finds the autograd functions of a model's code, and those whose backward would get shares of a gradient in stages."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from zerobubble.error_reports.text import text_of

_SCALES = (-1.0, 1e-6, 1e6)
"""Factors of a gradient: the backward of a function that limits or normalizes gradients is not linear over this range."""


def functions_behind(output: Any) -> list[Any]:
    """Returns the nodes behind `output` of functions that are not torch's, each once: their backward is Python code."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    nodes: dict[Any, None] = dict.fromkeys(get_gradient_edge(tensor).node for tensor in tensors)
    left = list(nodes)
    while left:
        new = [node for node, _ in left.pop().next_functions if node is not None and node not in nodes]
        nodes.update(dict.fromkeys(new))
        left += new
    return [node for node in nodes if issubclass(type(node), BackwardCFunction) and not _is_of_torch(node._forward_cls)]


def _is_of_torch(function: type) -> bool:
    return function.__module__.startswith("torch.") and not is_operator(function)


def is_operator(function: type) -> bool:
    """Returns whether torch has made this function for an operator of `torch.library`."""
    return function.__module__.startswith("torch._library")


class OwnFunctions:
    """The calls of the backward of functions behind outputs, by their names: each with its node and its gradients."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[Any, tuple[Tensor | None, ...]]]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def watch(self, output: Any) -> None:
        """Notes the calls behind `output`, for as long as its graph lives."""
        for node in functions_behind(output):
            node.register_prehook(partial(self._note, node))

    def _note(self, node: Any, gradients: tuple[Tensor | None, ...]) -> None:
        self._calls[f"the backward of {text_of(node._forward_cls.__qualname__)}"].append((node, gradients))

    def with_shares(self, uncut: OwnFunctions) -> dict[str, tuple[int, int]]:
        """Returns the functions that run more or less often than in the uncut model, with both numbers, unless the sum of what they
        return for shares is right because they are linear.
        """
        counts = {name: (len(uncut._calls[name]), len(self._calls[name])) for name in [*uncut._calls, *self._calls]}
        return {name: (ours, other) for name, (ours, other) in counts.items() if ours != other and not self._is_linear(name)}

    def _is_linear(self, name: str) -> bool:
        return all(_is_linear(node, gradients) for node, gradients in self._calls[name])


def _is_linear(node: Any, gradients: tuple[Tensor | None, ...]) -> bool:
    expected = _applied(node, gradients, 1.0)
    return all(
        torch.allclose(other, scale * unscaled, equal_nan=True)
        for scale in _SCALES
        for unscaled, other in zip(expected, _applied(node, gradients, scale), strict=True)
    )


def _applied(node: Any, gradients: tuple[Tensor | None, ...], scale: float) -> list[Tensor]:
    """Returns what the backward of `node` returns for the gradients times `scale`."""
    results = node.apply(*(gradient if gradient is None else gradient * scale for gradient in gradients))
    return [result for result in (results if isinstance(results, tuple) else (results,)) if isinstance(result, Tensor)]
