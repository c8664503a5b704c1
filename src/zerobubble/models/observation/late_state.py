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
"""Values as `sent` returns them, by the name of the module and of the attribute or buffer."""


def late_state(model: nn.Module, names: Mapping[str, Set[str]]) -> State:
    """Returns the values of these attributes and buffers of the modules of `model`, to be sent."""
    return {name: _values(model.get_submodule(name), changed) for name, changed in names.items()}


def _values(module: nn.Module, names: Set[str]) -> dict[str, Any]:
    held = {**vars(module), **module._buffers}
    return {name: sent(held[name]) for name in sorted(names) if name in held}


def put_late_state(model: nn.Module, state: State) -> None:
    """Puts the `late_state` of the rank with the last stage into `model` on another rank."""
    for name, values in state.items():
        module = model.get_submodule(name)
        for own, contents in values.items():
            held = module._buffers if own in module._buffers else vars(module)
            value = held.get(own)
            if contents is not None:
                with suppress(UnknownObjectError):
                    held[own] = with_contents(value, received(contents, value))
            elif held is module._buffers and value is not None:
                guard(value, partial(_refuse, join(name, own)), is_old=True)


def _refuse(name: str) -> NoReturn:
    raise InputError(
        "this rank has old values of buffer {name!r}: the model's code changes it behind its first part, and only the rank of the last "
        "stage runs all of this code",
        name=name,
        remedy="read it inside `with zb.gathered(model):`, which all ranks enter",
    )
