"""What units record beside their output: hidden states, attentions and router logits, where a model of Transformers is asked for them.

Transformers does not return these from layer to layer. The forward of a model that is asked for them has a collector, lists of its own by
the names of its outputs, and hooks in the layers append to it. The law: what is appended during a call of a unit is part of what that call
gives. So it crosses boundaries with it, and the stand-in of the unit appends the same.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Recorded = dict[str, list[Any]]
"""What was appended, by the name of the model's output."""

_HAS_HOOKS = "_output_capturing_hooks_installed"


def active_lists() -> Recorded:
    """The lists to which hooks append now; empty where the forward that runs was asked for nothing."""
    collected = _collector().get() if _capturing() is not None else None
    return {name: kept for name, kept in collected.items() if isinstance(kept, list)} if collected else {}


def what_is_recorded() -> tuple[Any, ...]:
    """What decides what a unit records: which outputs are asked for, of which layers, and how much there is already."""
    collected = _collector().get() if _capturing() is not None else None
    return tuple((name, len(kept) if isinstance(kept, list) else repr(kept)) for name, kept in (collected or {}).items())


class Recorder:
    """Tells call by call what was recorded since the call before."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[list[Any], int]] = {}  # with the lists, so that no other gets the id of one

    def since_last(self) -> Recorded:
        """What was appended to the active lists since this was asked last."""
        found = {}
        for name, kept in active_lists().items():
            _, start = self._seen.get(id(kept), (kept, 0))
            found[name] = kept[start:]
            self._seen[id(kept)] = (kept, len(kept))
        return found

    def append(self, recorded: Mapping[str, list[Any]]) -> None:
        """Append to the active lists what a unit did elsewhere, which is not told again."""
        lists = active_lists()
        for name, entries in recorded.items():
            lists[name].extend(entries)
        self.since_last()


@contextmanager
def recording_apart() -> Iterator[Recorded]:
    """Inside, hooks append to other lists, with the same beginning; afterwards what it gives has what was appended."""
    before, appended = active_lists(), Recorded()
    if not before:
        yield appended
        return
    apart = {name: list(kept) if isinstance(kept, list) else kept for name, kept in _collector().get().items()}
    token = _collector().set(apart)
    try:
        yield appended
    finally:
        _collector().reset(token)
        appended |= {name: apart[name][len(kept) :] for name, kept in before.items()}


def models_with_hooks(model: nn.Module) -> frozenset[str]:
    """The names of the models in `model` whose layers have the hooks; Transformers makes them when a forward is first asked for outputs."""
    return frozenset(name for name, module in model.named_modules() if module.__dict__.get(_HAS_HOOKS))


def make_hooks(model: nn.Module, names: Collection[str]) -> None:
    """Let the layers of the models of these names in `model` have the hooks, which are those that Transformers makes."""
    chosen = [module for name, module in model.named_modules() if name in names]
    for module in chosen:
        module.__dict__.pop(_HAS_HOOKS, None)
    for module in chosen:  # models before those in them, which get theirs with them
        _capturing().maybe_install_capturing_hooks(module)


def _capturing() -> Any:
    return sys.modules.get("transformers.utils.output_capturing")


def _collector() -> Any:
    return _capturing()._active_collector
