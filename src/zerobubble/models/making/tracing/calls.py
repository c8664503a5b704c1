"""Checks the calls of a traced model: the graph is valid for the traced constants, and for the sizes allowed by torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo

from zerobubble.errors import InputError


class Calls:
    """The valid calls of a model with `forward` that was traced with `args` and `kwargs`."""

    def __init__(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._name = name
        self._signature = inspect.signature(forward)
        self.args, self.kwargs = self._bound(args, kwargs)
        self._leaves, self._structure = pytree.tree_flatten((self.args, self.kwargs))
        self._sizes: list[Sequence[Any]] = [()] * len(self._leaves)
        self._ranges: dict[Any, Any] = {}
        self._result: Any = None

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(
                "{name} is called with wrong arguments: {reason}; its arguments are {signature}",
                name=self._name,
                reason=str(error),
                signature=self._signature,
            ) from error
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def any_sizes(self) -> dict[str, Any]:
        """Returns the dynamic shapes for torch.export: automatic, for each argument by name."""
        bound = self._signature.bind(*self.args, **self.kwargs).arguments
        shapes: dict[str, Any] = pytree.tree_map(_any_size, dict(bound))
        return shapes

    def set_sizes(self, sizes: list[Sequence[Any]], ranges: dict[Any, Any], result: Any) -> None:
        """Sets the valid `sizes` of each leaf of the arguments, as numbers and symbols, and the `ranges` of the symbols.

        `result` is the structure of the result.
        """
        self._sizes, self._ranges, self._result = sizes, ranges, result

    def result(self, leaves: list[Any]) -> Any:
        """Returns the model's result with these leaves."""
        return pytree.tree_unflatten(leaves, self._result)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns the arguments as a list; raises `InputError` for a call for which the graph is not valid."""
        leaves, structure = pytree.tree_flatten(self._bound(args, kwargs))
        if structure != self._structure:
            raise self._refused(f"the arguments {_described(leaves)}", _described(self._leaves))
        size_of: dict[Any, int] = {}
        for leaf, traced, sizes in zip(leaves, self._leaves, self._sizes, strict=True):
            if isinstance(traced, Tensor):
                if not isinstance(leaf, Tensor) or leaf.dtype != traced.dtype or leaf.dim() != traced.dim():
                    raise self._refused(f"{_of_one(leaf)}", _of_one(traced))
                self._judge(leaf, sizes, size_of)
            elif type(leaf) is not type(traced) or leaf != traced:
                raise self._refused(repr(leaf), repr(traced))
        return leaves

    def _judge(self, leaf: Tensor, sizes: Sequence[Any], size_of: dict[Any, int]) -> None:
        for size, traced in zip(leaf.shape, sizes, strict=True):
            if isinstance(traced, int):
                fits = size == traced
            elif traced.is_symbol:
                lower, upper = self._limits(traced)
                fits = size_of.setdefault(traced, size) == size and lower <= size <= upper
            else:
                fits = traced.subs(size_of) == size
            if not fits:
                raise self._refused(f"a tensor of shape {list(leaf.shape)}", self._shown(sizes))

    def _limits(self, symbol: Any) -> tuple[float, float]:
        """Returns the valid range of sizes. A lower limit of 2 only means that torch has not tried 1, which is valid too."""
        limits = self._ranges.get(symbol)
        if limits is None:
            return 1, math.inf
        return (1 if limits.lower <= 2 else int(limits.lower)), (math.inf if limits.upper == int_oo else int(limits.upper))

    def _shown(self, sizes: Sequence[Any]) -> str:
        symbols = [size for size in sizes if not isinstance(size, int) and size.is_symbol]
        names = {symbol: f"size {number}" for number, symbol in enumerate(symbols, 1)}
        limits = [f"{names[symbol]} is from {lower} to {upper}" for symbol in symbols for lower, upper in [self._limits(symbol)]]
        shown = ", ".join(names.get(size, str(size)) for size in sizes)
        return f"a tensor of shape [{shown}] where {' and '.join(limits)}" if limits else f"a tensor of shape [{shown}]"

    def _refused(self, actual: str, traced: str) -> InputError:
        return InputError(
            "{name} was traced by torch.export, because it has too few parts, and its graph is valid for {traced}, got {given}",
            name=self._name,
            traced=traced,
            given=actual,
            remedy="give zb.split(model, example=...) arguments as in step, with the sizes of a microbatch",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return self  # immutable


def _any_size(leaf: Any) -> Any:
    return dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO) if isinstance(leaf, Tensor) else None


def _described(leaves: Sequence[Any]) -> str:
    return "(" + ", ".join(map(_of_one, leaves)) + ")"


def _of_one(leaf: Any) -> str:
    return f"{leaf.dtype} of {leaf.dim()} dimensions" if isinstance(leaf, Tensor) else repr(leaf)
