"""Forward hooks in shape-only units, whose tensors have made-up values.

A hook may change the form of an output, so hooks run with the unit at first. A hook that only looks, such as one that logs a statistic of
an output, does not run again: the stage of the unit runs it, with the real values.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.models.observation.following import contents_of
from zerobubble.runtime.split.python_state.identity import Identity

_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class UnitHooks:
    """The forward hooks in a shape-only `unit`, except those with which Transformers records outputs."""

    def __init__(self, unit: nn.Module) -> None:
        self._tables: list[tuple[dict[int, Any], list[dict[int, Any]]]] = []
        for module in unit.modules():
            for table in (vars(module)[name] for name in _TABLES):
                watched = {number: _Hook(hook) for number, hook in table.items() if not _is_of_transformers(hook)}
                if watched:
                    table.update(watched)
                    self._tables.append((table, [vars(module)[name] for name in _OPTIONS]))

    def drop_looking(self) -> bool:
        """Removes the hooks that have run and have only looked. Returns whether there were any."""
        is_dropped = False
        for table, options in self._tables:
            for number in [number for number, hook in table.items() if isinstance(hook, _Hook) and hook.only_looks]:
                is_dropped = True
                for entries in (table, *options):
                    entries.pop(number, None)
        return is_dropped


class _Hook:
    """Runs a hook, and notes whether it returned a value, or changed the module or the tensors that it got. Deep copies share the note."""

    def __init__(self, hook: Callable[..., Any], effects: list[bool] | None = None) -> None:
        self._hook = hook
        self._effects: list[bool] = [] if effects is None else effects

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(copy.deepcopy(self._hook, memo), self._effects)

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        before = _state(module, values)
        result = self._hook(module, *values)
        self._effects.append(result is not None or _state(module, values) != before)
        return result

    @property
    def only_looks(self) -> bool:
        """Returns whether the hook has run to its end, and never had an effect."""
        return bool(self._effects) and not any(self._effects)


def _state(module: nn.Module, values: tuple[Any, ...]) -> list[Any]:
    """Returns what a hook could change of a module and of its values."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    attributes = [[(name, Identity(value), *contents_of(value)) for name, value in dict.items(vars(part))] for part in module.modules()]
    return [attributes, [(Identity(tensor), tensor._version) for tensor in (*tensors, *module.buffers())]]


def _is_of_transformers(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None)).startswith("transformers.")
