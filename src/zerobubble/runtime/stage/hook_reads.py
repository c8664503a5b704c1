"""Finds hooks on parts of a cut model that store tensors where `loss_fn` looks for them: a hook runs only on the rank of its part.

Hooks that a model has before `zb.split` are observed with it. Later ones are found here, by the names in their code and in `loss_fn`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.values.used_objects import UsedPlaces, holds_tensors

Parts = Mapping[str, nn.Module]
_NO_PARTS: Parts = MappingProxyType({})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class HookReads:
    """The hooks on parts, by name, of other stages than the last: `parts` run on this rank, `other` parts on any rank.

    A call takes about 15 ns for each module in these parts until one has a hook, then up to 1 ms for each hook.
    """

    def __init__(self, loss_fn: Any = None, parts: Parts = _NO_PARTS, other: Parts = _NO_PARTS) -> None:
        self._loss_fn = loss_fn
        self._parts = _Hooked(parts)
        self._other = _Hooked(other)

    def lacking(self) -> str:
        """Returns the name of a module of another stage whose hook shares a place with `loss_fn`, empty if there is none."""
        return self._other.first(lambda _, hook: _shared(UsedPlaces(hook), UsedPlaces(self._loss_fn)))

    def stored(self) -> str:
        """Returns the name of a module of this rank whose hook has stored a tensor where `loss_fn` looks, empty if there is none."""
        return self._parts.first(lambda module, hook: _has_stored(module, UsedPlaces(hook), UsedPlaces(self._loss_fn)))


class _Hooked:
    """The modules in some parts by name, with their hooks."""

    def __init__(self, parts: Parts) -> None:
        self._modules = {name: module for part, whole in parts.items() for name, module in whole.named_modules(prefix=part)}
        self._tables = [vars(module)[kind] for module in self._modules.values() for kind in _HOOKS]

    def first(self, condition: Callable[[nn.Module, Callable[..., Any]], bool]) -> str:
        """Returns the name of the first module with a hook that meets a condition, empty if there is none."""
        if not any(self._tables):
            return ""
        modules = self._modules.items()
        return next(
            (name for name, module in modules for kind in _HOOKS for hook in vars(module)[kind].values() if condition(module, hook)), ""
        )


def _shared(hook: UsedPlaces, loss: UsedPlaces) -> bool:
    return not (hook.stored.isdisjoint(loss.contents) and hook.assigned.isdisjoint(loss.names))


def _has_stored(module: nn.Module, hook: UsedPlaces, loss: UsedPlaces) -> bool:
    places = (hook.contents.get(place) for place in hook.stored & loss.contents.keys())
    attributes = (vars(module).get(name) for name in hook.assigned & loss.names)
    return any(map(holds_tensors, (*places, *attributes)))


def hook_fault(module: str, error: Exception | None = None) -> InputError:
    """Returns the error for a hook on `module`, with the `error` of `loss_fn` if it raised one."""
    return InputError(
        "loss_fn {raises}looks for what a forward hook on {module!r} stores, but a hook runs on the rank of its part only",
        raises=f"raises {type(error).__name__}: {error}, and " if error is not None else "",
        module=module,
        remedy="return what loss_fn needs from the model's forward, which is then part of the output, or compute the term in the part, "
        "with zb.nn.add_loss",
    )
