"""Deep copies of modules, including modules that keep computed tensors from an earlier forward."""

from __future__ import annotations

import copy
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerobubble.runtime.values.released import is_old, values_of
from zerobubble.runtime.values.sparse import is_compressed
from zerobubble.runtime.values.stateful import is_wrapper, own_type, parts_of_wrapper, state_of, stateful_tensors

Value = TypeVar("Value")


def copy_of(value: Value, others: dict[int, Any] | None = None) -> Value:
    """Returns a deep copy of `value`, such as a module. `others` is the memo: replacements by id, extended by the copied objects.

    Computed tensors that a forward left in the module, such as a recurrent state, are copied detached: `copy.deepcopy` refuses non-leaf
    tensors. It also refuses tensors of compressed sparse layouts.
    """
    with _WithoutGradients():
        copied: Value = _deep(value, {} if others is None else others)
        return copied


def other_tensors(module: nn.Module, like: Callable[[Tensor], Tensor]) -> dict[int, Any]:
    """Returns a memo for a deep copy: replacements of the parameters and buffers of `module`, and of their state, by id.

    `like` returns a tensor in other memory for a plain tensor or a DTensor. Parameters stay parameters, and require no grad. A stateful
    tensor keeps its class and its attributes. Raises `InputError` for a stateful tensor that cannot be taken apart.
    """
    memo: dict[int, Any] = {}
    stateful: dict[int, Tensor] = {}
    for path, part in module.named_modules():
        stateful |= {id(tensor): tensor for tensor in stateful_tensors(part).values()}
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            other = _stateful_like(tensor, like, f"{path}.{name}".strip(".")) if id(tensor) in stateful else like(tensor)
            is_bare = isinstance(tensor, nn.Parameter) and not isinstance(other, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(other, requires_grad=False) if is_bare else other
        memo |= {id(tensor): like(tensor) for _, tensor in state_of(part) if id(tensor) not in memo}
    inside = set(module.modules())
    values = [value for tensor in stateful.values() for value in tensor.__dict__.values()]
    memo |= {id(value): value for value in values if isinstance(value, nn.Module) and value not in inside}
    _copy_attributes(stateful, memo)
    return memo


def _copy_attributes(stateful: Mapping[int, Tensor], memo: dict[int, Any]) -> None:
    """Copies the attributes of stateful tensors, given by id, to their replacements in `memo`."""
    for key, tensor in stateful.items():
        for name, value in tensor.__dict__.items():
            if not type(value).__module__.startswith("zerobubble."):  # ours, such as the note that a tensor is released
                memo[key].__dict__[name] = copy_of(value, memo)  # one by one: the memo knows objects by id, so they must stay alive


def _stateful_like(tensor: Tensor, like: Callable[[Tensor], Tensor], name: str) -> Tensor:
    """Returns a tensor of the class of a stateful `tensor`, with memory from `like`, and the attributes that a wrapper needs."""
    kind = own_type(tensor)
    if not is_wrapper(tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor._make_subclass(kind, like(tensor.detach()), False)
    parts = parts_of_wrapper(tensor).items()
    inner = {part: _stateful_like(value, like, name) if is_wrapper(value) else like(value) for part, value in parts}
    context, flat = tensor.__tensor_flatten__()[1], kind.__tensor_unflatten__  # type: ignore[attr-defined]
    wrapper: Tensor = flat(inner, context, tensor.shape, tensor.stride())
    return wrapper


_COMPILED = frozenset({"_compiled_call_impl"})
"""Set by `module.compile()` and bound to the original module: torch's own copies omit it too."""
_SAME = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, FunctionType, type})
"""Types that `copy.deepcopy` returns unchanged."""
_HOW_TO_COPY = ("__deepcopy__", "__copy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getattribute__", "__new__")


def _deep(value: Any, memo: dict[int, Any]) -> Any:
    """Like `copy.deepcopy`, but several times faster for modules, because it skips the empty dicts of hooks."""
    kind: Any = type(value)
    if kind in _SAME:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in (dict, OrderedDict):
        copied = memo[id(value)] = kind()
        copied.update((_deep(key, memo), _deep(item, memo)) for key, item in value.items())
    elif isinstance(value, nn.Module) and _is_copied_as_others(kind):
        copied = memo[id(value)] = object.__new__(kind)
        copied.__dict__.update((name, _deep(attribute, memo)) for name, attribute in value.__dict__.items() if name not in _COMPILED)
    elif isinstance(value, Tensor) and is_old(value):
        copied = memo[id(value)] = values_of(value)
    else:
        copied = _with_handles(value, memo)
    return copied


def _with_handles(value: Any, memo: dict[int, Any]) -> Any:
    """Returns a deep copy that shares what has no copy, such as a lock or a process group."""
    while True:
        size = len(memo)
        try:
            return copy.deepcopy(value, memo)
        except TypeError as error:
            handle = _handle_of(error)
            if handle is None:
                raise
            while len(memo) > size:  # unfinished copies
                memo.popitem()
            memo[id(handle)] = handle


def _handle_of(error: TypeError) -> Any:
    """Returns the object that `copy.deepcopy` could not copy; None if its class raised the error, or for an iterator, which has a state."""
    copied = [frame.f_locals["x"] for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is copy.deepcopy.__code__]
    value = copied[-1] if copied else None
    return None if isinstance(value, Iterator) or hasattr(value, "__deepcopy__") else value


@cache
def _is_copied_as_others(kind: type[nn.Module]) -> bool:
    """Returns whether a module class has no custom copy methods."""
    has_slots = any(getattr(base, "__slots__", ()) for base in kind.__mro__)
    return not has_slots and all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in _HOW_TO_COPY)


class _WithoutGradients(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not Tensor.__deepcopy__ or (args[0].is_leaf and not is_compressed(args[0])):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]
