"""The state that the code around a model's parts sets after it has called a part: only the last stage runs all of this code.

The rank of the last stage shares numbers, texts, small tensors, and containers and objects of these. Uses of larger buffers raise on other
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from torch import nn

from zerobubble.errors import InputError
from zerobubble.models.observation.units import join
from zerobubble.runtime.values.released import guard
from zerobubble.runtime.values.shared_values import UnknownObjectError, received, sent, with_contents

State = dict[str, dict[str, Any]]
"""By the name of the module and of the attribute or buffer, whether it is the same object as before, and the value as `sent` returns it."""
Held = dict[str, dict[str, Any]]
"""Attributes and buffers by the name of the module."""


def held_in(model: nn.Module, names: Mapping[str, Set[str]]) -> Held:
    """Returns these attributes and buffers of the modules of `model`."""
    tables = {name: {**vars(module := model.get_submodule(name)), **module._buffers} for name in names}
    return {name: {key: tables[name][key] for key in sorted(changed) if key in tables[name]} for name, changed in names.items()}


def late_state(now: Held, before: Held) -> State:
    """Returns the attributes and buffers to send, each with a flag that is true for an object from before the call."""
    return {name: {key: (value is before[name].get(key), sent(value)) for key, value in values.items()} for name, values in now.items()}


def put_late_state(model: nn.Module, state: State) -> None:
    """Puts the `late_state` of the rank with the last stage into `model` on another rank."""
    for name, values in state.items():
        module = model.get_submodule(name)
        for attribute, (is_same, contents) in values.items():
            held = module._buffers if attribute in module._buffers else vars(module)
            value = held.get(attribute)
            if contents is not None and repr(contents) == repr(sent(value)):
                continue  # this rank runs that code, too, and its stage shares the object
            if contents is not None:
                with suppress(UnknownObjectError):
                    new = received(contents, value)
                    held[attribute] = with_contents(value, new) if is_same else new
            elif held is module._buffers and value is not None:
                guard(value, partial(_refuse, join(name, attribute)), is_old=True)


def _refuse(name: str) -> NoReturn:
    raise InputError(
        "this rank has old values of buffer {name!r}: the model's code changes it behind its first part, and only the rank of the last "
        "stage runs all of this code",
        name=name,
        remedy="read it inside `with zb.gathered(model):`, which all ranks enter",
    )
