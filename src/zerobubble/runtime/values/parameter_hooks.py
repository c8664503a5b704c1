"""Takes the user's hooks on gradients from tensors, so that autograd does not call them, and puts hooks of parameters back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

ON_GRADIENT = "_backward_hooks"
"""Where torch keeps the hooks of `register_hook`. Autograd refers to the same dict."""
AFTER_ACCUMULATION = "_post_accumulate_grad_hooks"
"""Where torch keeps the hooks of `register_post_accumulate_grad_hook`."""


class TakenHooks(NamedTuple):
    """The hooks of one kind that were taken from a parameter, by number."""

    parameter: nn.Parameter
    kind: str
    hooks: dict[int, Callable[..., Any]]

    def put_back(self) -> None:
        """Puts the hooks back, before any hooks that were added since."""
        now = getattr(self.parameter, self.kind)
        added = dict(now)
        now.clear()
        now.update(self.hooks | added)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Returns whether the parameter has any hooks that were not taken: about 0.5 us."""
    return bool(getattr(parameter, ON_GRADIENT, None) or getattr(parameter, AFTER_ACCUMULATION, None))


def take_hooks(parameters: Iterable[nn.Parameter]) -> list[TakenHooks]:
    """Takes the hooks from `parameters`: about 0.5 us for a parameter without any."""
    taken = []
    for parameter in parameters:
        for kind in (ON_GRADIENT, AFTER_ACCUMULATION):
            if hooks := getattr(parameter, kind, None):
                taken.append(TakenHooks(parameter, kind, dict(hooks)))
                hooks.clear()
    return taken


@contextmanager
def hooks_set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context in which autograd calls no hook on the gradients of `parameters`."""
    taken = take_hooks(parameters)
    try:
        yield
    finally:
        for hooks in taken:
            hooks.put_back()


@contextmanager
def without_new_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context that drops the hooks registered in it on the gradients of `tensors` at its end."""
    before = [(tensor, len(tensor._backward_hooks or ())) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, number in before:
            hooks = tensor._backward_hooks
            while hooks and len(hooks) > number:
                hooks.popitem()
