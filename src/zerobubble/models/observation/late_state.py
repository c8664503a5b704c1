"""The state that the code around a model's parts sets after it has called a part: only the last stage runs all of this code.

The rank of the last stage shares numbers, texts, small tensors, and containers and objects of these. Uses of larger buffers raise on other
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.models.observation.following import with_contents
from zerobubble.models.observation.units import join
from zerobubble.runtime.values.released import guard

_MOST_SHARED = 4096
"""The largest number of elements of a shared tensor, and of entries of a shared container."""
_DEPTH = 4
_CONTAINERS = {kind.__name__: kind for kind in (list, tuple, set, dict)}
State = dict[str, dict[str, Any]]
"""Values as `_sent` returns them, by the name of the module and of the attribute or buffer."""


def late_state(model: nn.Module, names: Mapping[str, Set[str]]) -> State:
    """Returns the values of these attributes and buffers of the modules of `model`, to be sent."""
    return {name: _values(model.get_submodule(name), changed) for name, changed in names.items()}


def _values(module: nn.Module, names: Set[str]) -> dict[str, Any]:
    held = {**vars(module), **module._buffers}
    return {name: _sent(held[name]) for name in sorted(names) if name in held}


def _sent(value: Any, depth: int = _DEPTH) -> Any:
    """Returns `value` as a kind and its contents, None if it is not shared."""
    if value is None or type(value) in (bool, int, float, complex, str):
        return "", value
    if isinstance(value, Tensor):
        is_small = value.numel() <= _MOST_SHARED
        return ("tensor", (value.dtype, tuple(value.shape), value.detach().flatten().tolist())) if is_small else None
    if type(value) in _CONTAINERS.values():
        entries = list(value.items() if isinstance(value, dict) else value)
        kind = type(value).__name__
    elif isinstance(value, nn.Module) or callable(value) or not hasattr(value, "__dict__"):
        return None
    else:
        kind, entries = "object", list(vars(value).items())
    sent = [_sent(entry, depth - 1) for entry in entries] if depth and len(entries) <= _MOST_SHARED else [None]
    return None if None in sent else (kind, sent)


def _received(sent: Any, held: Any = None) -> Any:
    """Returns the value that was sent. What is `held` keeps its identity if it can, since the stage may share it."""
    kind, contents = sent
    if kind == "":
        return contents
    if kind == "tensor":
        dtype, shape, numbers = contents
        device = held.device if isinstance(held, Tensor) else None
        return with_contents(held, torch.tensor(numbers, dtype=dtype, device=device).reshape(shape))
    values = map(_received, contents)
    if kind == "object":
        vars(held).update(values)
        return held
    return with_contents(held, _CONTAINERS[kind](values))


def put_late_state(model: nn.Module, state: State) -> None:
    """Puts the `late_state` of the rank with the last stage into `model` on another rank."""
    for name, values in state.items():
        module = model.get_submodule(name)
        for own, sent in values.items():
            held = module._buffers if own in module._buffers else vars(module)
            value = held.get(own)
            if sent is not None and (sent[0] != "object" or hasattr(value, "__dict__")):
                held[own] = _received(sent, value)
            elif held is module._buffers and value is not None:
                guard(value, partial(_refuse, join(name, own)), is_old=True)


def _refuse(name: str) -> NoReturn:
    raise InputError(
        "this rank has old values of buffer {name!r}: the model's code changes it behind its first part, and only the rank of the last "
        "stage runs all of this code",
        name=name,
        remedy="read it inside `with zb.gathered(model):`, which all ranks enter",
    )
