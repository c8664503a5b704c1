"""Nested states of optimizers in JSON form, with their tensors apart, such as the lists of preconditioners of Shampoo and SOAP.

| value | JSON form |
|---|---|
| None, a boolean, a number, text | itself |
| list | list |
| tuple | `{"tuple": [...]}` |
| dict | `{"dict": [[key, value], ...]}` |
| tensor | `{"tensor": "GG/0"}`, its path in the state |
| dtype of torch | `{"dtype": "bfloat16"}` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, type(None))
_ESCAPES = str.maketrans({"~": "~0", ".": "~1", "/": "~2", "#": "~3"})
"""Keys of a checkpoint join names and paths by dots, and paths join their steps by slashes."""


class UnknownValueError(TypeError):
    """A value that has no JSON form. `path` is its place in the state."""

    def __init__(self, path: str, value: Any) -> None:
        super().__init__(path, value)
        self.path, self.value = path, value


def encoded(value: Any, path: str = "") -> Any:
    """Returns the JSON form of `value`. Raises `UnknownValueError` for a value, or a part of it, that has none."""
    kind = type(value)
    if isinstance(value, Tensor):
        return {"tensor": path}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if kind in (list, tuple):
        entries = [encoded(entry, step) for step, entry in steps_of(value, path)]
        return entries if kind is list else {"tuple": entries}
    if kind is dict:
        return {"dict": [[encoded(key), encoded(entry, step)] for key, (step, entry) in zip(value, steps_of(value, path), strict=True)]}
    raise UnknownValueError(path, value)


def decoded(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value with this JSON form, with the tensors at their paths."""
    if isinstance(form, list):
        return [decoded(entry, tensors) for entry in form]
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "tuple":
        return tuple(decoded(entry, tensors) for entry in content)
    return {decoded(key, tensors): decoded(entry, tensors) for key, entry in content}


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Returns the tensors in a state, with their paths; those in values without a JSON form are left out."""
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) in (list, tuple, dict):
        for step, entry in steps_of(value, path):
            yield from tensors_in(entry, step)


def paths_in(form: Any) -> Iterator[str]:
    """Returns the paths of the tensors in a JSON form."""
    if isinstance(form, list):
        for entry in form:
            yield from paths_in(entry)
    elif isinstance(form, dict):
        ((kind, content),) = form.items()
        if kind == "tensor":
            yield content
        elif kind != "dtype":
            yield from paths_in(content)


def steps_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Returns the entries of a list, tuple or dict, each with its path, which no other entry has."""
    prefix = f"{path}/" if path else ""
    is_dict = isinstance(value, dict)
    for place, entry in enumerate(value):
        step = entry.translate(_ESCAPES) if is_dict and isinstance(entry, str) else f"#{place}" if is_dict else str(place)
        yield prefix + step, value[entry] if is_dict else entry


def paired(value: Any, other: Any, choose: Callable[[Any, Any], Any]) -> Any:
    """Returns `value` with each leaf replaced by `choose(leaf, leaf of other)`; the leaf of `other` is None where it has none."""
    if type(value) is dict:
        theirs = other if isinstance(other, dict) else {}
        return {key: paired(entry, theirs.get(key), choose) for key, entry in value.items()}
    if type(value) in (list, tuple):
        entries = list(other) if type(other) is type(value) and len(other) == len(value) else [None] * len(value)
        return type(value)(paired(*pair, choose) for pair in zip(value, entries, strict=True))
    return choose(value, other)
