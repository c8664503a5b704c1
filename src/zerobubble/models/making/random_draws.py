"""Draws and discards the random numbers of tensors without values, so that later draws equal those on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError

_aten = torch.ops.aten
_IN_ORDER = frozenset({_aten.normal_, _aten.uniform_})
"""CPU operations that draw the same numbers for a whole tensor as for its consecutive pieces, if the pieces are long."""
_IN_PLACE = _IN_ORDER | {_aten.random_, _aten.bernoulli_, _aten.exponential_, _aten.cauchy_, _aten.log_normal_, _aten.geometric_}
_NEW = {_aten.randn: _aten.normal_, _aten.randn_like: _aten.normal_, _aten.rand: _aten.uniform_, _aten.rand_like: _aten.uniform_}
"""Operations that create a random tensor, with the in-place operation that draws the same numbers."""
PIECE = 1 << 18
"""Numbers drawn at once: large enough for torch's vectorized path for long tensors, and a multiple of its block of 16."""


class DiscardedDraws:
    """Draws into one reused buffer.

    Separate buffers would fragment the freed memory, which would then stay in the process.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """Draws what `func` would draw on a CPU for its `output`, which is on the meta device."""
        operation = func._overloadpacket
        if operation in _IN_PLACE:
            self._draw(lambda tensor: func(tensor, *args[1:], **kwargs), operation in _IN_ORDER, output)
        elif operation in _NEW:
            generator = kwargs.get("generator")
            self._draw(lambda tensor: _NEW[operation](tensor, generator=generator), True, output)
        else:
            raise InputError(
                "the function that creates the model draws random numbers by {operation} for a parameter, which a rank without "
                "that parameter cannot repeat",
                operation=operation,
                remedy="give zb.split the created model",
            )

    def _draw(self, fill: Callable[[Tensor], Any], is_in_order: bool, like: Tensor) -> None:
        if not like.is_contiguous():
            fill(torch.empty_strided(like.size(), like.stride(), dtype=like.dtype))
            return
        rest = like.numel()
        while rest:
            count = PIECE if is_in_order and rest >= 2 * PIECE else rest
            fill(self._piece(count, like.dtype))
            rest -= count

    def _piece(self, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype)


def draws_numbers(func: Any) -> bool:
    """Returns whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def fills(func: Any) -> bool:
    """Returns whether an operation only draws random numbers into its first argument."""
    return func._overloadpacket in _IN_PLACE
