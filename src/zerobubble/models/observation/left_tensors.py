"""Refuses tensors that a unit stores elsewhere than in its output, naming their location and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zerobubble.errors import InputError


def refuse_left(unit: str, left: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises `InputError` if a unit has `left` tensors elsewhere than in its output, naming the argument that holds one."""
    if not left:
        return
    refuse_left_in_arguments(unit, left, args, kwargs)
    raise InputError(
        f"{_LEAVES.format(unit)} with a hook or a global variable that records them; {_WOULD_LACK}: switch that off (as "
        "output_router_logits, output_hidden_states and output_attentions of Transformers can be), or let the part return what others need"
    )


def refuse_left_in_arguments(unit: str, made: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises `InputError` if an argument of a unit holds tensors that the unit has `made`."""
    wanted = set(map(id, made))
    for name, value in (*enumerate(args), *kwargs.items()):
        if any(id(tensor) in wanted for tensor in _tensors_inside(value)):
            raise InputError(
                f"{_LEAVES.format(unit)} in its argument {name!r}, which is of type {type(value).__name__}; {_WOULD_LACK}: do not "
                "pass it to the part (use_cache=False of Transformers does so for most models), or let the part return what "
                "others need"
            )


_LEAVES = "part {!r} stores tensors elsewhere than in its output,"
_WOULD_LACK = "stages without this part would lack them"


def _tensors_inside(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in `value`, its attributes and nested containers, except those of modules."""
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (nn.Module, type)):
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            left += each
        left += getattr(each, "__dict__", {}).values()
