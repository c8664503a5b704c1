"""Outputs that units record: hidden states, attentions and router logits of Transformers models.

Transformers does not return these from layer to layer. A forward that requests them sets a collector, a dict of lists by output name, and
hooks in the layers append to these lists. A value appended during a call of a unit counts as part of the unit's output. So it crosses stage
boundaries with the output, and on other stages the unit's stand-in appends the same value.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Recorded = dict[str, list[Any]]
"""Appended values, by the name of the model's output."""

_HAS_HOOKS = "_output_capturing_hooks_installed"
"""The attribute with which Transformers marks a model whose layers have hooks."""


def active_lists() -> Recorded:
    """Returns the lists to which hooks append; empty if the current forward requests nothing."""
    collected = _collector().get() if _capturing() is not None else None
    return {name: kept for name, kept in collected.items() if isinstance(kept, list)} if collected else {}


def recording_state() -> tuple[Any, ...]:
    """Returns the state that determines what a unit records: the requested outputs and layers, and the current list lengths."""
    collected = _collector().get() if _capturing() is not None else None
    return tuple((name, len(kept) if isinstance(kept, list) else repr(kept)) for name, kept in (collected or {}).items())


class Recorder:
    """Keeps track of which recorded values are new."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[list[Any], int]] = {}  # keeps the lists alive, so that ids stay unique

    def since_last(self) -> Recorded:
        """Returns the values appended to the active lists since the last call."""
        appended = {}
        for name, kept in active_lists().items():
            _, start = self._seen.get(id(kept), (kept, 0))
            appended[name] = kept[start:]
            self._seen[id(kept)] = (kept, len(kept))
        return appended

    def append(self, recorded: Mapping[str, list[Any]]) -> None:
        """Appends the values that a unit recorded on another stage; `since_last` skips them."""
        lists = active_lists()
        for name, entries in recorded.items():
            lists[name].extend(entries)
        self.since_last()


@contextmanager
def recording_separately() -> Iterator[Recorded]:
    """A context in which hooks append to copies of the lists. At its end, the yielded dict has the appended values."""
    before, appended = active_lists(), Recorded()
    if not before:
        yield appended
        return
    separate = {name: list(kept) if isinstance(kept, list) else kept for name, kept in _collector().get().items()}
    token = _collector().set(separate)
    try:
        yield appended
    finally:
        _collector().reset(token)
        appended |= {name: separate[name][len(kept) :] for name, kept in before.items()}


def models_with_hooks(model: nn.Module) -> frozenset[str]:
    """Returns the names of the models in `model` whose layers have hooks. Transformers installs them at the first request for outputs."""
    return frozenset(name for name, module in model.named_modules() if module.__dict__.get(_HAS_HOOKS))


def install_hooks(model: nn.Module, names: Collection[str]) -> None:
    """Installs Transformers' own hooks in the layers of the named models in `model`."""
    chosen = [module for name, module in model.named_modules() if name in names]
    for module in chosen:
        module.__dict__.pop(_HAS_HOOKS, None)
    for module in chosen:  # outer models first: nested ones get their hooks with them
        _capturing().maybe_install_capturing_hooks(module)


def _capturing() -> Any:
    return sys.modules.get("transformers.utils.output_capturing")


def _collector() -> Any:
    return _capturing()._active_collector
