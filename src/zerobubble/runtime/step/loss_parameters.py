"""Parameters that a `loss_fn` trains and no stage holds: no optimizer, norm, checkpoint or replica would know of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from zerobubble.errors import InputError


def refuse_untaken(loss: Tensor, made_of: Iterable[Tensor], held: Iterable[Tensor]) -> None:
    """Raise `InputError` where the `loss` depends on a parameter by another way than the tensors it is `made_of`, which is not `held`.

    Only the graph between these tensors and the loss is walked, once for each node.
    """
    known = {id(tensor) for tensor in held}
    seen = {None, *(tensor.grad_fn for tensor in made_of)}
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, nn.Parameter) and id(parameter) not in known:
            raise InputError(
                f"loss_fn trains a parameter of shape {tuple(parameter.shape)} that no stage holds, so that no optimizer, checkpoint or "
                "replica would know of it: give the nn.Module that holds it as loss_fn, or put it into the last stage"
            )
        left += [following for following, _ in node.next_functions]
